"""A subscriber: one channel of a topic, at every place that delivers it.

In: a topic, a channel, and a source of places (`sources`). Out: messages, each to finish or requeue; one that is
neither is delivered again after its timeout.

Always holds: the subscriber asks every known place before it subscribes anywhere, as far as that is possible without
subscribing. If none refuses, it subscribes at one place, and at the others once that one has agreed. A late refusal
would cost what ephemeral channels at other places had already taken.

A broker that is no longer listed stays subscribed until it has been idle for a minute, because publishers that moved
away leave messages behind.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any

from srtm.client.cluster import Cluster
from srtm.client.connection import ConnectionOptions
from srtm.client.links import Link, Message
from srtm.client.places import Places
from srtm.client.sharing import Sharing
from srtm.client.sources import Source, Sources
from srtm.errors import ClientError, InputError, SRTMError
from srtm.protocol import client as say

__all__ = ["Message", "Subscriber"]

log = logging.getLogger(__name__)

_REBALANCE_S = 0.5
_HEARTBEAT_MS = 5_000
_LINGER = 120  # looks at an idle broker that is no longer listed before the subscriber leaves it: a minute


class Subscriber:
    """Messages of one channel: `async with Subscriber("traffic", "billing") as s: async for message in s: …`.

    `run(handler)` calls back instead. Give one of `controller`, `brokers` (addresses) and `lookupd` (HTTP addresses of
    nsqlookupds). `engine` gives login and TLS files for a delivery engine, as an address like that of the brokers.
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
        if max_in_flight < 1:
            raise InputError(f"max_in_flight = {max_in_flight}: it must be at least 1")
        say.sub(topic, channel)  # checks the names
        self.topic = topic
        self.channel = channel
        self.trouble: str | None = None  # the latest obstacle
        options = ConnectionOptions(
            tls,
            deflate=deflate,
            snappy=snappy,
            auth_secret=auth_secret,
            heartbeat_ms=_HEARTBEAT_MS,
            identity={**({} if msg_timeout_ms is None else {"msg_timeout": msg_timeout_ms}), **(identity or {})},
        )
        self._sources = Sources(topic, controller, brokers, lookupd, poll_s, token)
        self._places = Places(topic, options, engine, msg_timeout_ms)
        self._sharing = Sharing(max_in_flight)
        self._close_s = close_s
        self._found: dict[object, set[str]] = {}  # places by source: a number, or a broker that delivers elsewhere
        self._links: dict[str, Link] = {}
        self._consent = _Consent()
        self._queue: asyncio.Queue[Message | None] = asyncio.Queue()  # None: the end
        self._problem: SRTMError | None = None
        self._settled = asyncio.Event()
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
        sources = self._sources.open()
        self._consent.unheard = set(range(len(sources)))
        following = [self._follow(number, source) for number, source in enumerate(sources)]
        self._tasks = [asyncio.create_task(work) for work in (*following, self._look())]

    async def wait_subscribed(self) -> None:
        """Wait until it is subscribed at every known place, and at one at least; raise if one refuses."""
        while not self._subscribed_everywhere():
            if self._problem is not None:
                raise self._problem
            await self._consent.changed()

    def _subscribed_everywhere(self) -> bool:
        links = [link for link in self._links.values() if link.listed and link.standing != "elsewhere"]
        return bool(links) and not self._consent.unheard and all(link.subscribed for link in links)

    async def close(self) -> None:
        """Accept no more messages, wait until those in flight are answered, and close.

        Messages that nobody has taken from here go back to the brokers at once; unanswered ones do after `close_s`.
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
            log.warning("%s/%s: some messages were not finished within %g s", self.topic, self.channel, self._close_s)
        await asyncio.sleep(0)  # links write at the end of a turn
        tasks = [link.task for link in self._links.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._queue.put_nowait(None)
        await self._sources.close()

    async def __aiter__(self) -> AsyncIterator[Message]:
        while (message := await self.get()) is not None:
            yield message

    async def get(self) -> Message | None:
        """Return the next message; None once the subscriber is closed. Raise if a place refuses it."""
        while (message := await self._queue.get()) is not None:
            if message.held:
                return message
        self._queue.put_nowait(None)  # for other callers
        if self._problem is not None and self._open:
            raise self._problem
        return None

    async def run(self, handler: Callable[[Message], Awaitable[None]], *, concurrency: int = 1) -> None:
        """Call the handler for every message, `concurrency` at a time, until the subscriber is closed.

        A message whose handler returns is finished. If the handler raises, the error is logged and the message is
        requeued, with a longer delay each time.
        """

        async def work() -> None:
            async for message in self:
                try:
                    await handler(message)
                except Exception:
                    log.exception("%s/%s: handler failed", self.topic, self.channel)
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
        """Addresses at which it is subscribed."""
        return [link.address for link in self._links.values() if link.ready or link.subscribed]

    @property
    def in_flight(self) -> int:
        """Messages delivered and not answered."""
        return sum(len(link.held) for link in self._links.values())

    def deliver(self, message: Message) -> None:
        """A message arrived."""
        self._queue.put_nowait(message)

    def settled(self) -> None:
        """A link has nothing in flight."""
        self._settled.set()

    async def turn(self, link: Link) -> None:
        """Wait until a link may subscribe."""
        while not self._consent.allows(link, self._links.values()):
            await self._consent.changed()

    def agreed(self, link: Link) -> None:
        """A place agreed: others will not refuse."""
        del link
        self._consent.given = True
        self._consent.tell()
        self.rebalance()

    def problem(self, link: Link, problem: SRTMError) -> None:
        """A place cannot be reached, or refuses; a refusal is final unless the subscriber is subscribed elsewhere."""
        refuses = isinstance(problem, InputError) or not isinstance(problem, ClientError)
        subscribed = any(each.subscribed for each in self._links.values())
        if refuses and not (self._consent.given and subscribed):
            self._fail(problem)
        elif refuses and link.standing != "refused":
            log.warning("%s/%s: %s", self.topic, self.channel, problem)
        else:
            log.info("%s/%s: %s", self.topic, self.channel, problem)
        link.standing = "refused" if refuses else "away"
        self.trouble = str(problem)
        self._consent.tell()

    def elsewhere(self, link: Link, place: str) -> None:
        """A broker delivers through an engine: subscribe there."""
        self._found[link.address] = {place}
        try:
            self._settle()
        except SRTMError as problem:
            self._consent.withdrawn = True
            self._fail(problem)

    def lost(self) -> None:
        """A connection ended, or is not needed."""
        self._consent.tell()
        self.rebalance()

    def left(self, link: Link) -> None:
        """A place is no longer followed."""
        for key, found in list(self._links.items()):
            if found is link:
                del self._links[key]
        self._found.pop(link.address, None)
        self._consent.tell()

    def _fail(self, problem: SRTMError) -> None:
        self._problem = problem
        self._queue.put_nowait(None)
        self._consent.tell()

    async def _follow(self, number: int, source: Source) -> None:
        """Subscribe wherever a source says that the topic is."""
        try:
            async with aclosing(source) as places:
                async for found in places:
                    self._found[number] = found
                    self._settle()
                    self._consent.unheard.discard(number)
                    self._consent.tell()
        except SRTMError as problem:
            self._consent.withdrawn = True
            self._fail(problem)

    def _settle(self) -> None:
        """Have a link to every place, and list no other."""
        for address in self._sources.brokers:
            self._places.is_broker(address)
        wanted = self._places.keys(set().union(*self._found.values()))
        for key in wanted.keys() - self._links.keys():
            self._links[key] = self._places.link(self, key, wanted[key])
        for key, link in self._links.items():
            link.listed = key in wanted

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
        """Share `max_in_flight` out again."""
        if self._open:
            self._sharing.share(link for link in self._links.values() if link.subscribed)


class _Consent:
    """Whether links may subscribe: all have been asked, and none refuses."""

    def __init__(self) -> None:
        self.given = False  # a place has agreed
        self.withdrawn = False  # what the user gave does not fit the engine that delivers the topic
        self.unheard: set[int] = set()  # sources that have said nothing yet
        self._change = asyncio.Event()

    def allows(self, link: Link, links: Iterable[Link]) -> bool:
        """Whether a link may subscribe now."""
        if self.given:
            return True
        if self.withdrawn or self.unheard:
            return False
        in_the_way = ("asking", "refused", "subscribing")
        return not any(each.standing in in_the_way for each in links if each is not link and each.listed)

    def tell(self) -> None:
        """Something changed."""
        change, self._change = self._change, asyncio.Event()
        change.set()

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._change.wait()
