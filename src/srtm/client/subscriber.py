"""A subscriber: one channel of a topic, at every place that delivers it.

In: a topic, a channel, and who knows where it is delivered: a controller (which pushes changes of its own brokers and
their engines, and is polled for stock nsqds that are registered there), nsqlookupds (which are polled), or a list. Out:
messages, each to be finished or requeued; one that is neither is delivered again after its time-out.

Always holds: nobody is subscribed to before every place that is known has been asked, as far as that is possible
without subscribing, and none refuses; then one place is subscribed to, and the others after it has agreed. A refusal
would otherwise cost what ephemeral channels at other places had already taken.

`max_in_flight` is shared out: a connection that delivered nothing lately keeps room for one message, the others have
the rest. A broker that is no longer listed is kept until it has been idle for a minute, because publishers that moved
away leave messages behind.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any

from srtm.client.cluster import DEFAULT_CONTROLLER, Cluster
from srtm.client.connection import ConnectionOptions
from srtm.client.links import Link, Message
from srtm.client.lookup import lookup
from srtm.client.places import Places
from srtm.errors import ClientError, InputError, SRTMError
from srtm.net.sockets import split_address
from srtm.protocol import client as say

__all__ = ["Message", "Subscriber"]

log = logging.getLogger(__name__)

_REBALANCE_S = 0.5
_HEARTBEAT_MS = 5_000
_LINGER = 120  # looks at an idle broker that is no longer listed, before it is left: a minute


class Subscriber:
    """Messages of one channel: `async with Subscriber("traffic", "billing") as s: async for message in s: …`.

    `run(handler)` calls back instead. Give one of: `controller`, `brokers` (addresses), `lookupd` (addresses of
    nsqlookupd's HTTP). `engine` is a login and files for a delivery engine, as brokers are given them.
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
        engine: str | None = None,
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
        self._timeout_ms = msg_timeout_ms
        self._places = Places(topic, self.options, engine)
        self._found: dict[object, set[str]] = {}  # places, by their source: a number, or a broker that is a signpost
        self._unheard: set[int] = set()  # sources that have said nothing yet
        self._links: dict[str, Link] = {}
        self._hopeless = False  # what was given does not fit what delivers the topic
        self._agreed = False  # a place has agreed to be subscribed to
        self._change = asyncio.Event()  # of how links stand
        self.trouble: str | None = None  # what was last in the way
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
        sources = self._sources()
        self._unheard = set(range(len(sources)))
        following = [self._follow(number, source) for number, source in enumerate(sources)]
        self._tasks = [asyncio.create_task(work) for work in (*following, self._look())]

    async def wait_subscribed(self) -> None:
        """Until it is subscribed at every place that is known, and there is one; an error when it was refused."""
        while not self._subscribed_everywhere():
            if self._problem is not None:
                raise self._problem
            await self._change.wait()

    def _subscribed_everywhere(self) -> bool:
        links = [link for link in self._links.values() if link.listed and link.standing != "elsewhere"]
        return bool(links) and not self._unheard and all(link.subscribed for link in links)

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
                await asyncio.gather(*(link.leave() for link in links), return_exceptions=True)
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
        return [link.address for link in self._links.values() if link.ready or link.subscribed]

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

    async def turn(self, link: Link) -> None:
        """Wait until a link may subscribe."""
        while not self._may_subscribe(link):
            await self._change.wait()

    def _may_subscribe(self, link: Link) -> bool:
        if self._agreed:
            return True
        in_the_way = ("asking", "refused", "subscribing")
        others = (each for each in self._links.values() if each is not link and each.listed)
        return not (self._hopeless or self._unheard) and not any(other.standing in in_the_way for other in others)

    def agreed(self, link: Link) -> None:
        """A place is subscribed to: others will not refuse."""
        del link
        self._agreed = True
        self._changed()
        self.rebalance()

    def problem(self, link: Link, problem: SRTMError) -> None:
        """A place cannot be reached, or refuses; if none has agreed, or none is left, a refusal is the end."""
        refuses = isinstance(problem, InputError) or not isinstance(problem, ClientError)
        subscribed = any(each.subscribed for each in self._links.values())
        if refuses and not (self._agreed and subscribed):
            self._fail(problem)
        elif refuses and link.standing != "refused":
            log.warning("%s/%s: %s", self.topic, self.channel, problem)
        else:
            log.info("%s/%s: %s", self.topic, self.channel, problem)
        link.standing = "refused" if refuses else "away"
        self.trouble = str(problem)
        self._changed()

    def elsewhere(self, link: Link, place: str) -> None:
        """A broker delivers through an engine: go there."""
        self._found[link.address] = {place}
        try:
            self._settle()
        except SRTMError as problem:
            self._hopeless = True
            self._fail(problem)

    def lost(self) -> None:
        """A connection ended, or is not needed."""
        self._changed()
        self.rebalance()

    def left(self, link: Link) -> None:
        """A place is no longer followed."""
        for key, found in list(self._links.items()):
            if found is link:
                del self._links[key]
        self._found.pop(link.address, None)
        self._changed()

    def _changed(self) -> None:
        change, self._change = self._change, asyncio.Event()
        change.set()

    def _fail(self, problem: SRTMError) -> None:
        self._problem = problem
        self._queue.put_nowait(None)
        self._changed()

    async def _follow(self, number: int, source: AsyncGenerator[set[str], None]) -> None:
        """Be subscribed wherever any source says that the topic is."""
        try:
            async with aclosing(source) as places:
                async for found in places:
                    self._found[number] = found
                    self._settle()
                    self._unheard.discard(number)
                    self._changed()
        except SRTMError as problem:
            self._hopeless = True
            self._fail(problem)

    def _settle(self) -> None:
        """A link to every place, and to no other."""
        if self._cluster is not None:
            for address in self._cluster.brokers(self.topic).values():
                self._places.is_broker(address)
        wanted = self._places.keys(set().union(*self._found.values()))
        for key in wanted.keys() - self._links.keys():
            self._links[key] = self._places.link(self, key, wanted[key], self._timeout_ms)
        for key, link in self._links.items():
            link.listed = key in wanted

    def _sources(self) -> list[AsyncGenerator[set[str], None]]:
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


async def _always(addresses: set[str]) -> AsyncGenerator[set[str], None]:
    yield addresses


async def _watched(cluster: Cluster, topic: str) -> AsyncGenerator[set[str], None]:
    async with aclosing(cluster.watch(topic)) as changes:
        async for _ in changes:
            yield cluster.delivery(topic)
