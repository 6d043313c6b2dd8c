"""The writer against a kernel that takes as little as it likes: every byte arrives once and in order."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.net.writer import Writer


class Kernel:
    """A socket and a loop in memory: it takes the next of `rooms` bytes at each send, and everything after those."""

    def __init__(self, rooms: list[int]) -> None:
        self.rooms = rooms
        self.taken = bytearray()
        self.broken: OSError | None = None
        self.callback: Callable[[], object] | None = None

    def send(self, data: bytes | bytearray, /) -> int:
        if self.broken is not None:
            raise self.broken
        room = self.rooms.pop(0) if self.rooms else len(data)
        if not room:
            raise BlockingIOError
        self.taken += data[:room]
        return min(room, len(data))

    def add_writer(self, fd: Any, callback: Callable[[], object], /) -> None:
        assert fd is self
        assert self.callback is None
        self.callback = callback

    def remove_writer(self, fd: Any, /) -> None:
        assert fd is self
        assert self.callback is not None
        self.callback = None

    def wait(self) -> None:
        """Become writable until nothing waits."""
        while self.callback is not None:
            self.callback()


class Events:
    """What a writer told."""

    def __init__(self, kernel: Kernel) -> None:
        self.drained = 0
        self.lost: list[OSError] = []
        self.writer = Writer(kernel, kernel, self._drained, self.lost.append)

    def _drained(self) -> None:
        self.drained += 1


@given(st.lists(st.binary(max_size=20)), st.lists(st.integers(0, 8)), st.data())
def test_bytes_arrive_once_and_in_order(parts: list[bytes], rooms: list[int], data: st.DataObject) -> None:
    kernel = Kernel(rooms)
    writer = Events(kernel).writer
    for part in parts:
        writer.write(part)
        assert writer.waiting == (kernel.callback is not None) == (writer.unsent > 0)
        if kernel.callback is not None and data.draw(st.booleans()):
            kernel.callback()
    kernel.wait()
    assert bytes(kernel.taken) == b"".join(parts)
    assert not writer.waiting


def test_a_caller_may_reuse_its_buffer() -> None:
    kernel = Kernel([2])
    writer, out = Events(kernel).writer, bytearray(b"hello")
    writer.write(out)
    out.clear()
    kernel.wait()
    assert kernel.taken == b"hello"


def test_drained_is_told_once_for_each_backlog() -> None:
    kernel = Kernel([3, 1, 0, 1])
    events = Events(kernel)
    events.writer.write(b"abc")
    assert events.drained == 0
    events.writer.write(b"defgh")
    kernel.wait()
    assert events.drained == 1


@pytest.mark.parametrize("backlog", [False, True])
def test_a_failed_write_is_told_once_and_ends_the_writer(backlog: bool) -> None:
    kernel = Kernel([1])
    events = Events(kernel)
    if backlog:
        events.writer.write(b"ab")
        kernel.broken = ConnectionResetError()
        kernel.wait()
    else:
        kernel.broken = ConnectionResetError()
        events.writer.write(b"ab")
    events.writer.write(b"more")
    assert events.lost == [kernel.broken]
    assert events.drained == events.writer.unsent == 0
    assert kernel.callback is None


def test_closing_forgets_the_backlog_and_the_loop() -> None:
    kernel = Kernel([1])
    events = Events(kernel)
    events.writer.write(b"ab")
    events.writer.close()
    events.writer.write(b"cd")
    assert kernel.taken == b"a"
    assert kernel.callback is None


def test_a_real_socket_that_is_read_slowly_gets_everything() -> None:
    data = bytes(range(256)) * 40_000  # more than the kernel buffers

    async def story() -> bytes:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            drained = asyncio.Event()
            writer = Writer(loop, ours, drained.set, lambda _: None)
            writer.write(data)
            assert 0 < writer.unsent < len(data)
            found = bytearray()
            while len(found) < len(data):
                found += await loop.sock_recv(theirs, 100_000)
            await drained.wait()
            return bytes(found)

    assert asyncio.run(story()) == data
