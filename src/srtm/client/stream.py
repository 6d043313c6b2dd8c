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
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from srtm.client.cluster import Home
from srtm.client.connection import Connection, ConnectionOptions
from srtm.errors import ClientError, ControllerAway, InputError, ProtocolError, SRTMError
from srtm.net.backoff import Backoff
from srtm.protocol.client import Message
from srtm.protocol.orders import Migrate, Order, Throttle

Command = tuple[bytes, Any]


@dataclass(slots=True)
class Moves:
    """How often brokers moved or throttled a publisher, or lost it."""

    migrations: int = 0
    reconnections: int = 0
    throttles: int = 0


class Stream:
    """One publisher's commands and connection."""

    __slots__ = (
        "_answered",
        "_change",
        "_early",
        "_finder",
        "_flowing",
        "_migrate",
        "_opened",
        "_refused",
        "_task",
        "_throttle",
        "_topic",
        "connection",
        "moves",
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
        self.moves = Moves()
        self._topic = topic
        self._finder = _Finder(home, options, {"publisher": publisher, "group": group, "topic": topic})
        self._answered = answered
        self._refused = refused
        self._flowing = False  # connected, not throttled, not leaving
        self._throttle: asyncio.TimerHandle | None = None
        self._migrate: Migrate | None = None  # the order being followed
        self._early: tuple[Connection, Order] | None = None  # an order of a broker that is not in use yet
        self._change = _Change()
        self._opened: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def addresses(self) -> list[str]:
        """The address of its broker, while it is connected."""
        return [] if self.connection is None or self.connection.closed else [self.connection.address]

    @property
    def waiting(self) -> int:
        """Commands without an answer."""
        return len(self.unsent) + len(self.unanswered)

    @property
    def problem(self) -> Exception | None:
        """The most recent problem."""
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
        if self._flowing and not self.unsent and self.connection.writable:  # type: ignore[union-attr]
            self.unanswered.append((data, token))
            self.connection.say(data)  # type: ignore[union-attr]
        else:
            self.unsent.append((data, token))

    def put_now(self, data: bytes, token: Any) -> bool:
        """Write a command at once if possible; return whether it was."""
        if self._flowing and not self.unsent and self.connection.writable:  # type: ignore[union-attr]
            self.unanswered.append((data, token))
            self.connection.send(data)  # type: ignore[union-attr]
            return True
        self.unsent.append((data, token))
        return False

    async def drain(self) -> None:
        """Wait until every command has its answer."""
        with self._change.draining():
            while self.unsent or self.unanswered:
                await self._change.wait()

    async def abort(self) -> None:
        """Close at once; unanswered commands fail."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for _, token in [*self.unanswered, *self.unsent]:
            self._refused(token, ClientError("the publisher was closed before the message was acknowledged"))
        self.unanswered.clear()
        self.unsent.clear()

    async def _run(self) -> None:
        """Stay connected to the right broker, until cancelled."""
        finding: asyncio.Task[Connection] | None = None
        try:
            while True:
                self.connection = await (finding or self._finder.find(self, ()))
                finding = None
                if not self.connection.closed:
                    self._begin()
                    while not self.connection.closed and self._migrate is None:
                        await self._change.wait()
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
            self.moves.reconnections += 1
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
        with self._change.draining():
            while self.unanswered and not self.connection.closed:
                await self._change.wait()
        if not self.connection.closed:
            self.connection.finish()
            while not self.connection.closed:
                await self._change.wait()
        self.moves.migrations += 1

    def _put_back(self) -> None:
        """Put unanswered commands back, to be written again."""
        assert self.connection is not None
        if self._migrate is None:
            self._finder.lost.add(self.connection.address)
        self._calm()
        self.unsent.extendleft(reversed(self.unanswered))
        self.unanswered.clear()

    def hopeless(self, problem: SRTMError) -> None:
        """A broker or the controller refused; for the first connection, that is final."""
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(problem)

    def answered(self, data: bytes) -> None:
        """The oldest command was answered."""
        del data
        _, token = self.unanswered.popleft()
        self._answered(token)
        if self._change.drainers and not self.unanswered:
            self._change.tell()

    def refused(self, problem: ProtocolError) -> None:
        """The oldest command was refused, if that is fatal."""
        if self.unanswered and problem.fatal:
            _, token = self.unanswered.popleft()
            self._refused(token, problem)

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
            self.moves.throttles += 1
            if order.retry_after_ms:
                self._flowing = False
                loop = asyncio.get_running_loop()
                self._throttle = loop.call_later(order.retry_after_ms / 1000, self._go_on)
            else:
                self._go_on()
        elif self._migrate is None and order.to[:1] != (connection.address,):
            self._migrate = order
            self._flowing = False
            self._change.tell()

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
        unsent, connection = self.unsent, self.connection
        while unsent and self._flowing and connection is not None and connection.writable:
            command = unsent.popleft()
            self.unanswered.append(command)
            connection.say(command[0])

    def ended(self, connection: Connection, problem: Exception | None) -> None:
        """The broker closed the connection, or it broke."""
        if problem is not None:
            self._finder.problem = problem
        if connection is self.connection:
            self._flowing = False
            self._change.tell()


class _Finder:
    """Finds a publisher's next connection."""

    __slots__ = ("_home", "_identity", "_options", "lost", "problem")

    def __init__(self, home: Home, options: ConnectionOptions, identity: dict[str, str | None]) -> None:
        self.lost: set[str] = set()  # addresses that failed since the last connection
        self.problem: Exception | None = None  # the most recent
        self._home = home
        self._options = options
        self._identity = identity

    async def find(self, stream: Stream, to: tuple[str, ...]) -> Connection:
        """Connect to one of these addresses, or to a broker that the home names."""
        backoff = Backoff()
        while True:
            try:
                for address in to or await self._home.places(self.lost):
                    try:
                        return await Connection.open(address, stream, self._options, self._identity)
                    except (ClientError, ProtocolError, InputError) as problem:
                        self.lost.add(address)
                        self.problem = problem
                        if isinstance(problem, ProtocolError):
                            stream.hopeless(problem)
            except ClientError as problem:
                self.problem = problem
                if not isinstance(problem, ControllerAway):
                    stream.hopeless(problem)
            if not to:
                await asyncio.sleep(backoff.next_s())
            to = ()


class _Change:
    """Wakes those who wait for the connection to change, or for the last answer."""

    __slots__ = ("_future", "drainers")

    def __init__(self) -> None:
        self.drainers = 0  # callers that wait for the last answer; without any, answers wake nobody
        self._future: asyncio.Future[None] | None = None

    @contextmanager
    def draining(self) -> Iterator[None]:
        """Wake the block at the last answer, too."""
        self.drainers += 1
        try:
            yield
        finally:
            self.drainers -= 1

    async def wait(self) -> None:
        """Wait for the next change."""
        if self._future is None or self._future.done():
            self._future = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._future)

    def tell(self) -> None:
        """Something changed."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)
