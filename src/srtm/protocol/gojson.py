"""JSON as nsqd reads it: an object into named fields of fixed types, by the rules of Go's encoding/json.

In: bytes of a peer. Out: a value for every requested field. Keys match in any case, unknown keys are ignored, null
leaves the default, a number with a fraction or an exponent is not an integer, and invalid UTF-8 becomes U+FFFD.
"""

from __future__ import annotations

import json
import re
from typing import Any

Fields = dict[str, Any]

_SURROGATES = re.compile("[\ud800-\udfff]")


def read(body: bytes, defaults: Fields, *, int32: frozenset[str] = frozenset()) -> Fields:
    """Return the fields of `defaults`, each with its default's type; ValueError for input that Go would refuse.

    A field whose default is None accepts any value.
    """
    try:
        found = json.loads(body.decode("utf-8", "replace"), parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    fields = dict(defaults)
    if found is None:
        return fields
    if not isinstance(found, dict):
        raise ValueError("not an object")
    for key, value in found.items():
        name = key.lower()
        if name not in fields or value is None:
            continue
        kind = type(defaults[name])
        if kind is type(None):
            fields[name] = value
            continue
        if type(value) is not kind:
            raise ValueError(f"{name} must be of type {kind.__name__}")
        if kind is int:
            bits = 31 if name in int32 else 63
            if not -(2**bits) <= value < 2**bits:
                raise ValueError(f"{name} is out of range")
        fields[name] = text(value) if kind is str else value
    return fields


def text(value: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return _SURROGATES.sub("\ufffd", value)


def write(value: Any) -> bytes:
    """Return compact JSON, with keys in the given order."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
