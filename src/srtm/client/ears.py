"""How a load hears its own messages: at every place that delivers its topic, counted in bulk if it can be.

In: places, a channel. Out: numbers of messages and when they came, told to the load. NSQ's protocol in the clear is
read by one connection a place, frames of one size, with the kernel's time of arrival. An engine that speaks another
protocol, or TLS, is subscribed to as by any `Subscriber`, with the time of reading.

Always holds: every place that is known has been asked before any is subscribed to (`links`).
"""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from srtm.client.connection import Connection, ConnectionOptions
from srtm.client.links import Message, check_login, engine_at
from srtm.client.places import Places
from srtm.client.subscriber import Subscriber
from srtm.errors import ClientError, ProtocolError
from srtm.net.stamps import ANCILLARY, arrival_ns, stamp
from srtm.net.writer import Writer
from srtm.protocol import client as say
from srtm.protocol import frames

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from srtm.client.cluster import Cluster
    from srtm.protocol.orders import Order

SMALLEST = 20  # bytes of a body
# Without an output buffer: an nsqd keeps messages there for up to 250 ms, and that is not what is to be measured.
OPTIONS = ConnectionOptions(heartbeat_ms=30_000, timeout_s=10.0, identity={"output_buffer_size": -1})
_IN_FLIGHT = 2_500  # at an engine that is not read in bulk; as much as an nsqd allows
_MOMENT_S = 0.001  # that finished messages may wait for others
_LOOK_S = 0.25  # after which places that are not heard are tried again
_FIN = np.dtype([("verb", "S4"), ("id", "V16"), ("end", "S1")])
_now_ns = time.time_ns  # the clock that the kernel stamps with


class Counter(Protocol):
    """The load, as its ears see it."""

    run: int
    frame: np.dtype[Any]
    foreign: int  # messages of others on the channel

    def heard(self, numbers: NDArray[np.int64], stamp_ns: int) -> None:
        """Messages of this run, and when they came."""


class Ears:
    """All of them: of one channel, wherever its topic is delivered."""

    def __init__(self, load: Counter, topic: str, channel: str, engine: str | None) -> None:
        self._load, self._topic, self._channel, self._engine = load, topic, channel, engine
        self._places = Places(topic, OPTIONS, engine)
        self._ears: dict[str, _Ear] = {}
        self._listener: _Listener | None = None  # instead of ears
        self._watching: asyncio.Task[None] | None = None

    @property
    def brokers(self) -> list[str]:
        """Where it hears."""
        return self._listener.brokers if self._listener is not None else list(self._ears)

    async def open(self, places: set[str], cluster: Cluster | None, patience_s: float) -> None:
        """Hear at all of these places, or at none: who leaves an ephemeral channel takes its messages away."""
        wanted = self._places.keys(places)
        if all(self._places.plain(key, place) for key, place in wanted.items()):
            ears = [_Ear(self._load, key, self._places.options(key)) for key in wanted]
            try:
                if await self._all_hear(ears):
                    self._ears = {ear.address: ear for ear in ears if not ear.closed}
                    self._watching = asyncio.create_task(self._watch(cluster)) if cluster is not None else None
                    return
            finally:
                for ear in ears if not self._ears else ():
                    ear.close()
        where: dict[str, Any] = {"brokers": sorted(places)} if cluster is None else {"controller": cluster}
        self._listener = _Listener(self._load, self._topic, self._channel, engine=self._engine, **where)
        await self._listener.heard(patience_s)

    async def close(self) -> None:
        """Hear no more."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for ear in self._ears.values():
            ear.close()
        if self._listener is not None:
            await self._listener.close()

    async def _all_hear(self, ears: list[_Ear]) -> bool:
        """Subscribe everywhere, if nobody is against it; False where a broker delivers through an engine."""
        found = await asyncio.gather(*(ear.prepare() for ear in ears), return_exceptions=True)
        there = [ear for ear, problem in zip(ears, found, strict=True) if problem is None]
        for ear, problem in zip(ears, found, strict=True):
            if problem is not None and not (there and isinstance(problem, ClientError)):
                raise problem
            if problem is not None:  # an engine of a broker that is dead; should it come back, `_watch` hears it
                ear.close()
        if any(ear.engine for ear in there):
            return False
        await there[0].open(self._topic, self._channel)  # if one agrees, so will the others
        await asyncio.gather(*(ear.open(self._topic, self._channel) for ear in there[1:]))
        return True

    async def _hear(self, address: str) -> None:
        ear = self._ears[address] = _Ear(self._load, address, self._places.options(address))
        try:
            await ear.prepare()
            if ear.engine is None:
                await ear.open(self._topic, self._channel)
        except (ClientError, ProtocolError):
            ear.close()
            del self._ears[address]
            raise

    async def _watch(self, cluster: Cluster) -> None:
        """Hear brokers that the topic gets, or that came back; a load that hears too little would call it lost."""
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


def frame_of(size: int) -> np.dtype[Any]:
    """A message frame with a body of the load's."""
    return np.dtype(
        [
            ("size", ">i4"),
            ("kind", ">i4"),
            ("timestamp_ns", ">i8"),
            ("attempts", ">u2"),
            ("id", "V16"),
            ("run", ">u8"),
            ("publisher", ">u4"),
            ("number", ">u8"),
            ("rest", f"V{size - SMALLEST}"),
        ]
    )


class _Listener(Subscriber):
    """A subscription at places that are not read in bulk: messages are counted when they come."""

    def __init__(self, load: Counter, topic: str, channel: str, **options: Any) -> None:
        super().__init__(topic, channel, max_in_flight=_IN_FLIGHT, close_s=1.0, **options)
        self._load = load

    def deliver(self, message: Message) -> None:
        """Count a message, and finish it."""
        stamp_ns, body = _now_ns(), message.body
        message.finish_nowait()
        if len(body) < SMALLEST or int.from_bytes(body[:8], "big") != self._load.run:
            self._load.foreign += 1
        else:
            self._load.heard(np.array([int.from_bytes(body[12:20], "big")], np.int64), stamp_ns)

    async def heard(self, patience_s: float) -> None:
        """Until it is subscribed wherever the topic is delivered."""
        await self.open()
        try:
            async with asyncio.timeout(patience_s):
                await self.wait_subscribed()
        except TimeoutError:
            raise ClientError(
                f"topic {self.topic!r} cannot be heard within {patience_s:g} s: {self.trouble or 'nobody answers'};"
                " measure to the answers with --channel none"
            ) from None


class _Ear:
    """The subscription at one broker: frames of one size, read and finished in bulk."""

    def __init__(self, load: Counter, address: str, options: ConnectionOptions) -> None:
        self.address = address
        self.closed = False
        self.engine: str | None = None  # that delivers, instead of the broker
        self._options = options
        self._connection: Connection | None = None
        self._load = load
        self._loop = asyncio.get_running_loop()
        self._subscribed: asyncio.Future[bytes] = self._loop.create_future()
        self._sock: socket.socket | None = None
        self._buffer = bytearray(1024 * 1024)
        self._view = memoryview(self._buffer)
        self._end = 0  # of what was read and not understood yet
        self._out = bytearray()
        self._writer: Writer | None = None
        self._protocol = say.ClientProtocol()

    async def prepare(self) -> None:
        """Connect, and see whether messages are delivered there."""
        self._connection = await Connection.open(self.address, self, self._options)
        self.engine = engine_at(self._connection)
        if self.engine is None:
            check_login(self._connection, self._options, nsqd=True)

    async def open(self, topic: str, channel: str) -> None:
        """Subscribe, and take over the socket."""
        connection = self._connection
        assert connection is not None
        connection.send(say.sub(topic, channel))
        async with asyncio.timeout(OPTIONS.timeout_s):
            await self._subscribed
        limit = connection.settled.get("max_rdy_count", 2500)
        self._sock = connection.detach()
        stamp(self._sock)
        self._writer = Writer(self._loop, self._sock, lambda: None, lambda _: None)  # reading tells of its end
        self._loop.add_reader(self._sock, self._readable)
        self._say(say.rdy(limit))

    def close(self) -> None:
        """Hear no more."""
        self.closed = True
        if self._connection is not None:
            self._connection.close()
        if self._sock is not None:
            self._loop.remove_reader(self._sock)
            if self._writer is not None:
                self._writer.close()
            self._sock.close()
            self._sock = None

    def _readable(self) -> None:
        assert self._sock is not None
        try:
            size, ancillary, _, _ = self._sock.recvmsg_into([self._view[self._end :]], ANCILLARY)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            self.close()
            return
        stamp_ns = arrival_ns(ancillary) or _now_ns()
        end = self._end + size
        at = self._take(end, stamp_ns)
        self._view[: end - at] = self._view[at:end]
        self._end = end - at

    def _take(self, end: int, stamp_ns: int) -> int:
        """Understand what is there up to `end`; gives up to where."""
        frame, at = self._load.frame, 0
        while True:
            count = (end - at) // frame.itemsize
            if count:
                found = np.frombuffer(self._buffer, frame, count, at)
                fits = (found["size"] == frame.itemsize - 4) & (found["kind"] == frames.MESSAGE)
                if not fits.all():
                    found = found[: int(fits.argmin())]
                self._messages(found, stamp_ns)
                at += len(found) * frame.itemsize
            if end - at < 8:
                return at
            (size, _) = frames.FRAME_HEAD.unpack_from(self._buffer, at)
            stop = at + 4 + size
            if stop > end:
                return at
            self._other(bytes(self._view[at:stop]))
            at = stop

    def _messages(self, found: NDArray[Any], stamp_ns: int) -> None:
        if not len(found):
            return
        fins = np.empty(len(found), _FIN)
        fins["verb"], fins["id"], fins["end"] = b"FIN ", found["id"], b"\n"
        self._say(fins.tobytes())
        own = found["run"] == self._load.run
        if not own.all():
            self._load.foreign += len(found) - int(np.count_nonzero(own))
            found = found[own]
        self._load.heard(found["number"].astype(np.int64), stamp_ns)

    def _other(self, data: bytes) -> None:
        """A frame that is none of the load's messages."""
        for event in self._protocol.feed(data):
            if isinstance(event, say.Heartbeat):
                self._say(say.nop())
            elif isinstance(event, say.Message):
                self._load.foreign += 1
                self._say(say.fin(event.id))

    def _say(self, data: bytes) -> None:
        """Say it in a moment, with what comes until then: nobody waits for it."""
        if not self._out:
            self._loop.call_later(_MOMENT_S, self._push)
        self._out += data

    def _push(self) -> None:
        if self._writer is not None:
            self._writer.write(self._out)
            self._out.clear()

    def answered(self, data: bytes) -> None:
        """To SUB."""
        self._subscribed.set_result(data)

    def refused(self, problem: ProtocolError) -> None:
        """SUB was."""
        if not self._subscribed.done():
            self._subscribed.set_exception(problem)

    def delivered(self, message: say.Message) -> None:
        """Nothing comes before RDY."""
        raise AssertionError(message)

    def ordered(self, connection: Connection, order: Order) -> None:
        """Orders are for publishers."""

    def writable(self) -> None:
        """The socket is written by hand."""

    def ended(self, connection: Connection, problem: Exception | None) -> None:
        """It ended before it could be taken over."""
        del connection
        if not self._subscribed.done():
            self._subscribed.set_exception(ClientError(f"{self.address} closed the connection: {problem}"))
