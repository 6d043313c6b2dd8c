"""Rows of the log's tables, and the numbers that places in it are made of."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import NamedTuple

OFFSET_BITS = 48  # 10^5 messages a second for 89 years; 15 bits are left for topics
MAX_TOPICS = 1 << (63 - OFFSET_BITS)


class Batch(NamedTuple):
    """A row of `batch`."""

    key: int
    messages: int
    newest_ns: int
    total: int
    crc: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Retention:
    """What a topic keeps; None is no limit. `acknowledged` keeps only what some channel has not finished."""

    max_bytes: int | None = None
    max_age_ns: int | None = None
    acknowledged: bool = False

    @property
    def limited(self) -> bool:
        """Whether messages go though nobody has finished them."""
        return self.max_bytes is not None or self.max_age_ns is not None


@dataclass(slots=True)
class TopicState:
    """Where a topic's log begins and ends, and how many bytes are between; `total` only ever grows."""

    id: int
    begin: int = 0
    end: int = 0
    total: int = 0
    size: int = 0
    retention: Retention | None = None  # the broker's, unless the topic has its own
    log: str = field(default_factory=lambda: secrets.token_hex(8))

    def key(self, offset: int) -> int:
        """The key of a batch that starts at an offset."""
        return self.id << OFFSET_BITS | offset

    @property
    def keys(self) -> tuple[int, int]:
        """The range of all keys of this topic."""
        return self.id << OFFSET_BITS, (self.id + 1) << OFFSET_BITS


class Known(NamedTuple):
    """A row of `known` beside its topic; `channel` is empty for the topic itself."""

    channel: str = ""
    paused: bool = False
    r_mtps: int | None = None
    b_ntok: int | None = None


@dataclass(frozen=True, slots=True)
class SavedCursor:
    """A row of `channel`, with its topic's name."""

    topic: str
    channel: str
    low: int
    above: bytes
