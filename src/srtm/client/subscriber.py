"""A subscriber: one channel of a topic, at every broker that the topic has.

In: a topic, a channel, and who knows its brokers: a controller (which pushes changes of its own brokers, and is polled
for stock nsqds that are registered there), nsqlookupds (which are polled), or a list. Out: messages, each to be
finished or requeued; one that is neither is delivered again after its time-out.

`max_in_flight` is shared out: a connection that delivered nothing lately keeps room for one message, the others have
the rest. A broker that is no longer listed is kept until it has been idle for a minute, because publishers that moved
away leave messages behind.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any

from srtm.client.backoff import Backoff
from srtm.client.cluster import DEFAULT_CONTROLLER, Cluster
from srtm.client.connection import Connection, ConnectionOptions, split_address
from srtm.client.lookup import lookup
from srtm.errors import ClientError, InputError, ProtocolError, SRTMError
from srtm.protocol import client as say
from srtm.protocol.orders import Order

log = logging.getLogger(__name__)

_REBALANCE_S = 0.5
_HEARTBEAT_MS = 5_000
_LINGER = 120  # looks at an idle broker that is no longer listed, before it is left: a minute


class Message:
    """A message of a channel: `finish` it, or `requeue` it; `touch` it where that takes longer than its time-out."""

    __slots__ = ("_link", "attempts", "body", "id", "timestamp_ns")

    def __init__(self, message: say.Message, link: _Link) -> None:
        self.timestamp_ns, self.attempts, self.id, self.body = message
        self._link: _Link | None = link

    @property
    def broker(self) -> str | None:
        """The address of the broker that it came from; None once it was finished or requeued."""
        return self._link.address if self._link else None

    @property
    def held(self) -> bool:
        """Whether it is to be answered here, and its connection stands."""
        return self._link is not None and self._link.held.get(self.id) is self

    async def finish(self) -> None:
        """It is done. If its connection was lost meanwhile, it will be delivered again all the same."""
        self._answer(say.fin(self.id))

    async def requeue(self, delay_s: float = 0.0) -> None:
        """Deliver it again, to anybody, after a while."""
        self._answer(say.req(self.id, round(delay_s * 1000)))

    async def touch(self) -> None:
        """It takes longer: begin its time-out anew."""
        if self._link is None:
            raise ClientError("the message was finished or requeued already")
        self._link.tell(say.touch(self.id))

    @property
    def answered(self) -> bool:
        """Whether it was finished or requeued."""
        return self._link is None

    def _answer(self, data: bytes) -> None:
        link, self._link = self._link, None
        if link is None:
            raise ClientError("the message was finished or requeued already")
        link.finish(self, data)

    def __repr__(self) -> str:
        return f"Message({self.body[:32]!r}, attempts={self.attempts})"


class _Link:
    """The subscription at one broker: connected, or about to be."""

    def __init__(self, subscriber: Subscriber, address: str) -> None:
        self.address = address
        self.listed = True
        self.ready = 0  # what it was told last
        self.lately = 0  # messages since the last look
        self.idle = 0  # looks without any
        self.held: dict[bytes, Message] = {}  # delivered, and not finished
        self.connection: Connection | None = None
        self.limit = 1  # of RDY, at this broker
        self._subscriber = subscriber
        self._answers: deque[asyncio.Future[bytes]] = deque()
        self._over: asyncio.Future[None] | None = None
        self.task = asyncio.create_task(self._run())

    @property
    def subscribed(self) -> bool:
        return self.connection is not None and not self.connection.closed

    async def _run(self) -> None:
        backoff = Backoff()
        try:
            while self.listed:
                try:
                    await self._subscribe()
                except (ClientError, ProtocolError) as problem:
                    if self.connection is not None:
                        self.connection.close()
                    self._answers.clear()
                    self._subscriber.problem(problem)
                    await asyncio.sleep(backoff.next_s())
                    continue
                backoff = Backoff()
                self._subscriber.rebalance()
                assert self._over is not None
                await self._over
                self._subscriber.rebalance()
        finally:
            if self.connection is not None:
                self.connection.close()
            self._subscriber.left(self)

    async def _subscribe(self) -> None:
        self.connection = connection = await Connection.open(self.address, self, self._subscriber.options)
        self.ready = 0
        self.limit = connection.settled.get("max_rdy_count", 2500)
        self._over = asyncio.get_running_loop().create_future()
        await self.ask(say.sub(self._subscriber.topic, self._subscriber.channel))

    async def ask(self, data: bytes) -> bytes:
        """The answer to a command."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        self.tell(data)
        return await answer

    def tell(self, data: bytes) -> None:
        """Say something, if there is anybody who hears it."""
        if self.subscribed:
            self.connection.say(data)  # type: ignore[union-attr]

    def set_ready(self, count: int) -> None:
        """Take so many messages in flight."""
        count = min(count, self.limit)
        if count != self.ready and self.subscribed:
            self.ready = count
            self.tell(say.rdy(count))

    def finish(self, message: Message, data: bytes) -> None:
        """A message was answered; nobody is told if it came over a connection that is no more."""
        if self.held.pop(message.id, None) is message:
            self.tell(data)
            if not self.held:
                self._subscriber.settled()

    async def close(self) -> None:
        """Take no more messages."""
        self.listed = False
        if self.subscribed:
            await self.ask(say.cls())

    def answered(self, data: bytes) -> None:
        if self._answers:
            self._answers.popleft().set_result(data)

    def refused(self, problem: ProtocolError) -> None:
        if problem.fatal and self._answers:
            self._answers.popleft().set_exception(problem)
        elif not problem.fatal:
            log.warning("%s: %s", self.address, problem)

    def delivered(self, message: say.Message) -> None:
        self.lately += 1
        found = self.held[message.id] = Message(message, self)
        self._subscriber.deliver(found)

    def ordered(self, connection: Connection, order: Order) -> None:
        """Orders are for publishers."""

    def writable(self) -> None:
        """What a subscriber says is bounded by what it has in flight."""

    def ended(self, connection: Connection, problem: Exception | None) -> None:
        del connection
        self.held.clear()  # the broker gives them to others
        self.ready = 0
        lost = ClientError(f"{self.address} closed the connection{f': {problem}' if problem else ''}")
        while self._answers:
            self._answers.popleft().set_exception(lost)
        if self._over is not None and not self._over.done():
            self._over.set_result(None)
        self._subscriber.settled()


class Subscriber:
    """Messages of one channel: `async with Subscriber("traffic", "billing") as s: async for message in s: …`.

    `run(handler)` calls back instead. Give one of: `controller`, `brokers` (addresses), `lookupd` (addresses of
    nsqlookupd's HTTP).
    """

    def __init__(
        self,
        topic: str,
        channel: str,
        *,
        controller: str | Cluster | None = None,
        brokers: Iterable[str] | None = None,
        lookupd: Iterable[str] | None = None,
        max_in_flight: int = 200,
        poll_s: float = 15.0,
        close_s: float = 5.0,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        deflate: bool = False,
        snappy: bool = False,
        auth_secret: bytes | None = None,
        msg_timeout_ms: int | None = None,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        if sum(given is not None for given in (controller, brokers, lookupd)) > 1:
            raise InputError("give one of controller, brokers and lookupd")
        if max_in_flight < 1:
            raise InputError(f"max_in_flight = {max_in_flight}: at least one message must be on its way")
        say.sub(topic, channel)  # the names are judged here
        self.topic = topic
        self.channel = channel
        self.options = ConnectionOptions(
            tls,
            deflate=deflate,
            snappy=snappy,
            auth_secret=auth_secret,
            heartbeat_ms=_HEARTBEAT_MS,
            identity={**({} if msg_timeout_ms is None else {"msg_timeout": msg_timeout_ms}), **(identity or {})},
        )
        self._controller = controller or DEFAULT_CONTROLLER
        self._fixed = None if brokers is None else list(brokers)
        self._lookupd = None if lookupd is None else list(lookupd)
        for address in self._fixed or ():
            split_address(address)
        self._max_in_flight = max_in_flight
        self._poll_s = poll_s
        self._close_s = close_s
        self._token = token
        self._cluster: Cluster | None = None
        self._found: dict[int, set[str]] = {}  # addresses, by the number of their source
        self._links: dict[str, _Link] = {}
        self._turn = 0
        self._queue: asyncio.Queue[Message | None] = asyncio.Queue()  # None: nothing more comes
        self._problem: SRTMError | None = None
        self._settled: asyncio.Event = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._open = False

    async def __aenter__(self) -> Subscriber:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Begin to look for brokers; messages come as they are found."""
        self._open = True
        following = [self._follow(number, source) for number, source in enumerate(self._sources())]
        self._tasks = [asyncio.create_task(work) for work in (*following, self._look())]

    async def close(self) -> None:
        """Take no more messages, wait until those that were taken are finished, and end.

        What nobody has taken from here goes back to the brokers at once, and what is not finished after `close_s`.
        """
        if not self._open:
            return
        self._open = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        links = [link for link in self._links.values() if link.subscribed]
        try:
            async with asyncio.timeout(self._close_s):
                await asyncio.gather(*(link.close() for link in links), return_exceptions=True)
                while not self._queue.empty():
                    message = self._queue.get_nowait()
                    if message is not None and not message.answered:
                        await message.requeue()
                while any(link.held for link in links if link.subscribed):
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            log.warning("%s/%s: messages were not finished within %g s", self.topic, self.channel, self._close_s)
        await asyncio.sleep(0)  # what was said last is written at the end of a turn
        tasks = [link.task for link in self._links.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._queue.put_nowait(None)
        if self._cluster is not None and self._cluster is not self._controller:
            await self._cluster.release()

    async def __aiter__(self) -> AsyncIterator[Message]:
        while (message := await self.get()) is not None:
            yield message

    async def get(self) -> Message | None:
        """The next message; None when the subscriber was closed, an error when it was refused."""
        while (message := await self._queue.get()) is not None:
            if message.held:
                return message
        self._queue.put_nowait(None)  # for others who wait
        if self._problem is not None and self._open:
            raise self._problem
        return None

    async def run(self, handler: Callable[[Message], Awaitable[None]], *, concurrency: int = 1) -> None:
        """Call the handler for every message, `concurrency` at a time, until the subscriber is closed.

        A message whose handler returns is finished; where it raises, it is logged and the message is requeued, later
        each time.
        """

        async def work() -> None:
            async for message in self:
                try:
                    await handler(message)
                except Exception:
                    log.exception("%s/%s: the handler failed", self.topic, self.channel)
                    if not message.answered:
                        await message.requeue(min(60.0, 0.1 * 2 ** min(message.attempts, 10)))
                else:
                    if not message.answered:
                        await message.finish()

        async with asyncio.TaskGroup() as workers:
            for _ in range(concurrency):
                workers.create_task(work())

    @property
    def brokers(self) -> list[str]:
        """Addresses at which it is subscribed now."""
        return [address for address, link in self._links.items() if link.ready or link.subscribed]

    @property
    def in_flight(self) -> int:
        """Messages that it has, and that are not finished."""
        return sum(len(link.held) for link in self._links.values())

    def deliver(self, message: Message) -> None:
        """A broker sent a message."""
        self._queue.put_nowait(message)

    def settled(self) -> None:
        """A broker has nothing in flight here any more."""
        self._settled.set()

    def problem(self, problem: SRTMError) -> None:
        """A broker could not be subscribed to; where it refused, no other will agree."""
        log.info("%s/%s: %s", self.topic, self.channel, problem)
        if isinstance(problem, ProtocolError):
            self._fail(problem)

    def left(self, link: _Link) -> None:
        """A broker is no longer followed."""
        if self._links.get(link.address) is link:
            del self._links[link.address]

    def _fail(self, problem: SRTMError) -> None:
        self._problem = problem
        self._queue.put_nowait(None)

    async def _follow(self, number: int, source: AsyncIterator[set[str]]) -> None:
        """Be subscribed wherever any source says that the topic is."""
        try:
            async for found in source:
                self._found[number] = found
                addresses = set().union(*self._found.values())
                for address in addresses - self._links.keys():
                    self._links[address] = _Link(self, address)
                for address, link in self._links.items():
                    link.listed = address in addresses
        except SRTMError as problem:
            self._fail(problem)

    def _sources(self) -> list[AsyncIterator[set[str]]]:
        if self._fixed is not None:
            return [_always(set(self._fixed))]
        if self._lookupd is not None:
            return [lookup(self._lookupd, self.topic, self._poll_s)]
        given = self._controller
        self._cluster = cluster = given if isinstance(given, Cluster) else Cluster.shared(given, self._token)
        return [_watched(cluster, self.topic), lookup([cluster.controller], self.topic, self._poll_s, cluster.tls)]

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_REBALANCE_S)
            for link in list(self._links.values()):
                link.idle = 0 if link.lately or link.held else link.idle + 1
                link.lately = 0
                if not link.listed and (link.idle > _LINGER or not link.subscribed):
                    link.task.cancel()
            self.rebalance()

    def rebalance(self) -> None:
        """Share `max_in_flight` out."""
        links = [link for link in self._links.values() if link.subscribed]
        if not links or not self._open:
            return
        if len(links) > self._max_in_flight:  # not everyone can have one: in turns
            self._turn = (self._turn + self._max_in_flight) % len(links)
            chosen = (links[self._turn :] + links[: self._turn])[: self._max_in_flight]
            for link in links:
                if link not in chosen:
                    link.set_ready(0)
            for link in chosen:
                link.set_ready(1)
            return
        busy = [link for link in links if not link.idle] or links
        each, more = divmod(self._max_in_flight - (len(links) - len(busy)), len(busy))
        for link in links:
            if link not in busy:
                link.set_ready(1)
        for number, link in enumerate(busy):
            link.set_ready(each + (number < more))


async def _always(addresses: set[str]) -> AsyncIterator[set[str]]:
    yield addresses


async def _watched(cluster: Cluster, topic: str) -> AsyncIterator[set[str]]:
    async for brokers in cluster.watch(topic):
        yield set(brokers.values())
