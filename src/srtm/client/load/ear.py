"""A load's subscription at one broker: frames of one size, read, counted and finished in bulk by numpy.

In: bytes in the clear, with the kernel's arrival time of each read. Out: numbers of messages, told to a counter.
"""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from srtm.client.connection import Connection, ConnectionOptions
from srtm.client.links import check_login, engine_at
from srtm.client.load.options import CONNECTION, SMALLEST
from srtm.errors import ClientError, ProtocolError
from srtm.net.stamps import ANCILLARY, arrival_ns, stamp
from srtm.net.writer import Writer
from srtm.protocol import client as say
from srtm.protocol import frames

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from srtm.protocol.orders import Order

_TOGETHER_S = 0.001  # how long finished messages may wait for others
_FIN = np.dtype([("verb", "S4"), ("id", "V16"), ("end", "S1")])


class Counter(Protocol):
    """Counts a load's messages."""

    run: int
    frame: np.dtype[Any]
    foreign: int  # other publishers' messages on the channel

    def heard(self, numbers: NDArray[np.int64], stamp_ns: int) -> None:
        """Messages of this run arrived at this time."""


def frame_of(size: int) -> np.dtype[Any]:
    """Return the layout of a message frame with a body of this size."""
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


class Ear:
    """The subscription at one broker."""

    def __init__(self, counter: Counter, address: str, options: ConnectionOptions) -> None:
        self.address = address
        self.closed = False
        self.engine: str | None = None  # that delivers instead of the broker
        self._options = options
        self._connection: Connection | None = None
        self._counter = counter
        self._loop = asyncio.get_running_loop()
        self._subscribed: asyncio.Future[bytes] = self._loop.create_future()
        self._sock: socket.socket | None = None
        self._writer: Writer | None = None
        self._buffer = bytearray(1024 * 1024)
        self._view = memoryview(self._buffer)
        self._end = 0  # of what was read and not parsed yet
        self._out = bytearray()
        self._protocol = say.ClientProtocol()

    async def prepare(self) -> None:
        """Connect, and see whether the broker delivers by itself."""
        self._connection = await Connection.open(self.address, self, self._options)
        self.engine = engine_at(self._connection)
        if self.engine is None:
            check_login(self._connection, self._options, nsqd=True)

    async def open(self, topic: str, channel: str) -> None:
        """Subscribe, and take over the socket."""
        connection = self._connection
        assert connection is not None
        connection.send(say.sub(topic, channel))
        async with asyncio.timeout(CONNECTION.timeout_s):
            await self._subscribed
        limit = connection.settled.get("max_rdy_count", 2500)
        self._sock = connection.detach()
        stamp(self._sock)
        self._writer = Writer(self._loop, self._sock, lambda: None, lambda _: None)  # reading notices the end
        self._loop.add_reader(self._sock, self._readable)
        self._say(say.rdy(limit))

    def close(self) -> None:
        """Unsubscribe by closing the connection."""
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
        stamp_ns = arrival_ns(ancillary) or time.time_ns()
        end = self._end + size
        at = self._take(end, stamp_ns)
        self._view[: end - at] = self._view[at:end]
        self._end = end - at

    def _take(self, end: int, stamp_ns: int) -> int:
        """Parse the buffer up to `end`; return where the first incomplete frame begins."""
        frame, at = self._counter.frame, 0
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
        own = found["run"] == self._counter.run
        if not own.all():
            self._counter.foreign += len(found) - int(np.count_nonzero(own))
            found = found[own]
        self._counter.heard(found["number"].astype(np.int64), stamp_ns)

    def _other(self, data: bytes) -> None:
        """Handle a frame that is not one of the load's messages."""
        for event in self._protocol.feed(data):
            if isinstance(event, say.Heartbeat):
                self._say(say.nop())
            elif isinstance(event, say.Message):
                self._counter.foreign += 1
                self._say(say.fin(event.id))

    def _say(self, data: bytes) -> None:
        """Write this in a moment, with whatever follows until then."""
        if not self._out:
            self._loop.call_later(_TOGETHER_S, self._flush)
        self._out += data

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.write(self._out)
            self._out.clear()

    def answered(self, data: bytes) -> None:
        """SUB succeeded."""
        self._subscribed.set_result(data)

    def refused(self, problem: ProtocolError) -> None:
        """SUB was refused."""
        if not self._subscribed.done():
            self._subscribed.set_exception(problem)

    def delivered(self, message: say.Message) -> None:
        """Never called: no message comes before RDY."""
        raise AssertionError(message)

    def ordered(self, connection: Connection, order: Order) -> None:
        """Ignore an order: those are for publishers."""

    def writable(self) -> None:
        """Do nothing: a subscriber says little before the socket is taken over."""

    def ended(self, connection: Connection, problem: Exception | None) -> None:
        """The connection ended before the socket was taken over."""
        del connection
        if not self._subscribed.done():
            self._subscribed.set_exception(ClientError(f"{self.address} closed the connection: {problem}"))
