"""What a load sends, and where."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from srtm.client.connection import ConnectionOptions
from srtm.errors import InputError
from srtm.net.sockets import split_address
from srtm.protocol import client as say
from srtm.protocol.names import EPHEMERAL
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from srtm.workload.publishers import Workload

SMALLEST = 20  # bytes of a body: [run 8][publisher 4][number 8]
_MOST = 100_000_000  # messages: each takes 8 bytes until the end
# No output buffer: an nsqd would hold messages there for up to 250 ms, which is not what a load measures.
CONNECTION = ConnectionOptions(heartbeat_ms=30_000, timeout_s=10.0, identity={"output_buffer_size": -1})


def own_channel() -> str:
    """Return a channel that no other load uses: loads that share one take each other's messages."""
    return f"load-{secrets.token_hex(4)}{EPHEMERAL}"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to send, and where; without brokers, the controller decides."""

    topic: str
    workload: Workload
    size: int = 64
    channel: str | None = field(default_factory=own_channel)  # None: do not subscribe
    brokers: tuple[str, ...] = ()
    settle_s: float = 5.0  # silence after which missing messages count as lost
    patience_s: float = 10.0  # for reaching the first broker
    split: bool = False  # whether publishers may be split over several connections
    declare: bool = True  # whether publishers declare their groups and traffic; if not, only their names
    engine: str | None = field(default=None, repr=False)  # login and TLS files for a delivery engine

    def __post_init__(self) -> None:
        """Reject impossible values before connecting anywhere."""
        say.sub(self.topic, self.channel or "none")
        for address in self.brokers:
            split_address(address)
        if self.size < SMALLEST:
            raise InputError(f"size = {self.size}: a message of a load needs at least {SMALLEST} bytes")
        if len(self.workload.populations) != 1:
            raise InputError(f"a load needs one population of publishers, not {len(self.workload.populations)}")
        expected = self.workload.total_mps * self.workload.duration_ns / NS_PER_S
        if expected > _MOST:
            raise InputError(
                f"about {expected:,.0f} messages exceed the limit of {_MOST:,}: send for less time, or less"
            )
