"""Publisher and Subscriber for code without an event loop: scripts, notebooks, Spark tasks.

In: the arguments of their asynchronous twins. One loop in one thread serves a whole process; a forked process starts
its own. Calls block, and may come from any thread.

    with Publisher("traffic") as publisher:
        publisher.publish(b"hello")
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from srtm.client import publisher, subscriber

T = TypeVar("T")

_loops: dict[int, asyncio.AbstractEventLoop] = {}
_making = threading.Lock()


class Publisher:
    """A blocking `srtm.client.Publisher`."""

    def __init__(self, topic: str, **options: Any) -> None:
        self._inner = _call(_made(publisher.Publisher, topic, **options))

    def __enter__(self) -> Publisher:
        _call(self._inner.open())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _call(self._inner.close() if kind is None else self._inner.abort())

    def publish(self, body: bytes, *, delay_ms: int = 0) -> None:
        """Publish one message; return once it is acknowledged."""
        _call(self._inner.publish(body, delay_ms=delay_ms))

    def publish_many(self, bodies: Iterable[bytes]) -> None:
        """Publish messages together, all or none; return once they are acknowledged."""
        self.publish_later(bodies).result()

    def publish_later(self, bodies: Iterable[bytes]) -> Future[None]:
        """Publish messages together, to be awaited later; messages of one thread keep their order."""
        return _begin(self._inner.publish_many(bodies))

    @property
    def address(self) -> str | None:
        """The address of its broker; None while it looks for one."""
        return self._inner.address


class Message:
    """A message to finish or requeue."""

    def __init__(self, inner: subscriber.Message) -> None:
        self._inner = inner
        self.body, self.attempts, self.id = inner.body, inner.attempts, inner.id
        self.timestamp_ns = inner.timestamp_ns

    def finish(self) -> None:
        """Acknowledge the message."""
        _call(self._inner.finish())

    def requeue(self, delay_s: float = 0.0) -> None:
        """Have the message delivered again, to any subscriber, after a delay."""
        _call(self._inner.requeue(delay_s))

    def touch(self) -> None:
        """Restart the message's timeout."""
        _call(self._inner.touch())


class Subscriber:
    """A blocking `srtm.client.Subscriber`: iterate over it."""

    def __init__(self, topic: str, channel: str, **options: Any) -> None:
        self._inner = _call(_made(subscriber.Subscriber, topic, channel, **options))

    def __enter__(self) -> Subscriber:
        _call(self._inner.open())
        return self

    def __exit__(self, *_: object) -> None:
        _call(self._inner.close())

    def __iter__(self) -> Iterator[Message]:
        while (message := self.get()) is not None:
            yield message

    def get(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message; None after `timeout_s` without one, and at the end."""
        found = _call(self._next(timeout_s))
        return None if found is None else Message(found)

    async def _next(self, timeout_s: float | None) -> subscriber.Message | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._inner.get()
        except TimeoutError:
            return None


async def _made(kind: type[T], *names: str, **options: Any) -> T:
    """Create a client inside the loop that it will use."""
    return kind(*names, **options)


def _call(work: Coroutine[Any, Any, T]) -> T:
    return _begin(work).result()


def _begin(work: Coroutine[Any, Any, T]) -> Future[T]:
    with _making:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="srtm-client", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(work, loop)
