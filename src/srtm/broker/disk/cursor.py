"""What a channel has finished of a topic's log: a low-water mark, and single offsets above it.

In: offsets, in any order, as subscribers finish them. Out: what is still to be delivered after a restart.
Every offset below `low` is finished, `low` itself is not. What was finished after the last save is delivered again;
what was not finished is never skipped.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from srtm.errors import LogError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Cursor:
    """The progress of one channel of one topic; `changed` collects cursors that differ from what was saved."""

    __slots__ = ("above", "changed", "channel", "lost", "low", "topic")

    def __init__(self, topic: str, channel: str, low: int, changed: set[Cursor]) -> None:
        self.topic = topic
        self.channel = channel
        self.low = low
        self.above: set[int] = set()
        self.changed = changed
        self.lost = 0  # what the log did not hold any more when it was opened

    def finish(self, offset: int) -> None:
        """Mark one offset as finished; again is harmless."""
        if offset < self.low:
            return
        self.changed.add(self)
        above = self.above
        if offset != self.low:
            above.add(offset)
            return
        offset += 1
        while offset in above:
            above.remove(offset)
            offset += 1
        self.low = offset

    def skip_to(self, begin: int, held: Iterable[int] = ()) -> int:
        """Give up what is below `begin`, because the log no longer holds it; how many of them are lost.

        What was finished is not lost, nor what is `held` in memory, which is still delivered.
        """
        if begin <= self.low:
            return 0
        self.changed.add(self)
        passed = {offset for offset in self.above if offset < begin}
        kept = {offset for offset in held if self.low <= offset < begin} - passed
        lost = begin - self.low - len(passed) - len(kept)
        self.above -= passed
        self.low = begin
        if begin in self.above:
            self.above.remove(begin)
            self.finish(begin)
        return lost

    def unfinished(self, end: int) -> Iterator[tuple[int, int]]:
        """Ranges [begin, end) that are still to be delivered, in order."""
        begin = self.low
        for first, last in self._runs():
            yield begin, first
            begin = last
        if begin < end:
            yield begin, end

    def missing(self, end: int) -> int:
        """How many of them there are."""
        return sum(last - first for first, last in self.unfinished(end))

    def encode(self) -> bytes:
        """The finished offsets above `low`: for each run of them, the gap before it and its length."""
        at, numbers = self.low, []
        for first, last in self._runs():
            numbers += [first - at, last - first]
            at = last
        return struct.pack(f"<{len(numbers)}Q", *numbers)

    def restore(self, value: bytes) -> Cursor:
        """Take over what `encode` gave."""
        if len(value) % 16:
            raise LogError(
                f"the progress of channel {self.channel!r} of topic {self.topic!r} is unreadable: delete the channel",
                topic=self.topic,
                channel=self.channel,
            )
        at = self.low
        for gap, length in struct.iter_unpack("<QQ", value):
            self.above.update(range(at + gap, at + gap + length))
            at += gap + length
        return self

    def _runs(self) -> Iterator[tuple[int, int]]:
        first = last = -1
        for offset in sorted(self.above):
            if offset != last:
                if last >= 0:
                    yield first, last
                first = offset
            last = offset + 1
        if last >= 0:
            yield first, last
