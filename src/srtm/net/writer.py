"""Buffered writing to a non-blocking socket.

In: bytes. Out: bytes given to the socket, in order. The writer keeps whatever the kernel does not take, and asks the
loop to say when the socket is writable again.

Always holds: `waiting` is true exactly while the buffer holds bytes and the loop watches the socket; after an error the
writer drops what it holds and writes nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Sink(Protocol):
    """A non-blocking socket, or something that behaves like one."""

    def send(self, data: bytes | bytearray, /) -> int:
        """Take some bytes and return how many; raise BlockingIOError if none fit, OSError if the peer is gone."""


class Watcher(Protocol):
    """The part of an event loop that a writer uses."""

    def add_writer(self, fd: Any, callback: Callable[[], object], /) -> object:
        """Call back whenever the socket is writable."""

    def remove_writer(self, fd: Any, /) -> object:
        """Stop calling back."""


class Writer:
    """Writes to one socket; calls `drained` when a backlog is gone, and `lost` once if the socket fails."""

    __slots__ = ("_buffer", "_drained", "_loop", "_lost", "_sink", "closed", "waiting")

    def __init__(
        self, loop: Watcher, sink: Sink, drained: Callable[[], object], lost: Callable[[OSError], object]
    ) -> None:
        self.waiting = False
        self.closed = False
        self._loop = loop
        self._sink = sink
        self._drained = drained
        self._lost = lost
        self._buffer = bytearray()

    @property
    def unsent(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return len(self._buffer)

    def write(self, data: bytes | bytearray) -> None:
        """Give the kernel as much as it takes, and keep the rest."""
        if self.closed or not data:
            return
        if self.waiting:
            self._buffer += data
            return
        sent = self._send(data)
        if sent < len(data):
            self._buffer += memoryview(data)[sent:]
            self.waiting = True
            self._loop.add_writer(self._sink, self._writable)

    def close(self) -> None:
        """Write nothing more, and stop watching the socket; call this before closing it."""
        self.closed = True
        self._buffer.clear()
        if self.waiting:
            self.waiting = False
            self._loop.remove_writer(self._sink)

    def _send(self, data: bytes | bytearray) -> int:
        try:
            return self._sink.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            size = len(data)
            self.close()
            self._lost(error)
            return size

    def _writable(self) -> None:
        sent = self._send(self._buffer)
        if self.closed:
            return
        del self._buffer[:sent]
        if not self._buffer:
            self.waiting = False
            self._loop.remove_writer(self._sink)
            self._drained()
