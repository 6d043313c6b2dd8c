"""All settings of a broker with their defaults; flags derive from them."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from srtm.protocol.names import Settings


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """What a broker is told at its start."""

    host: str = "127.0.0.1"
    tcp_port: int = 4150
    http_port: int = 4151
    name: str = field(default_factory=socket.gethostname)
    broadcast_address: str | None = None
    lookupd: tuple[str, ...] = ()
    settings: Settings = field(default_factory=Settings)
    # A topic that holds more than this, waiting for tokens or for subscribers, stops reading its publishers.
    max_held_messages: int = 100_000
    max_held_bytes: int = 256 * 1024 * 1024
    # What may be written to a subscriber that does not read; beyond it, it gets no more messages.
    max_unsent_bytes: int = 1024 * 1024
    read_size: int = 256 * 1024
    backlog: int = 1024
