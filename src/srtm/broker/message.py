"""A message inside the broker, and the numbers that ids are made of."""

from __future__ import annotations

from itertools import chain, count
from typing import TYPE_CHECKING

from srtm.protocol.frames import message_id

if TYPE_CHECKING:
    from collections.abc import Iterator

_TAILS = [b"%02x" % number for number in range(256)]


class Message:
    """One message in one channel; topics hold it before it has been copied to channels.

    `arrival_ns` is the kernel's receive time of the read that completed it, `release_ns` when its bucket let it go.
    `taken_ns` and `deadline_ns` are there while a consumer has it: since when, and until when.
    """

    __slots__ = (
        "arrival_ns",
        "attempts",
        "body",
        "deadline_ns",
        "delay_ns",
        "id",
        "offset",
        "publisher",
        "release_ns",
        "sent_ns",
        "taken_ns",
    )

    taken_ns: int
    deadline_ns: int

    def __init__(self, id: bytes, arrival_ns: int, body: bytes, publisher: str, delay_ns: int = 0) -> None:  # noqa: A002
        self.id = id
        self.arrival_ns = arrival_ns
        self.release_ns = arrival_ns
        self.sent_ns = 0
        self.body = body
        self.publisher = publisher
        self.delay_ns = delay_ns
        self.attempts = 0
        self.offset = -1  # in the log of a topic on disk

    def copy(self) -> Message:
        """The same for another channel: deliveries are counted apart."""
        twin = Message(self.id, self.arrival_ns, self.body, self.publisher, self.delay_ns)
        twin.release_ns = self.release_ns
        twin.offset = self.offset
        return twin


def ids(start: int) -> Iterator[bytes]:
    """Ids that never repeat in this process; each starts at a random number, because clocks may be set back.

    An engine that has an id already takes its message for a copy, and drops it.
    """
    first = (start & (2**63 - 1)) >> 8
    return chain.from_iterable(map(_block, count(first)))


def _block(number: int) -> list[bytes]:
    """256 ids in a row: together, they take a third of the time."""
    head = message_id(number)[2:]
    return [head + tail for tail in _TAILS]
