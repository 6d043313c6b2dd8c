"""Addresses of stores: `sqlite:FOLDER`, or `nats://host:4222,host:4222/bucket` with the options of an engine's address.

In: the text of `--store`. Out: the place, or an InputError that shows the syntax.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from srtm.errors import InputError
from srtm.protocol import engine

if TYPE_CHECKING:
    from srtm.control.keeping.keeper import Keeping
    from srtm.protocol.engine import EngineAddress

_SQLITE = "sqlite:"
_BUCKET = "srtm"
_VARIABLE = "SRTM_STORE"
_SYNTAX = "write sqlite:FOLDER or nats://host:4222,host:4222/bucket"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where a store is: in a folder, or in a bucket of these servers; in memory if neither is given."""

    folder: str | None = None
    servers: EngineAddress | None = None
    bucket: str = _BUCKET
    replicas: int | None = None

    @property
    def shared(self) -> bool:
        """Whether several controllers may use it."""
        return self.servers is not None

    def __str__(self) -> str:
        """Return the address without secrets."""
        return (
            f"{self.servers}/{self.bucket}" if self.servers else f"{_SQLITE}{self.folder}" if self.folder else "memory"
        )


def parse(text: str) -> StoreAddress:
    """Return the store that a flag names; InputError shows the syntax."""
    if text.startswith(_SQLITE):
        if not (folder := text.removeprefix(_SQLITE)):
            raise InputError(f"invalid store {text!r}: the folder is missing; {_SYNTAX}")
        return StoreAddress(folder)
    hidden = engine.hidden(text)
    scheme, found, rest = text.partition("://")
    place, mark, query = rest.partition("?")
    servers, slash, bucket = place.partition("/")
    if not found or not servers or (slash and not re.fullmatch(r"[A-Za-z0-9_-]+", bucket)):
        raise InputError(f"invalid store {hidden!r}: {_SYNTAX}")
    try:
        address = engine.parse(f"{scheme}://{servers}{mark}{query}")
    except InputError as problem:
        raise InputError(str(problem).replace("engine", "store", 1)) from None
    if address is None or address.kind != "nats":
        raise InputError(f"invalid store {hidden!r}: {_SYNTAX}")
    replicas = address.replicas if "replicas" in parse_qs(query) else None
    return StoreAddress(None, replace(address, variable=_VARIABLE), bucket or _BUCKET, replicas)


def keeping(store: StoreAddress, *, anew: bool = False, lease_s: float | None = None) -> Keeping:
    """The place of a store; `anew` starts an empty one in a folder, and keeps the old file beside it."""
    if store.servers is None:
        from srtm.control.keeping.sqlite import SqliteKeeping

        return SqliteKeeping(store.folder, anew=anew)
    from srtm.control.keeping.bucket import Bucket
    from srtm.control.keeping.jetstream import JetStreamKeeping
    from srtm.control.keeping.lease import LEASE_S

    return JetStreamKeeping(Bucket(store.servers, store.bucket, store.replicas), lease_s or LEASE_S)
