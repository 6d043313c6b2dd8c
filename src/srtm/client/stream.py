"""The commands of one publisher in order, at whatever broker it belongs to.

In: PUB, MPUB and DPUB as bytes, each with a token that means something to its owner. Out: for every one, in order, that
it was answered or refused. Commands wait here while there is no connection, while the broker has THROTTLEd the topic,
and while a MIGRATE is being followed.

Always holds: commands are written in the order they were put, and one is forgotten only when it was answered or
refused. So after a MIGRATE, where all answers are awaited and then the broker's end of the connection, nothing is lost,
doubled or reordered. After the death of a broker, what had no answer is written again elsewhere, in order: it may be
there twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from srtm.client.cluster import Home
from srtm.client.connection import Connection, ConnectionOptions
from srtm.errors import ClientError, ControllerAway, InputError, ProtocolError, SRTMError
from srtm.net.backoff import Backoff
from srtm.protocol.client import Message
from srtm.protocol.orders import Migrate, Order, Throttle

Command = tuple[bytes, Any]


class Stream:
    """One publisher's commands, and its connection."""

    __slots__ = (
        "_answered",
        "_changed",
        "_draining",
        "_early",
        "_flowing",
        "_home",
        "_lost",
        "_migrate",
        "_opened",
        "_options",
        "_refused",
        "_srtm",
        "_task",
        "_throttle",
        "_topic",
        "connection",
        "migrations",
        "problem",
        "reconnections",
        "throttles",
        "unanswered",
        "unsent",
    )

    def __init__(
        self,
        topic: str,
        publisher: str,
        group: str | None,
        home: Home,
        options: ConnectionOptions,
        answered: Callable[[Any], None],
        refused: Callable[[Any, SRTMError], None],
    ) -> None:
        self.connection: Connection | None = None
        self.unsent: deque[Command] = deque()
        self.unanswered: deque[Command] = deque()
        self.migrations = self.reconnections = self.throttles = 0
        self._topic = topic
        self._srtm = {"publisher": publisher, "group": group, "topic": topic}
        self._home = home
        self._options = options
        self._answered = answered
        self._refused = refused
        self._flowing = False  # connected, not throttled, not about to leave
        self._throttle: asyncio.TimerHandle | None = None
        self._migrate: Migrate | None = None  # the order that is being followed
        self._early: tuple[Connection, Order] | None = None  # what a broker said before it was the one in use
        self._lost: set[str] = set()  # addresses that could not be reached since the last connection
        self.problem: Exception | None = None  # the last that it met
        self._changed: asyncio.Future[None] | None = None
        self._draining = 0  # how many wait for the last answer
        self._opened: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self, timeout_s: float) -> None:
        """Until there is a connection; ClientError if there is none in time, or never will be."""
        self._opened = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run())
        try:
            async with asyncio.timeout(timeout_s):
                await self._opened
        except TimeoutError:
            await self.abort()
            why = self.problem or "nobody answered"
            raise ClientError(f"no broker for topic {self._topic!r} within {timeout_s:g} s: {why}") from None
        except BaseException:
            await self.abort()
            raise

    def put(self, data: bytes, token: Any) -> None:
        """Write a command as soon as it may be; with the rest of this turn."""
        if self._flowing and not self.unsent and self.connection.writable:  # type: ignore[union-attr]
            self.unanswered.append((data, token))
            self.connection.say(data)  # type: ignore[union-attr]
        else:
            self.unsent.append((data, token))

    def put_now(self, data: bytes, token: Any) -> bool:
        """As `put`, but at once; gives whether it could be."""
        if self._flowing and not self.unsent and self.connection.writable:  # type: ignore[union-attr]
            self.unanswered.append((data, token))
            self.connection.send(data)  # type: ignore[union-attr]
            return True
        self.unsent.append((data, token))
        return False

    async def drain(self) -> None:
        """Until every command has its answer."""
        self._draining += 1
        try:
            while self.unsent or self.unanswered:
                await self._change()
        finally:
            self._draining -= 1

    async def abort(self) -> None:
        """End at once; what has no answer is given up."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for _, token in [*self.unanswered, *self.unsent]:
            self._refused(token, ClientError("the publisher was closed before this was acknowledged"))
        self.unanswered.clear()
        self.unsent.clear()

    async def _run(self) -> None:
        """Be connected, for ever: at the right broker, or on the way to the next."""
        finding: asyncio.Task[Connection] | None = None
        try:
            while True:
                self.connection = await (finding or self._find(()))
                finding = None
                if not self.connection.closed:
                    self._begin()
                    while not self.connection.closed and self._migrate is None:
                        await self._change()
                    self._flowing = False
                    if self._migrate is not None:
                        finding = asyncio.create_task(self._find(self._migrate.to))
                        await self._leave()
                self._put_back()
        finally:
            if finding is not None:
                finding.cancel()
                with suppress(asyncio.CancelledError):
                    (await finding).close()
            if self.connection is not None:
                self.connection.close()

    def _begin(self) -> None:
        """Go on here, with what was left over first."""
        assert self.connection is not None
        if self._opened is not None and not self._opened.done():
            self._opened.set_result(None)
        elif self._migrate is None:
            self.reconnections += 1
        self._lost.clear()
        self._migrate = None
        self._flowing = True
        if self._early is not None and self._early[0] is self.connection:
            self.ordered(*self._early)
        self._early = None
        self.writable()

    async def _leave(self) -> None:
        """Await all answers, say that no more comes, and wait until the broker is done with what it has."""
        assert self.connection is not None
        self._draining += 1
        while self.unanswered and not self.connection.closed:
            await self._change()
        self._draining -= 1
        if not self.connection.closed:
            self.connection.finish()
            while not self.connection.closed:
                await self._change()
        self.migrations += 1

    def _put_back(self) -> None:
        """What has no answer is to be written again."""
        assert self.connection is not None
        if self._migrate is None:
            self._lost.add(self.connection.address)
        self._calm()
        self.unsent.extendleft(reversed(self.unanswered))
        self.unanswered.clear()

    async def _find(self, to: tuple[str, ...]) -> Connection:
        """A connection to one of these, or to whom the home says."""
        backoff = Backoff()
        while True:
            try:
                for address in to or await self._home.places(self._lost):
                    try:
                        return await Connection.open(address, self, self._options, self._srtm)
                    except (ClientError, ProtocolError, InputError) as problem:
                        self._lost.add(address)
                        self._hopeless(problem, isinstance(problem, ProtocolError))
            except ClientError as problem:
                self._hopeless(problem, not isinstance(problem, ControllerAway))
            if not to:
                await asyncio.sleep(backoff.next_s())
            to = ()

    def _hopeless(self, problem: SRTMError, refused: bool) -> None:  # noqa: FBT001 - of this class alone
        """Remember why; who refused at the very first will always do so."""
        self.problem = problem
        if refused and self._opened is not None and not self._opened.done():
            self._opened.set_exception(problem)

    async def _change(self) -> None:
        """Until something happened that somebody may wait for."""
        if self._changed is None or self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    def _tell(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def answered(self, data: bytes) -> None:
        """The oldest command is done."""
        del data
        _, token = self.unanswered.popleft()
        self._answered(token)
        if self._draining and not self.unanswered:
            self._tell()

    def refused(self, problem: ProtocolError) -> None:
        """The oldest command will not be done."""
        if self.unanswered and problem.fatal:
            _, token = self.unanswered.popleft()
            self._refused(token, problem)

    def delivered(self, message: Message) -> None:
        """A publisher subscribes to nothing."""
        raise AssertionError(message)

    def ordered(self, connection: Connection, order: Order) -> None:
        """Wait, or go elsewhere."""
        if order.topic != self._topic:
            return
        if connection is not self.connection:
            self._early = connection, order
        elif isinstance(order, Throttle):
            self._calm()
            self.throttles += 1
            if order.retry_after_ms:
                self._flowing = False
                loop = asyncio.get_running_loop()
                self._throttle = loop.call_later(order.retry_after_ms / 1000, self._go_on)
            else:
                self._go_on()
        elif self._migrate is None and order.to[:1] != (connection.address,):
            self._migrate = order
            self._flowing = False
            self._tell()

    def _calm(self) -> None:
        if self._throttle is not None:
            self._throttle.cancel()
            self._throttle = None

    def _go_on(self) -> None:
        """A throttle is over."""
        self._throttle = None
        if self.connection is not None and not self.connection.closed and self._migrate is None:
            self._flowing = True
            self.writable()

    def writable(self) -> None:
        """Write what had to wait."""
        unsent, connection = self.unsent, self.connection
        while unsent and self._flowing and connection is not None and connection.writable:
            command = unsent.popleft()
            self.unanswered.append(command)
            connection.say(command[0])

    def ended(self, connection: Connection, problem: Exception | None) -> None:
        """The broker is gone, or done."""
        if problem is not None:
            self.problem = problem
        if connection is self.connection:
            self._flowing = False
            self._tell()
