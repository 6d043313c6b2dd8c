"""What is written down about topics and channels as it changes: that they exist, pauses, and (r, b) set by hand."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from srtm.broker.disk.rows import Known
from srtm.errors import LogError
from srtm.model.bucket import TokenBucket
from srtm.model.limiter import Limiter

if TYPE_CHECKING:
    from srtm.broker.disk.log import Log
    from srtm.broker.topic import Topic
    from srtm.broker.topics import Topics

_AGAIN_S = 1.0  # after the disk could not write


class Notes:
    """Topics of which something has changed, and who waits until that is written."""

    __slots__ = ("_changed", "_log", "_loop", "_readers", "_topics", "_writing")

    def __init__(self, log: Log, topics: Topics, loop: asyncio.AbstractEventLoop) -> None:
        self._log = log
        self._topics = topics
        self._loop = loop
        self._changed: set[str] = set()
        self._writing = False
        self._readers: list[asyncio.Future[None]] = []

    def note(self, name: str) -> None:
        """Write down a topic, with everything else that changes until the disk is ready."""
        self._changed.add(name)
        if not self._writing:
            self._writing = True
            self._loop.call_soon(self._write)

    async def noted(self, name: str) -> None:
        """Write down a topic, and wait until that is durable; LogError if it cannot be."""
        written: asyncio.Future[None] = self._loop.create_future()
        self._readers.append(written)
        self.note(name)
        await written

    def _write(self) -> None:
        names, self._changed = self._changed, set()
        readers, self._readers = self._readers, []

        def written(result: LogError | None) -> None:
            for reader in readers:
                _settle(reader, result)
            if result is not None:  # which the log has reported
                self._changed |= names
                self._loop.call_later(_AGAIN_S, self._write)
            elif self._changed:
                self._write()
            else:
                self._writing = False

        try:
            self._log.remember(self._rows(names), written)
        except LogError as closed:
            for reader in readers:
                _settle(reader, closed)

    def _rows(self, names: set[str]) -> dict[str, list[Known]]:
        return {name: _known(self._topics.get(name)) for name in names}

    def recall(self, topic: Topic, rows: list[Known], started_ns: int, *, limited: bool) -> None:
        """Make a topic what it was. Its bucket begins empty: nobody knows what passed before the broker ended."""
        for row in rows:
            if row.channel:
                self._topics.channel(topic, row.channel).paused = row.paused
                continue
            topic.pause(started_ns, on=row.paused)
            if row.r_mtps is not None and row.b_ntok is not None:
                topic.gate.by_hand = TokenBucket(row.r_mtps, row.b_ntok)
                if limited:
                    topic.gate.limiter = Limiter(topic.gate.by_hand, started_ns, 0)

    def close(self) -> None:
        """Hand the last changes to the log."""
        if self._changed:
            self._log.remember(self._rows(self._changed), lambda _: None)


def _known(topic: Topic | None) -> list[Known]:
    if topic is None or topic.ephemeral:
        return []
    limit = (topic.gate.by_hand.r_mtps, topic.gate.by_hand.b_ntok) if topic.gate.by_hand else (None, None)
    rows = [Known("", topic.paused, *limit)]
    return rows + [Known(each.name, each.paused) for each in topic.channels.values() if not each.ephemeral]


def _settle(future: asyncio.Future[None], problem: LogError | None) -> None:
    if future.cancelled():
        return
    if problem is not None:
        future.set_exception(problem)
    else:
        future.set_result(None)
