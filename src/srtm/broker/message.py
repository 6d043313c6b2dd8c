"""A message inside the broker, and the numbers that ids are made of."""

from __future__ import annotations

from typing import Final

from srtm.protocol.frames import Outgoing, message_id

_TAILS: Final = [b"%02x" % number for number in range(255, -1, -1)]


class Message(Outgoing):
    """One message in one channel; topics hold it before it has been copied to channels.

    `arrival_ns` is the kernel's receive time of the read that completed it, `release_ns` when its bucket let it go.
    `taken_ns` and `deadline_ns` are there while a consumer has it: since when, and until when.
    """

    __slots__ = (
        "deadline_ns",
        "delay_ns",
        "offset",
        "publisher",
        "release_ns",
        "sent_ns",
        "taken_ns",
    )

    taken_ns: int
    deadline_ns: int

    def __init__(self, id: bytes, arrival_ns: int, body: bytes, publisher: str, delay_ns: int = 0) -> None:  # noqa: A002
        self.arrival_ns = arrival_ns
        self.attempts = 0
        self.id = id
        self.body = body
        self.release_ns = arrival_ns
        self.sent_ns = 0
        self.publisher = publisher
        self.delay_ns = delay_ns
        self.offset = -1  # in the log of a topic on disk

    def copy(self) -> Message:
        """The same for another channel: deliveries are counted apart."""
        twin = Message(self.id, self.arrival_ns, self.body, self.publisher, self.delay_ns)
        twin.release_ns = self.release_ns
        twin.offset = self.offset
        return twin


class Ids:
    """Ids that never repeat in this process; each starts at a random number, because clocks may be set back.

    An engine that has an id already takes its message for a copy, and drops it.
    """

    __slots__ = ("_block", "_left")

    def __init__(self, start: int) -> None:
        self._block = (start & (2**63 - 1)) >> 8
        self._left: list[bytes] = []  # the last one is next

    def take(self) -> bytes:
        """Return the next id."""
        if not self._left:
            # 256 ids in a row: together, they take a third of the time.
            head = message_id(self._block)[2:]
            self._block += 1
            self._left = [head + tail for tail in _TAILS]
        return self._left.pop()
