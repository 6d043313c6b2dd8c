"""The commands of one publisher in order, at whichever broker it belongs to.

In: PUB, MPUB and DPUB as bytes, each with a token that its owner chooses. Out: for each, in order, whether it was
answered or refused. Commands wait here while there is no connection, while the broker THROTTLEs the topic, and while
the publisher follows a MIGRATE.

Always holds: the stream writes commands in the order they were put, and forgets one only when it is answered or
refused. A MIGRATE awaits all answers and then the broker's end of the connection, so it loses, doubles and reorders
nothing. After the death of a broker, unanswered commands are written again elsewhere, in order: those may be doubled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from srtm.client.cluster import Home
from srtm.client.commands import Commands
from srtm.client.connection import Connection, ConnectionOptions
from srtm.client.finder import Finder
from srtm.errors import ClientError, ProtocolError, SRTMError
from srtm.protocol.client import Message
from srtm.protocol.orders import Migrate, Order, Throttle


class Stream:
    """One publisher's commands and connection."""

    __slots__ = (
        "_changed",
        "_commands",
        "_draining",
        "_early",
        "_finder",
        "_flowing",
        "_migrate",
        "_opened",
        "_task",
        "_throttle",
        "_topic",
        "connection",
        "migrations",
        "reconnections",
        "throttles",
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
        self.migrations = self.reconnections = self.throttles = 0
        self._topic = topic
        self._commands = Commands(answered, refused)
        identity = {"publisher": publisher, "group": group, "topic": topic}
        self._finder = Finder(home, options, identity, self._refuse_opening)
        self._flowing = False  # connected, not throttled, not leaving
        self._throttle: asyncio.TimerHandle | None = None
        self._migrate: Migrate | None = None  # the order being followed
        self._early: tuple[Connection, Order] | None = None  # an order of a broker that is not in use yet
        self._changed: asyncio.Future[None] | None = None
        self._draining = 0  # callers that wait for the last answer
        self._opened: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def in_flight(self) -> int:
        """Commands without an answer."""
        return len(self._commands)

    @property
    def problem(self) -> Exception | None:
        """The most recent problem with a broker or controller."""
        return self._finder.problem

    async def open(self, timeout_s: float) -> None:
        """Wait for a connection; ClientError if there is none in time, or a broker refuses."""
        self._opened = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run())
        try:
            async with asyncio.timeout(timeout_s):
                await self._opened
        except TimeoutError:
            await self.abort()
            why = self.problem or "no answer"
            raise ClientError(f"no broker for topic {self._topic!r} within {timeout_s:g} s: {why}") from None
        except BaseException:
            await self.abort()
            raise

    def put(self, data: bytes, token: Any) -> None:
        """Write a command as soon as possible, together with others of this turn."""
        commands = self._commands
        if self._flowing and not commands.unsent and self.connection.writable:  # type: ignore[union-attr]
            commands.unanswered.append((data, token))
            self.connection.say(data)  # type: ignore[union-attr]
        else:
            commands.unsent.append((data, token))

    def put_now(self, data: bytes, token: Any) -> bool:
        """Write a command at once if possible; return whether it was."""
        commands = self._commands
        if self._flowing and not commands.unsent and self.connection.writable:  # type: ignore[union-attr]
            commands.unanswered.append((data, token))
            self.connection.send(data)  # type: ignore[union-attr]
            return True
        commands.unsent.append((data, token))
        return False

    async def drain(self) -> None:
        """Wait until every command has its answer."""
        self._draining += 1
        try:
            while self._commands:
                await self._change()
        finally:
            self._draining -= 1

    async def abort(self) -> None:
        """Close at once; unanswered commands fail."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._commands.give_up("the publisher was closed before the message was acknowledged")

    async def _run(self) -> None:
        """Stay connected to the right broker, until cancelled."""
        finding: asyncio.Task[Connection] | None = None
        try:
            while True:
                self.connection = await (finding or self._finder.find(self))
                finding = None
                if not self.connection.closed:
                    self._begin()
                    while not self.connection.closed and self._migrate is None:
                        await self._change()
                    self._flowing = False
                    if self._migrate is not None:
                        finding = asyncio.create_task(self._finder.find(self, self._migrate.to))
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
        """Use the new connection, with leftovers first."""
        assert self.connection is not None
        if self._opened is not None and not self._opened.done():
            self._opened.set_result(None)
        elif self._migrate is None:
            self.reconnections += 1
        self._finder.lost.clear()
        self._migrate = None
        self._flowing = True
        if self._early is not None and self._early[0] is self.connection:
            self.ordered(*self._early)
        self._early = None
        self.writable()

    async def _leave(self) -> None:
        """Await all answers, close our side, and wait until the broker is done and closes its own."""
        assert self.connection is not None
        self._draining += 1
        while self._commands.unanswered and not self.connection.closed:
            await self._change()
        self._draining -= 1
        if not self.connection.closed:
            self.connection.finish()
            while not self.connection.closed:
                await self._change()
        self.migrations += 1

    def _put_back(self) -> None:
        """Put unanswered commands back, to be written again."""
        assert self.connection is not None
        if self._migrate is None:
            self._finder.lost.add(self.connection.address)
        self._calm()
        self._commands.put_back()

    def _refuse_opening(self, problem: SRTMError) -> None:
        """A refusal of the first connection is final."""
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(problem)

    async def _change(self) -> None:
        """Wait until the connection or the last answer changes something."""
        if self._changed is None or self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    def _tell(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def answered(self, data: bytes) -> None:
        """The oldest command was answered."""
        del data
        self._commands.answer()
        if self._draining and not self._commands.unanswered:
            self._tell()

    def refused(self, problem: ProtocolError) -> None:
        """The oldest command was refused, if that is fatal."""
        if self._commands.unanswered and problem.fatal:
            self._commands.refuse(problem)

    def delivered(self, message: Message) -> None:
        """Never called: a publisher subscribes to nothing."""
        raise AssertionError(message)

    def ordered(self, connection: Connection, order: Order) -> None:
        """Follow a THROTTLE or MIGRATE."""
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
        """A throttle ended."""
        self._throttle = None
        if self.connection is not None and not self.connection.closed and self._migrate is None:
            self._flowing = True
            self.writable()

    def writable(self) -> None:
        """Write what waited."""
        commands, connection = self._commands, self.connection
        while commands.unsent and self._flowing and connection is not None and connection.writable:
            connection.say(commands.next())

    def ended(self, connection: Connection, problem: Exception | None) -> None:
        """The broker closed the connection, or it broke."""
        if problem is not None:
            self._finder.problem = problem
        if connection is self.connection:
            self._flowing = False
            self._tell()
