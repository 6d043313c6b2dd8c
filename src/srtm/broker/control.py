"""What the control plane asks of a broker: to put a share in force, and to send publishers elsewhere.

A grant carries an epoch (of the controller) and a sequence (of the topic). It is put in force once: the same one again
gets the same answer, and an older one is refused. The answer says how many nano-tokens had to be given up, which travel
with the next grant that enlarges a share (`model.transfer`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from srtm.errors import BrokerError, InputError
from srtm.model.bucket import Limiter, TokenBucket
from srtm.protocol.names import valid_name
from srtm.protocol.orders import Migrate, Throttle, encode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from srtm.broker.connection import Connection
    from srtm.broker.ioloop import Broker
    from srtm.broker.topic import Topic

_LONGEST_MS = 10_000  # that a publisher is told to wait before it may try again
_UNKNOWN_MS = 100  # where nobody can say when a topic will have room


@dataclass(frozen=True, slots=True)
class GrantOrder:
    """A share for a topic here, or none; `gift_ntok` are tokens that come along."""

    topic: str
    epoch: int
    sequence: int
    share: TokenBucket | None
    gift_ntok: int = 0

    @classmethod
    def read(cls, document: Any) -> GrantOrder:
        """The order in a JSON document with these fields, the share as r_mtps and b_ntok: null to give it up."""
        if not isinstance(document, dict):
            raise InputError("a grant is a JSON object")
        numbers = {}
        for name in ("epoch", "sequence", "gift_ntok"):
            value = document.get(name, 0 if name == "gift_ntok" else None)
            if type(value) is not int or value < 0:
                raise InputError(f"{name} must be a whole number of at least 0, not {value!r}")
            numbers[name] = value
        topic, r_mtps, b_ntok = (document.get(name) for name in ("topic", "r_mtps", "b_ntok"))
        if not isinstance(topic, str) or not valid_name(topic):
            raise InputError(f"topic must be the name of one, not {topic!r}")
        if (r_mtps is None) != (b_ntok is None):
            raise InputError("give r_mtps and b_ntok, or neither")
        share = None if r_mtps is None else TokenBucket(r_mtps, b_ntok)  # type: ignore[arg-type]
        return cls(topic, numbers["epoch"], numbers["sequence"], share, numbers["gift_ntok"])


class Control:
    """Grants that are in force at a broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._last: dict[str, tuple[tuple[int, int], dict[str, int]]] = {}

    def grant(self, order: GrantOrder, now_ns: int) -> dict[str, int]:
        """Put a share in force; the answer for its sender."""
        stamp = (order.epoch, order.sequence)
        known, answer = self._last.get(order.topic, ((-1, -1), {}))
        if stamp == known:
            return answer
        if stamp < known:
            raise BrokerError(f"epoch {order.epoch}, sequence {order.sequence} comes after {known[0]}, {known[1]}")
        topic = self._broker.touch(order.topic)
        if topic.limiter is None and order.share is not None:
            topic.limiter = Limiter(order.share, now_ns, order.gift_ntok)  # no more than what came along
            surrendered = max(0, order.gift_ntok - order.share.b_ntok)
        else:
            surrendered = topic.limit(order.share, now_ns, order.gift_ntok)
        self._broker.wake()
        answer = {"epoch": order.epoch, "sequence": order.sequence, "surrendered_ntok": surrendered}
        self._last[order.topic] = stamp, answer
        return answer

    def migrate(self, topic: str, publishers: Iterable[str], to: tuple[str, ...]) -> list[str]:
        """Tell publishers to go on elsewhere; those who are not here, or would not understand, are returned."""
        here: dict[str, list[Connection]] = {}
        for connection in self._broker.connections.values():
            if connection.protocol.identity.srtm:
                here.setdefault(connection.publisher, []).append(connection)
        missing = []
        for publisher in publishers:
            for connection in here.get(publisher, ()):
                connection.send(encode(Migrate(topic, to)))
            if publisher not in here:
                missing.append(publisher)
        self._broker.wake()
        return missing


def throttled(connection: Connection, topic: Topic) -> None:
    """Tell a client of SRTM's why its topic is not read any more, and for about how long."""
    if connection.protocol.identity.srtm is None:
        return
    limiter = topic.limiter
    half = len(topic.waiting) // 2
    wait_ms = round(half * 1_000_000 / limiter.bucket.r_mtps) if limiter and half else _UNKNOWN_MS
    connection.send(encode(Throttle(topic.name, max(1, min(wait_ms, _LONGEST_MS)))))
