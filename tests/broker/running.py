"""A broker in a thread of its own or in memory, and a client that says exactly what a test wants it to say."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

import uvloop

from srtm.broker.broker import Broker
from srtm.broker.options import BrokerOptions
from srtm.broker.run import serving
from srtm.broker.turn import Clock
from srtm.net.compression import Snappy
from srtm.protocol import client as say
from srtm.protocol.client import ClientProtocol, Error, Heartbeat, Message, Response
from srtm.protocol.names import MAGIC_V2
from srtm.testing.clock import START_NS, VirtualClock
from srtm.testing.loop import VirtualLoop
from srtm.testing.memory import MemoryBroker
from srtm.testing.network import MemorySocket

T = TypeVar("T")
Address = tuple[str, int] | MemoryBroker
PATIENCE_S = 30.0  # a machine that is busy with other things answers late
_ended_ns: dict[str, int] = {}  # when a broker in memory left a folder


class Running:
    """A broker that serves, as its tests see it."""

    def __init__(self, broker: Broker, loop: asyncio.AbstractEventLoop) -> None:
        self.broker = broker
        self.loop = loop
        self.address: Any = ("127.0.0.1", broker.tcp_port)  # for `Client`
        self.url = f"http://127.0.0.1:{broker.http_port}"

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)

    def monotonic(self) -> float:
        """Seconds of the clock that `sleep` goes by."""
        return time.monotonic()

    def now_ns(self) -> int:
        """The time of the clock that stamps messages."""
        return time.time_ns()

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """The broker's loop stands still for the time of a block."""
        begun, ended = threading.Event(), threading.Event()

        def stall() -> None:
            begun.set()
            assert ended.wait(PATIENCE_S)

        self.loop.call_soon_threadsafe(stall)
        assert begun.wait(PATIENCE_S)
        try:
            yield
        finally:
            ended.set()

    def run(self, story: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that uses clients of this broker."""
        return asyncio.run(story)

    def do(self, action: Callable[[], T]) -> T:
        """The result of an action in the broker's own thread."""

        async def done() -> T:
            return action()

        return asyncio.run_coroutine_threadsafe(done(), self.loop).result(PATIENCE_S)

    def wait_until(self, holds: Callable[[Broker], bool]) -> None:
        """Until something is true of the broker."""
        until = time.monotonic() + PATIENCE_S

        def held() -> bool:
            try:
                return holds(self.broker)
            except KeyError:  # no such topic or channel yet
                return False

        while not self.do(held):
            assert time.monotonic() < until, "waited in vain"
            time.sleep(0.005)

    def wait_for_stamps(self) -> None:
        """Until the kernel stamps: it begins a moment after the first socket of the host has asked for it."""
        with Client(self.address) as client:
            before = -1
            while before != (now := self.do(lambda: self.broker.clients.buffers.unstamped)):
                before = now
                client.send(say.identify({}))
                assert client.response() == b"OK"
        self.broker.clients.buffers.unstamped = 0

    def post(self, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """The answer to a POST."""
        return fetch(urllib.request.Request(self.url + path, data=body, method="POST"))

    def page(self, path: str) -> tuple[int, bytes]:
        """The answer to a GET."""
        return fetch(urllib.request.Request(self.url + path))

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        status, body = self.page(path)
        assert status == 200, body
        return json.loads(body)

    def metrics(self) -> bytes:
        """What Prometheus reads."""
        return self.page("/metrics")[1]

    def channel(self, topic: str, channel: str) -> Any:
        """A channel in /stats."""
        (found,) = self.get(f"/stats?format=json&topic={topic}&channel={channel}")["topics"]
        (only,) = found["channels"]
        return only


class InMemory(Running):
    """A broker in memory and in virtual time, for the same tests; nothing happens but while a test waits."""

    def __init__(self, memory: MemoryBroker) -> None:
        self.memory = memory
        self.broker, self.loop = memory.broker, memory.loop
        self.address = memory
        self._stalled = False

    def sleep(self, seconds: float) -> None:
        if self._stalled:
            self.memory.loop.clock.advance(seconds)
        else:
            self.memory.sleep(seconds)

    @contextmanager
    def stalled(self) -> Iterator[None]:
        self.memory.loop.settle()
        self._stalled = True
        try:
            yield
        finally:
            self._stalled = False

    def monotonic(self) -> float:
        return self.memory.loop.time()

    def now_ns(self) -> int:
        return self.memory.now_ns

    def run(self, story: Coroutine[Any, Any, T]) -> T:
        return self.memory.loop.run(story)

    def do(self, action: Callable[[], T]) -> T:
        if not self.memory.loop.is_running():
            self.memory.loop.settle()
        return action()

    def wait_until(self, holds: Callable[[Broker], bool]) -> None:
        def held(broker: Broker) -> bool:
            try:
                return holds(broker)
            except KeyError:
                return False

        self.memory.run_until(held)

    def wait_for_stamps(self) -> None:
        """Nothing: memory stamps from the beginning."""

    def post(self, path: str, body: bytes = b"") -> tuple[int, bytes]:
        return self.memory.request("POST", path, body)

    def page(self, path: str) -> tuple[int, bytes]:
        return self.memory.request("GET", path)


def fetch(request: urllib.request.Request) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@contextmanager
def in_thread(serving: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[tuple[T, asyncio.AbstractEventLoop]]:
    """What a program serves with, and its loop, which runs in a thread of its own."""
    ready = threading.Event()
    found: list[tuple[T, asyncio.AbstractEventLoop]] = []
    problems: list[BaseException] = []
    stop: list[Callable[[], object]] = []

    async def serve() -> None:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(stopped.set))
        async with serving() as program:
            found.append((program, loop))
            ready.set()
            await stopped.wait()

    def run() -> None:
        try:
            uvloop.run(serve())
        except BaseException as problem:
            problems.append(problem)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        ready.wait(PATIENCE_S)
        if problems:
            raise problems.pop()
        yield found[0]
    finally:
        if found:
            stop[0]()
        thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert not problems, problems


@contextmanager
def running(clock: Clock = time, **options: Any) -> Iterator[Running]:
    """A broker with these options, on ports of its own choice."""
    chosen = options_of(**{"tcp_port": 0, "http_port": 0, **options})
    with in_thread(lambda: serving(chosen, clock)) as (broker, loop):
        yield Running(broker, loop)


@contextmanager
def in_memory(beside: InMemory | None = None, **options: Any) -> Iterator[InMemory]:
    """A broker with these options, in memory; `beside` another, on its loop. A restarted one goes on in time."""
    folder = options.get("data_path", "")
    loop = beside.memory.loop if beside else VirtualLoop(VirtualClock(_ended_ns.get(folder, START_NS)))
    try:
        with MemoryBroker(options_of(**options), loop) as memory:
            yield InMemory(memory)
            _ended_ns[folder] = memory.now_ns
    finally:
        if not beside:
            loop.close()


def options_of(**options: Any) -> BrokerOptions:
    """The options of a broker; `settings` of the protocol that no option sets may be among them."""
    settings = options.pop("settings", None)
    chosen = BrokerOptions(**{"name": "broker", **options})
    if settings is not None:
        object.__setattr__(chosen, "settings", settings)
    return chosen


class Secured:
    """TLS over a memory socket, which Python's own does not take."""

    def __init__(self, sock: MemorySocket, context: ssl.SSLContext) -> None:
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="localhost")
        self.settimeout, self.close = sock.settimeout, sock.close
        self._do(self._tls.do_handshake)

    def _do(self, action: Callable[[], T]) -> T:
        while True:
            try:
                result = action()
            except ssl.SSLWantReadError:
                self._sock.sendall(self._outgoing.read())
                if data := self._sock.recv(65536):
                    self._incoming.write(data)
                else:
                    self._incoming.write_eof()
            else:
                self._sock.sendall(self._outgoing.read())
                return result

    def sendall(self, data: bytes) -> None:
        while data:
            data = data[self._do(partial(self._tls.write, data)) :]

    def recv(self, size: int) -> bytes:
        try:
            return self._do(lambda: self._tls.read(size))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""

    def version(self) -> str | None:
        return self._tls.version()


class Client:
    """One connection to a broker. Heartbeats are answered and not seen."""

    def __init__(self, address: Address, **identity: Any) -> None:
        self.sock: Any
        if isinstance(address, MemoryBroker):
            self.sock = address.connect(PATIENCE_S)
            self._monotonic: Callable[[], float] = address.loop.time
        else:
            self.sock = socket.create_connection(address, timeout=PATIENCE_S)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._monotonic = time.monotonic
        self.protocol = ClientProtocol()
        self.events: deque[Any] = deque()
        self.heartbeats = 0
        self._encode: Callable[[bytes], bytes] = bytes
        self._decode: Callable[[bytes], bytes] = bytes
        self.send(MAGIC_V2)
        self.settled: Any = None
        if identity:
            self.protocol.pause_after_response()
            self.send(say.identify({"feature_negotiation": True, **identity}))
            self.settled = json.loads(self.response())
            if not any(self.settled[layer] for layer in ("tls_v1", "deflate", "snappy")):
                self._feed(self.protocol.take_unparsed())

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, *commands: bytes) -> None:
        self.sock.sendall(self._encode(b"".join(commands)))

    def begin_tls(self, context: ssl.SSLContext) -> None:
        assert not self.protocol.take_unparsed()
        if isinstance(self.sock, MemorySocket):
            self.sock = Secured(self.sock, context)
        else:
            self.sock = context.wrap_socket(self.sock, server_hostname="localhost")
        if self.settled["deflate"] or self.settled["snappy"]:
            self.protocol.pause_after_response()
        assert self.response() == b"OK"

    def begin_deflate(self) -> None:
        deflate, inflate = zlib.compressobj(wbits=-15), zlib.decompressobj(wbits=-15)
        self._begin(lambda data: deflate.compress(data) + deflate.flush(zlib.Z_SYNC_FLUSH), inflate.decompress)

    def begin_snappy(self) -> None:
        layer = Snappy()

        def decode(data: bytes) -> bytes:
            found = layer.decode(data)
            while layer.more:
                found += layer.decode(b"")
            return found

        self._begin(layer.encode, decode)

    def encoded(self, data: bytes) -> bytes:
        return self._encode(data)

    def _begin(self, encode: Callable[[bytes], bytes], decode: Callable[[bytes], bytes]) -> None:
        self._encode, self._decode = encode, decode
        self._feed(self.protocol.take_unparsed())
        assert self.response() == b"OK"

    def _feed(self, data: bytes) -> None:
        for event in self.protocol.feed(self._decode(data)):
            if isinstance(event, Heartbeat):
                self.heartbeats += 1
                self.send(say.nop())
            else:
                self.events.append(event)

    def next(self, timeout_s: float = PATIENCE_S) -> Any:
        """The next event; None at the end, TimeoutError if there is none."""
        until = self._monotonic() + timeout_s
        while not self.events:
            self.sock.settimeout(max(0.001, until - self._monotonic()))
            data = self.sock.recv(65536)
            if not data:
                return None
            self._feed(data)
        return self.events.popleft()

    def response(self) -> bytes:
        found = self.next()
        assert isinstance(found, Response), found
        return found.data

    def error(self) -> bytes:
        found = self.next()
        assert isinstance(found, Error), found
        return found.problem.wire

    def message(self, timeout_s: float = PATIENCE_S) -> Message:
        found = self.next(timeout_s)
        assert isinstance(found, Message), found
        return found

    def silent(self, seconds: float = 0.2) -> bool:
        """Whether nothing comes for so long."""
        try:
            found = self.next(seconds)
        except TimeoutError:
            return True
        self.events.appendleft(found)
        return False

    def ended(self) -> bool:
        """Whether the broker closed the connection, and had nothing else to say."""
        try:
            return self.next() is None
        except ConnectionResetError:
            return True

    def publish(self, topic: str, *bodies: bytes) -> None:
        self.send(*(say.pub(topic, body) for body in bodies))
        for _ in bodies:
            assert self.response() == b"OK"

    def subscribe(self, topic: str, channel: str, ready: int = 1) -> Client:
        self.send(say.sub(topic, channel))
        assert self.response() == b"OK"
        if ready:
            self.send(say.rdy(ready))
        return self
