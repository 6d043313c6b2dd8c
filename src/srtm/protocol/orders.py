"""Orders: what an SRTM broker tells publishers that declared themselves in IDENTIFY.

In: an order. Out: the data of an ordinary response frame, `_srtm_ ` and a JSON object; and the reverse.

    _srtm_ {"order":"throttle","topic":"t","retry_after_ms":20}
    _srtm_ {"order":"migrate","topic":"t","to":["10.0.0.2:4150"]}

A client ignores orders of an unknown kind, so brokers may be newer than clients.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from srtm.errors import ProtocolError
from srtm.protocol import frames, gojson

PREFIX: Final = b"_srtm_ "


class Throttle(NamedTuple):
    """Publish nothing to the topic for this long; 0 ends a throttle."""

    topic: str
    retry_after_ms: int


class Migrate(NamedTuple):
    """From now on publish the topic to one of these brokers (host:port), the best first."""

    topic: str
    to: tuple[str, ...]


Order = Throttle | Migrate


def encode(order: Order) -> bytes:
    """Return the response frame of an order."""
    return frames.response(PREFIX + gojson.write({"order": type(order).__name__.lower(), **order._asdict()}))


def decode(data: bytes) -> Order | None:
    """Decode the data of a response that starts with PREFIX; None for an unknown kind of order."""
    try:
        found = json.loads(data[len(PREFIX) :])
        kind, topic = found["order"], _typed(found["topic"], str)
        if kind == "throttle":
            return Throttle(topic, max(0, _typed(found["retry_after_ms"], int)))
        if kind == "migrate":
            return Migrate(topic, tuple(_typed(address, str) for address in _typed(found["to"], list)))
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ProtocolError("E_INVALID", "cannot decode order", data=data) from None
    return None


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value
