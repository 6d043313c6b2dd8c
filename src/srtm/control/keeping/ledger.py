"""Writes to a bucket by one leader: in order, on condition that nobody else has written since.

In: keys and values, at any time. Out: an answer for each, in order. One *unit* is under way at a time: all that waits,
as an atomic batch, or a single write if the servers know no batches. Its condition is that the last message of the
bucket is the last one that this leader stored. That number is never used again, so once somebody else has written,
no unit of this leader can be stored, however late it arrives.

Several units under way, each with the number that the one before it would get, would be faster, but not safe: a new
leader's messages get the same numbers.

A unit without an answer is sent again. If that is refused, the message where its last write belongs tells whether the
unit was stored the first time. If not, somebody else has written: this leader leads no longer, and the ledger ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

from srtm.client.nats import Refused
from srtm.control.keeping.bucket import MAX_VALUE
from srtm.control.keeping.lease import now_ns
from srtm.errors import ClientError, ControlError, InputError, LeadershipLost

if TYPE_CHECKING:
    from srtm.client.nats import NatsConnection
    from srtm.control.keeping.bucket import Bucket

log = logging.getLogger(__name__)

_MOST, _MOST_BYTES = 500, 4_000_000  # in a unit; JetStream takes 1,000
_AGAIN_S = 0.7  # without an answer until a unit is sent again; JetStream is silent while it elects a leader
_LOOKS = 20  # at a message that may be ours
_PAUSE_S = 0.1  # before another try after an error


class Write:
    """One write."""

    __slots__ = ("done", "key", "sent_ns", "value")

    def __init__(self, key: str, value: bytes | None) -> None:
        self.key = key
        self.value = value
        self.sent_ns = 0  # when it was sent for the first time
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Ledger:
    """All writes of one leader; `run` sends them."""

    def __init__(self, bucket: Bucket, holder: str, last: int) -> None:
        """`holder` is unique, and `last` the number of the last message of the bucket."""
        self.problem: LeadershipLost | None = None
        self.ended = asyncio.Event()
        self._bucket = bucket
        self._holder = holder
        self._last = last
        self._connection: NatsConnection | None = None
        self._queue: deque[Write] = deque()
        self._unit: list[Write] = []  # under way
        self._woken = asyncio.Event()
        self._told = ""  # the last problem in the log

    def append(self, key: str, value: bytes | None, *, first: bool = False) -> Write:
        """Add a write behind all others, or `first` before all that were not sent yet."""
        if value is not None and len(value) > MAX_VALUE:
            raise ControlError(
                f"the document {key} has {len(value):,} bytes, but a key of {self._bucket} holds {MAX_VALUE:,}; use"
                " fewer brokers for that topic"
            )
        write = Write(key, value)
        if self.problem is not None:
            _fail(write, self.problem)
        elif first:
            self._queue.appendleft(write)
        else:
            self._queue.append(write)
        self._woken.set()
        return write

    async def flush(self) -> None:
        """Return when everything appended so far is stored; LeadershipLost if it will not be."""
        waiting = self._queue or self._unit
        if waiting:
            await asyncio.wait({waiting[-1].done})
        if self.problem is not None:
            raise self.problem

    async def stored(self, write: Write) -> None:
        """Return when a write is stored; LeadershipLost if it will not be."""
        await asyncio.wait({write.done})
        write.done.result()

    def end(self, problem: LeadershipLost) -> None:
        """Refuse everything from now on."""
        if self.problem is None:
            self.problem = problem
            for write in (*self._unit, *self._queue):
                _fail(write, problem)
            self._unit = []
            self._queue.clear()
            self.ended.set()
            self._woken.set()

    async def run(self) -> None:
        """Send writes until the ledger ends; connect again if a connection is lost."""
        try:
            while self.problem is None:
                if not self._unit:
                    self._unit = self._next()
                if not self._unit:
                    self._woken.clear()
                    await self._woken.wait()
                    continue
                try:
                    await self._store()
                except LeadershipLost as problem:
                    self.end(problem)
        finally:
            self._hang_up()

    def _next(self) -> list[Write]:
        """The writes of the next unit; `sent_ns` of each is now."""
        unit: list[Write] = []
        size, at_ns = 0, now_ns()
        while self._queue and len(unit) < _MOST and size < _MOST_BYTES:
            unit.append(self._queue.popleft())
            unit[-1].sent_ns = at_ns
            size += len(unit[-1].value or b"")
        return unit

    async def _store(self) -> None:
        """Store the unit, however often that takes."""
        left = list({write.key: write for write in self._unit}.values())  # the last write of a key counts
        while left:
            count = len(left) if self._bucket.batches(len(left)) else 1
            await self._sent(left[:count])
            self._last += count
            left = left[count:]
        for write in self._unit:
            if not write.done.done():
                write.done.set_result(None)
        self._unit = []

    async def _sent(self, writes: list[Write]) -> None:
        """Store some writes at once; LeadershipLost if somebody else has written."""
        mark, attempt = f"{self._holder}-{self._last}", 0
        while True:
            attempt += 1
            try:
                if self._connection is None:
                    self._connection = await self._bucket.connect()
                changes = [(write.key, write.value) for write in writes]
                answer = self._bucket.publish(self._connection, changes, mark, attempt, self._last)
                async with asyncio.timeout(_AGAIN_S):
                    found = self._connection.read(await answer)
            except (ClientError, InputError, TimeoutError) as problem:
                await self._failed(str(problem) or f"no answer to a write within {_AGAIN_S:g} s")
            except Refused as problem:
                if not self._bucket.wrong_last(problem):
                    await self._failed(f"a write is refused: {problem}")
                elif attempt > 1 and await self._stored_before(mark, self._last + len(writes)):
                    return
                else:
                    raise LeadershipLost(f"another controller wrote to {self._bucket}: {problem}") from None
            else:
                if int(found["seq"]) != self._last + len(writes):
                    raise LeadershipLost(f"{self._bucket} stored a write as {found['seq']}, not {self._last + 1}")
                self._told = ""
                return

    async def _stored_before(self, mark: str, sequence: int) -> bool:
        """Whether the message of that number is ours; a server that is catching up may not have it yet."""
        for _ in range(_LOOKS):
            try:
                if self._connection is None:
                    self._connection = await self._bucket.connect()
                if (found := await self._bucket.mark(self._connection, sequence)) is not None:
                    return found == mark
                await self._failed(f"message {sequence} is not there")
            except (ClientError, InputError) as problem:
                await self._failed(str(problem))
        return False

    async def _failed(self, problem: str) -> None:
        """Try again over another connection, soon."""
        if problem != self._told:
            self._told = problem
            log.warning("STORE(%s): %s; trying again", self._bucket, problem)
        self._hang_up()
        await asyncio.sleep(_PAUSE_S)

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _fail(write: Write, problem: LeadershipLost) -> None:
    if not write.done.done():
        write.done.set_exception(problem)
        write.done.exception()  # nobody need be waiting
