"""Coverage-guided fuzzing of every parser: `pip install atheris`, then `python tests/protocol/fuzz_atheris.py`.

Run by hand, not by pytest; libFuzzer's options work, as in `-max_total_time=60`. The first byte picks the parser, the
second how the rest is cut. Whole and in pieces it must give the same, raise nothing and keep little.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

atheris: Any = importlib.import_module("atheris")  # without types, and not among what tests install

with atheris.instrument_imports(include=["srtm.protocol"]):
    from srtm.errors import ProtocolError
    from srtm.protocol.client import ClientProtocol
    from srtm.protocol.lookup import LookupClient, LookupServer
    from srtm.protocol.names import MAGIC_V1, MAGIC_V2, MAX_LINE, Settings
    from srtm.protocol.server import ServerProtocol

LIMIT = 256


def server() -> Any:
    protocol = ServerProtocol(Settings(max_msg_size=64, max_body_size=LIMIT, auth_required=True))
    protocol.feed(MAGIC_V2)
    return protocol


def lookup_server() -> Any:
    protocol = LookupServer()
    protocol.feed(MAGIC_V1)
    return protocol


MAKERS: list[Callable[[], Any]] = [
    server,
    server,
    server,
    lookup_server,
    lambda: ClientProtocol(LIMIT),
    lambda: LookupClient(LIMIT),
]


def read(protocol: Any, data: bytes, size: int) -> list[object]:
    found = []
    for i in range(0, len(data), size):
        events = protocol.feed(data[i : i + size])
        while getattr(protocol, "paused", False):
            events += protocol.feed(protocol.take_unparsed())
        found += [event.wire if isinstance(event, ProtocolError) else event for event in events]
        assert protocol.buffered <= MAX_LINE + 4 + 64 * 1024
    return found


def one(data: bytes) -> None:
    if len(data) < 3:
        return
    make = MAKERS[data[0] % len(MAKERS)]
    rest = data[2:]
    # An error frame carries bytes, and errors compare by identity: compare what they say.
    assert repr(read(make(), rest, 1 + data[1] % 9)) == repr(read(make(), rest, len(rest)))


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
