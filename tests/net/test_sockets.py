"""Connecting: addresses, families and what cannot be reached."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import pytest

from srtm.errors import InputError
from srtm.net import sockets
from srtm.net.explain import explained
from srtm.net.sockets import connect, listen, open_streams, split_address


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:4150", ("127.0.0.1", 4150)),
        ("[::1]:80", ("::1", 80)),
        ("host.example:65535", ("host.example", 65535)),
    ],
)
def test_an_address_is_host_and_port(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:0", "host:65536", "host:x", "host:-1", "host:²"])
def test_anything_else_is_refused_by_its_text(address: str) -> None:
    with pytest.raises(InputError, match=r"invalid address .*write host:port") as found:
        split_address(address)
    assert repr(address) in str(found.value)


async def talk(host: str, port: int) -> bool:
    """Connect, and see whether the socket is as promised."""
    with await connect(host, port) as sock:
        assert not sock.getblocking()
        return sock.family == socket.AF_UNIX or bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_name_and_a_number_connect(host: str) -> None:
    with listen("127.0.0.1", 0) as listener:
        assert asyncio.run(talk(host, listener.getsockname()[1]))


def test_a_path_connects_to_a_unix_socket(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        assert asyncio.run(talk(str(tmp_path / "socket"), 0))


def test_a_literal_address_needs_no_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> None:
        raise AssertionError("resolved")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with listen("127.0.0.1", 0) as listener:
        assert asyncio.run(talk("127.0.0.1", listener.getsockname()[1]))


def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1", 0) as listener, listen("127.0.0.1", 0) as gone:
        there, absent = listener.getsockname(), gone.getsockname()
        gone.close()

        async def resolve(host: str, port: int) -> list[tuple[int, tuple[str, int]]]:
            del host, port
            return [(socket.AF_INET, absent), (socket.AF_INET, there)]

        monkeypatch.setattr(sockets, "_resolve", resolve)
        assert asyncio.run(talk("two.example", 1))


def test_streams_are_connected_alike() -> None:
    async def story(port: int) -> bool:
        _, writer = await open_streams("127.0.0.1", port)
        found = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        await writer.wait_closed()
        return bool(found)

    with listen("127.0.0.1", 0) as listener:
        assert asyncio.run(story(listener.getsockname()[1]))


def test_a_refusal_is_the_systems_word() -> None:
    with listen("127.0.0.1", 0) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(ConnectionRefusedError) as found:
        asyncio.run(connect("127.0.0.1", port))
    assert explained(found.value) == "Connection refused"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError(), "no answer"),
        (TimeoutError(110, "Connection timed out"), "Connection timed out"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (EOFError("host closed the connection"), "host closed the connection"),
        (EOFError(), "EOFError"),
        (ssl.SSLError(1, "[SSL] tlsv13 alert certificate required"), "set options cert and key of the address"),
        (ssl.SSLError(1, "[SSL] wrong version number"), "wrong version number"),
    ],
)
def test_an_error_is_explained(error: Exception, words: str) -> None:
    assert words in explained(error)
