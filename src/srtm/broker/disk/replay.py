"""A channel that begins at an offset of a disk topic's log.

In: the log from that offset on, in batches as its consumers take them, then what the topic releases. Out: every message
once, in order of offsets. Where its consumers are slow it falls behind in the log instead of growing or dropping.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from srtm.broker.channel import Channel

if TYPE_CHECKING:
    from srtm.broker.message import Message

MOST_MESSAGES = 1_000  # that wait for its consumers
MOST_BYTES = 8 << 20  # with what they have; they get more if nothing waits


class Replay(Channel):
    """An ephemeral channel whose next message is that at offset `at`; all before `end` have their tokens."""

    def __init__(self, name: str, at: int, end: int) -> None:
        super().__init__(name, sys.maxsize, sys.maxsize)  # it takes no more than it has room for
        self.at = at
        self.end = end
        self.behind = asyncio.Event()  # there is something to be read from the log
        if at < end:
            self.behind.set()

    @property
    def full(self) -> bool:
        """Whether it has enough for now."""
        return self.held >= MOST_MESSAGES or (self.held > 0 and self.bytes >= MOST_BYTES)

    def put(self, messages: list[Message], now_ns: int) -> int:
        """Take what the topic released, if it is next and there is room; else it comes from the log."""
        offsets = [message.offset for message in messages]
        caught_up = self.at >= self.end
        self.end = max(self.end, max(offsets) + 1)
        if caught_up and not self.full and offsets == list(range(self.at, self.end)):
            self.take(messages, now_ns)
        elif self.at < self.end:
            self.behind.set()
        return 0

    def take(self, messages: list[Message], now_ns: int) -> None:
        """Take the next messages, wherever they come from."""
        super().put(messages, now_ns)
        self.at += len(messages)

    def empty(self) -> None:
        """Forget everything that is there, read or not."""
        super().empty()
        self.at = max(self.at, self.end)
        self.behind.set()  # whoever waits for it looks whether the channel is still there
