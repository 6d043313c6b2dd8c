"""How a load hears its own messages: at every place that delivers its topic, in bulk if possible.

In: places, a channel. Out: numbers of messages and their arrival times, told to a counter. An `Ear` reads NSQ's
protocol in the clear, one connection per place. An engine that speaks another protocol, or TLS, gets an ordinary
`Subscriber` instead, and the arrival time is that of reading.

Always holds: every known place has answered before the first subscription (`links`).
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from srtm.client.load.ear import Counter, Ear
from srtm.client.load.options import CONNECTION, SMALLEST
from srtm.client.places import Places
from srtm.client.subscriber import Subscriber
from srtm.errors import ClientError, ProtocolError

if TYPE_CHECKING:
    from srtm.client.cluster import Cluster
    from srtm.client.links import Message

_IN_FLIGHT = 2_500  # at a place that is not read in bulk; an nsqd allows no more
_LOOK_S = 0.25  # between attempts to reach places that are not heard


class Ears:
    """Hears one channel wherever its topic is delivered."""

    def __init__(self, counter: Counter, topic: str, channel: str, engine: str | None) -> None:
        self._counter, self._topic, self._channel, self._engine = counter, topic, channel, engine
        self._places = Places(topic, CONNECTION, engine)
        self._ears: dict[str, Ear] = {}
        self._listener: _Listener | None = None  # instead of ears
        self._watching: asyncio.Task[None] | None = None

    @property
    def brokers(self) -> list[str]:
        """Addresses of the places that are heard."""
        return self._listener.brokers if self._listener is not None else list(self._ears)

    async def open(self, places: set[str], cluster: Cluster | None, patience_s: float) -> None:
        """Hear all of these places, or none: leaving an ephemeral channel would delete its messages."""
        wanted = self._places.keys(places)
        if all(self._places.plain(key, place) for key, place in wanted.items()):
            ears = [Ear(self._counter, key, self._places.options(key)) for key in wanted]
            try:
                if await self._all_hear(ears):
                    self._ears = {ear.address: ear for ear in ears if not ear.closed}
                    self._watching = asyncio.create_task(self._watch(cluster)) if cluster is not None else None
                    return
            finally:
                for ear in ears if not self._ears else ():
                    ear.close()
        where: dict[str, Any] = {"brokers": sorted(places)} if cluster is None else {"controller": cluster}
        self._listener = _Listener(self._counter, self._topic, self._channel, engine=self._engine, **where)
        await self._listener.heard(patience_s)

    async def close(self) -> None:
        """Unsubscribe everywhere."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for ear in self._ears.values():
            ear.close()
        if self._listener is not None:
            await self._listener.close()

    async def _all_hear(self, ears: list[Ear]) -> bool:
        """Subscribe everywhere unless a place refuses; return False if a broker delivers through an engine."""
        found = await asyncio.gather(*(ear.prepare() for ear in ears), return_exceptions=True)
        there = [ear for ear, problem in zip(ears, found, strict=True) if problem is None]
        for ear, problem in zip(ears, found, strict=True):
            if problem is not None and not (there and isinstance(problem, ClientError)):
                raise problem
            if problem is not None:  # a dead broker's engine; if it comes back, `_watch` hears it
                ear.close()
        if any(ear.engine for ear in there):
            return False
        await there[0].open(self._topic, self._channel)  # once one place agrees, the others will
        await asyncio.gather(*(ear.open(self._topic, self._channel) for ear in there[1:]))
        return True

    async def _hear(self, address: str) -> None:
        ear = self._ears[address] = Ear(self._counter, address, self._places.options(address))
        try:
            await ear.prepare()
            if ear.engine is None:
                await ear.open(self._topic, self._channel)
        except (ClientError, ProtocolError):
            ear.close()
            del self._ears[address]
            raise

    async def _watch(self, cluster: Cluster) -> None:
        """Hear brokers that join the topic or come back, or their messages would count as lost."""
        places = set[str]()
        async with aclosing(cluster.watch(self._topic)) as changes:
            waiting: asyncio.Future[dict[str, str]] = asyncio.ensure_future(anext(changes))
            try:
                while True:
                    done, _ = await asyncio.wait([waiting], timeout=_LOOK_S)
                    if done:
                        waiting.result()
                        places = set(self._places.keys(cluster.delivery(self._topic)))
                        waiting = asyncio.ensure_future(anext(changes))
                    for address in [address for address, ear in self._ears.items() if ear.closed]:
                        del self._ears[address]
                    for address in places - self._ears.keys():
                        with suppress(ClientError, ProtocolError):
                            await self._hear(address)
            finally:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)


class _Listener(Subscriber):
    """A subscription at places that are not read in bulk: it counts messages one by one."""

    def __init__(self, counter: Counter, topic: str, channel: str, **options: Any) -> None:
        super().__init__(topic, channel, max_in_flight=_IN_FLIGHT, close_s=1.0, **options)
        self._counter = counter

    def deliver(self, message: Message) -> None:
        """Count a message, and finish it."""
        stamp_ns, body = time.time_ns(), message.body
        message.finish_nowait()
        if len(body) < SMALLEST or int.from_bytes(body[:8], "big") != self._counter.run:
            self._counter.foreign += 1
        else:
            self._counter.heard(np.array([int.from_bytes(body[12:20], "big")], np.int64), stamp_ns)

    async def heard(self, patience_s: float) -> None:
        """Subscribe wherever the topic is delivered; ClientError if that takes too long."""
        await self.open()
        try:
            async with asyncio.timeout(patience_s):
                await self.wait_subscribed()
        except TimeoutError:
            raise ClientError(
                f"cannot subscribe to topic {self.topic!r} within {patience_s:g} s: {self.trouble or 'no answer'};"
                " --channel none measures up to the brokers' answers instead"
            ) from None
