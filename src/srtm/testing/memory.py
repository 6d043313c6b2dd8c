"""A real broker and its clients in one thread, over memory instead of sockets, in virtual time.

Nothing listens and nothing sleeps: a call that would wait lets virtual time pass. A minute takes milliseconds, and the
same program gives the same latencies to the nanosecond. Model: trio's memory streams and MockClock.

    from srtm.protocol import client as say
    from srtm.protocol.names import MAGIC_V2
    from srtm.testing.memory import MemoryBroker

    with MemoryBroker() as broker, broker.connect() as sock:
        broker.request("POST", "/topic/limit?topic=t&r=10&b=1")
        sock.sendall(MAGIC_V2 + say.sub("t", "c") + say.rdy(9) + say.pub("t", b"one") + say.pub("t", b"two"))
        broker.sleep(0.2)  # 0.1 s of them pass before the second message has its token
        print(sock.recv(4096))
        (topic,) = broker.broker.statistics().topics
        assert topic.channels[0].in_flight == 2

Brokers and clients that share a loop share its network: `srtm.client` connects to a broker in memory by its port, if it
runs in that loop (`broker.loop.run(main())`).
Virtual time stands still while a log works, so that disk topics behave as on an infinitely fast disk. Engines, lookup
services and controllers are other programs, and need a real broker.
"""

from __future__ import annotations

import socket
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from srtm.broker.broker import Broker
from srtm.broker.http.api import app
from srtm.broker.lookup import Registration
from srtm.broker.options import BrokerOptions
from srtm.broker.poller import Poller
from srtm.broker.turn import Turn
from srtm.net.alarm import Alarm
from srtm.net.stamps import SO_TIMESTAMPNS
from srtm.testing.loop import PATIENCE_S, VirtualLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp

    from srtm.testing.network import MemorySocket


class MemoryBroker:
    """A broker in memory, on a loop of its own or with others; these need different ports."""

    def __init__(
        self,
        options: BrokerOptions | None = None,
        loop: VirtualLoop | None = None,
        turns: Callable[..., Turn] = Turn,
    ) -> None:
        chosen = options or BrokerOptions(name="broker")
        self.loop = loop or VirtualLoop()
        self._own_loop = loop is None
        network = self.loop.network
        poller, alarm = partial(Poller, epoll=network.epoll()), partial(Alarm, precise=False)
        try:
            self.broker = Broker(chosen, self.loop, self.loop.clock, poller, alarm, turns)
        except BaseException:
            if self._own_loop:
                self.loop.close()
            raise
        self.broker.tcp_port, self.broker.http_port = chosen.tcp_port, chosen.http_port
        if self.broker.durable is not None:
            self.loop.wait_for(self.broker.durable.wait)
        self.broker.start()
        network.listen(chosen.tcp_port, self._accept)
        self._app = app(self.broker, Registration(self.broker))

    def __enter__(self) -> MemoryBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self, sock: MemorySocket, address: str) -> None:
        if self.broker.options.kernel_time:
            sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self.broker.clients.add(sock, address)

    @property
    def now_ns(self) -> int:
        """The time of the virtual wall clock."""
        return self.loop.clock.time_ns()

    def connect(self, timeout_s: float = PATIENCE_S) -> MemorySocket:
        """A client's socket; its calls wait, in virtual time."""
        sock = self.loop.network.connect(self.broker.tcp_port)
        sock.settimeout(timeout_s)
        return sock

    def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """The status and the body of the answer to an HTTP request."""
        asked = self.loop.create_task(_ask(self._app, method, path, body))
        self.loop.run_until(asked.done)
        return asked.result()

    def run_until(self, holds: Callable[[Broker], object], patience_s: float = PATIENCE_S) -> None:
        """Let time pass until something is true of the broker."""
        self.loop.run_until(lambda: holds(self.broker), patience_s)

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.loop.sleep(seconds)

    def close(self) -> None:
        """Stop the broker."""
        self.loop.network.close_port(self.broker.tcp_port)
        if self.broker.durable is not None:
            self.loop.wait_no_more(self.broker.durable.wait)
        if self.broker.turn.recorder is not None:
            self.loop.run(self.broker.turn.recorder.stop())
        self.broker.stop()
        if self._own_loop:
            self.loop.close()


async def _ask(app: ASGIApp, method: str, path: str, body: bytes) -> tuple[int, bytes]:
    url = urlsplit(path)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(url.path),
        "raw_path": url.path.encode(),
        "query_string": url.query.encode(),
        "root_path": "",
        "headers": [(b"host", b"broker"), (b"content-length", b"%d" % len(body))],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 4151),
    }
    status, parts = 500, list[bytes]()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(parts)
