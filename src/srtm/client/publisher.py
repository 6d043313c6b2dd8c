"""A publisher: messages of one topic, acknowledged, in order.

In: bodies. Out: their acknowledgements. At most `window` commands are unanswered at a time; callers wait while the
publisher is throttled, moved or without a broker.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import ssl
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Literal

from srtm.client.cluster import DEFAULT_CONTROLLER, Assigned, Cluster, Fixed, PublisherSpec
from srtm.client.connection import ConnectionOptions
from srtm.client.parts import Parts
from srtm.client.stream import Stream
from srtm.errors import ClientError, InputError, SRTMError, WindowFull
from srtm.net.sockets import split_address
from srtm.protocol import client as say

_GONE_S = 1.0  # for telling the controller that the publisher is gone


class Publisher:
    """Publishes to one topic: through a controller, or to one given broker.

    `async with Publisher("traffic") as publisher: await publisher.publish(b"hello")`. An `id` identifies the publisher
    across restarts; without one, each gets a new id. `group` names its correlation group: publishers that burst
    together. `rate` (messages per second), `process`, `batch` and `jitter_ms` tell the controller what to expect.
    With `split`, the controller may split a publisher that is faster than a broker over several connections; order is
    then kept on each of them.
    """

    def __init__(
        self,
        topic: str,
        *,
        controller: str | Cluster | None = None,
        broker: str | None = None,
        id: str | None = None,  # noqa: A002 - its name everywhere
        group: str | None = None,
        rate: float | None = None,
        process: Literal["poisson", "periodic"] | None = None,
        batch: int = 1,
        jitter_ms: float = 0.0,
        split: bool = False,
        window: int = 1000,
        timeout_s: float = 10.0,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        deflate: bool = False,
        snappy: bool = False,
        auth_secret: bytes | None = None,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        if controller is not None and broker is not None:
            raise InputError("controller and broker exclude each other: give one")
        if window < 1:
            raise InputError(f"window = {window}: it must be at least 1")
        say.pub(topic, b"x")  # checks the name
        if broker is not None:
            split_address(broker)
        self.topic = topic
        self.id = id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._passing = id is None
        self._group = group
        self._spec = PublisherSpec(self.id, group, rate, process, batch, jitter_ms, split)
        self._controller = controller or DEFAULT_CONTROLLER
        self._broker = broker
        self._token = token
        self._timeout_s = timeout_s
        self._options = ConnectionOptions(
            tls, deflate=deflate, snappy=snappy, auth_secret=auth_secret, identity=identity or {}
        )
        self._window: asyncio.Queue[None] = asyncio.Queue(window)  # one entry per unanswered command
        self._cluster: Cluster | None = None
        self._stream: Stream | Parts | None = None

    async def __aenter__(self) -> Publisher:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await (self.close() if kind is None else self.abort())

    async def open(self) -> None:
        """Connect to the publisher's broker; ClientError if none accepts it within `timeout_s`."""
        to = self._options, self._done, self._failed
        if self._broker is not None:
            self._stream = Stream(self.topic, self.id, self._group, Fixed([self._broker]), *to)
        else:
            given = self._controller
            self._cluster = given if isinstance(given, Cluster) else Cluster.shared(given, self._token)
            if self._spec.split:
                self._stream = Parts(self._cluster, self.topic, self._spec, *to)
            else:
                home = Assigned(self._cluster, self.topic, self._spec)
                self._stream = Stream(self.topic, self.id, self._group, home, *to)
        try:
            await self._stream.open(self._timeout_s)
        except BaseException:
            self._stream = None
            await self._release()
            raise

    @property
    def address(self) -> str | None:
        """The address of its broker; None while it looks for one."""
        return next(iter(self.addresses), None)

    @property
    def addresses(self) -> list[str]:
        """The addresses of its brokers: several if it is split, none while it looks for one."""
        return self._stream.addresses if self._stream else []

    @property
    def in_flight(self) -> int:
        """Commands without an answer."""
        return self._stream.waiting if self._stream else 0

    @property
    def migrations(self) -> int:
        """How often a broker moved it elsewhere."""
        return self._stream.moves.migrations if self._stream else 0

    async def publish(self, body: bytes, *, delay_ms: int = 0) -> None:
        """Publish one message; return once it is acknowledged."""
        data = say.dpub(self.topic, delay_ms, _body(body)) if delay_ms else say.pub(self.topic, _body(body))
        await self._window.put(None)
        await self._put(data)

    async def publish_many(self, bodies: Iterable[bytes]) -> None:
        """Publish messages together, all or none; return once they are acknowledged."""
        data = say.mpub(self.topic, _some(bodies))
        await self._window.put(None)
        await self._put(data)

    def publish_nowait(self, body: bytes) -> asyncio.Future[None]:
        """Publish one message, to be awaited later; WindowFull if too many are unanswered."""
        data = say.pub(self.topic, _body(body))
        try:
            self._window.put_nowait(None)
        except asyncio.QueueFull:
            remedy = "await earlier messages, or open the publisher with a larger window"
            raise WindowFull(f"the window of {self._window.maxsize} is full: {remedy}") from None
        return self._put(data)

    def _put(self, data: bytes) -> asyncio.Future[None]:
        if self._stream is None:
            self._window.get_nowait()
            raise ClientError(f"the publisher of {self.topic!r} is not open: use it inside its async with")
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stream.put(data, answer)
        return answer

    def _done(self, answer: asyncio.Future[None]) -> None:
        self._window.get_nowait()
        if not answer.done():
            answer.set_result(None)

    def _failed(self, answer: asyncio.Future[None], problem: SRTMError) -> None:
        self._window.get_nowait()
        if not answer.done():
            answer.set_exception(problem)

    async def close(self) -> None:
        """Wait until everything is acknowledged, and close."""
        if self._stream is not None:
            await self._stream.drain()
        await self.abort()

    async def abort(self) -> None:
        """Close at once; unanswered messages fail with a ClientError."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.abort()
            if self._passing and self._cluster is not None:
                with suppress(ClientError, TimeoutError):
                    async with asyncio.timeout(_GONE_S):
                        await self._cluster.remove(self.topic, self.id)
        await self._release()

    async def _release(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None and cluster is not self._controller:
            await cluster.release()


def _body(body: bytes) -> bytes:
    if not isinstance(body, bytes | bytearray | memoryview):
        raise InputError(f"a message is bytes, not {type(body).__name__}: encode it, as in text.encode()")
    if not body:
        raise InputError("a message must have at least one byte")
    return bytes(body)


def _some(bodies: Iterable[bytes]) -> list[bytes]:
    found = [_body(body) for body in bodies]
    if not found:
        raise InputError("nothing to publish: give at least one message")
    return found
