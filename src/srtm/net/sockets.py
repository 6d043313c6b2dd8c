"""Sockets, connected and listening: addresses, families and options in one place.

A connection tries the addresses of a host in the resolver's order; if none accepts, the first error counts, because the
resolver puts the preferred address first. Callers bound the time with `asyncio.timeout`.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srtm.errors import InputError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port`; InputError if the text is anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"invalid address {address!r}: write host:port, as in 127.0.0.1:4150", address=address)
    return host.strip("[]"), int(port)


async def connect(host: str, port: int) -> socket.socket:
    """Return a connected, non-blocking socket; port 0 means that `host` is the path of a unix socket.

    A loop with a network of its own (`srtm.testing.loop`) makes the connection there.
    """
    own: Callable[[str, int], socket.socket] | None = getattr(asyncio.get_running_loop(), "connect_socket", None)
    if own is not None:
        return own(host, port)
    if not port:
        return await _connected(socket.AF_UNIX, host)
    refused: OSError | None = None
    for family, target in await _resolve(host, port):
        try:
            return await _connected(family, target)
        except OSError as error:  # a name may have addresses of both families, and its server listen on one
            refused = refused or error
    raise refused or OSError(f"{host} has no address")


async def open_streams(
    host: str, port: int, tls: ssl.SSLContext | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect, for code that uses asyncio's streams; with TLS, to a server whose certificate names `host`."""
    sock = await connect(host, port)
    if tls is None:
        return await asyncio.open_connection(sock=sock)
    try:
        return await asyncio.open_connection(sock=sock, ssl=tls, server_hostname=host)
    except BaseException:
        sock.close()
        raise


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, reuse_port=False)


def listen_unix(path: str, backlog: int = 128) -> socket.socket:
    """Return a listening unix socket; the file of a server that is gone is replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _abandoned(path):
            Path(path).unlink()
        sock.bind(path)
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


def close_unix(sock: socket.socket, path: str) -> None:
    """Close a listening unix socket, and remove its file."""
    sock.close()
    Path(path).unlink(missing_ok=True)


def _abandoned(path: str) -> bool:
    """Whether there is a unix socket that no server listens on."""
    if not Path(path).is_socket():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED


async def _connected(family: int, target: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, target)
    except BaseException:
        sock.close()
        raise
    return sock


async def _resolve(host: str, port: int) -> list[tuple[int, Any]]:
    for family in (socket.AF_INET, socket.AF_INET6):  # a literal address needs no resolver, and no thread for it
        with suppress(OSError):
            socket.inet_pton(family, host)
            return [(family, (host, port))]
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in found]
