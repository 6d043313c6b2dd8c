"""The listening sockets of a broker: clients in, and a pause while the process has no descriptors left."""

from __future__ import annotations

import errno
import logging
import socket
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Final

from srtm.net.sockets import close_unix, listen_unix
from srtm.net.stamps import SO_TIMESTAMPNS
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from srtm.broker.options import BrokerOptions
    from srtm.broker.turn import Turn

log = logging.getLogger(__name__)

_AT_ONCE: Final = 64
_PAUSE_S: Final = 0.1  # before another client is accepted, when there are no descriptors
_SILENCE_NS: Final = 60 * NS_PER_S  # between two warnings that would be repeated ten times a second


class Listener:
    """Accepts clients, and hands their sockets over."""

    def __init__(self, sock: socket.socket, turn: Turn, add: Callable[[socket.socket, str], object]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._local = sock.family == socket.AF_UNIX
        self._numbers = count(1)  # clients of a unix socket have no address
        self._loop: asyncio.AbstractEventLoop = turn.loop
        self._now_ns = turn.now_ns
        self._add = add
        self._silent_until_ns = 0

    def start(self) -> None:
        """Accept clients from now on."""
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, address = self._sock.accept()
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ECONNABORTED):
                    self._pause(error)
                return
            sock.setblocking(False)
            if self._local:
                self._add(sock, f"unix:{next(self._numbers)}")
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._add(sock, f"{address[0]}:{address[1]}")

    def _pause(self, error: OSError) -> None:
        now_ns = self._now_ns()
        if now_ns >= self._silent_until_ns:
            self._silent_until_ns = now_ns + _SILENCE_NS
            log.warning("BROKER: cannot accept connections (%s); raise ulimit -n", error.strerror)
        self._loop.remove_reader(self._sock)
        self._loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self.start()

    def close(self) -> None:
        """Accept no more clients."""
        self._loop.remove_reader(self._sock)
        if self._local:
            close_unix(self._sock, self._sock.getsockname())
        else:
            self._sock.close()


def sockets_of(options: BrokerOptions) -> list[socket.socket]:
    """The sockets that a broker listens on: its port, and its unix socket if it has one."""
    sock = socket.create_server((options.host, options.tcp_port), backlog=options.backlog, reuse_port=False)
    if options.kernel_time:
        with suppress(OSError):  # inherited, so that the first bytes of a client are stamped, too
            sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    if options.tcp_socket is None:
        return [sock]
    try:
        return [sock, listen_unix(options.tcp_socket, options.backlog)]
    except OSError:
        sock.close()
        raise
