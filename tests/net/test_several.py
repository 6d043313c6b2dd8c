"""Lists of addresses, and names with several records."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from srtm.errors import InputError
from srtm.net.several import listed, resolved, resolved_urls, urls

RECORDS = {
    "three": ["10.0.0.3", "10.0.0.1", "10.0.0.2"],
    "one": ["10.0.0.1"],
    "both": ["10.0.0.1", "::1"],
    "six": ["fd00::1", "fd00::2"],
}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a:1", ["http://a:1"]),
        ("http://a:1/", ["http://a:1"]),
        ("a:1, b:2,a:1", ["http://a:1", "http://b:2"]),
        ("https://a:1,b:2", ["https://a:1", "https://b:2"]),
        ("http://a:1,https://b:2", ["http://a:1", "https://b:2"]),
    ],
)
def test_a_list_of_urls(text: str, wanted: list[str]) -> None:
    assert urls(text) == wanted


@pytest.mark.parametrize("text", ["", ",", "a:1,", "a:1,,b:2"])
def test_an_empty_address_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="write host:port,host:port"):
        listed(text)


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        ("three:4160", ["10.0.0.1:4160", "10.0.0.2:4160", "10.0.0.3:4160"]),
        ("one:4160", ["one:4160"]),
        ("both:4160", ["both:4160"]),  # one host, with addresses of two families
        ("six:4160", ["[fd00::1]:4160", "[fd00::2]:4160"]),
        ("unknown:4160", ["unknown:4160"]),
        ("127.0.0.1:4160", ["127.0.0.1:4160"]),
        ("[::1]:4160", ["[::1]:4160"]),
        ("nonsense", ["nonsense"]),
    ],
)
def test_a_name_with_several_records_is_several_addresses(
    address: str, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async def found(host: str, port: int, **_: Any) -> list[Any]:
            if host not in RECORDS:
                raise socket.gaierror("unknown")
            kinds = {host: socket.AF_INET6 if ":" in host else socket.AF_INET for host in RECORDS[host]}
            return [(kind, socket.SOCK_STREAM, 6, "", (each, port)) for each, kind in kinds.items()]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
        assert await resolved(address) == wanted
        if ":" in address:
            assert await resolved_urls(f"https://x:1,http://{address}") == [
                "https://x:1",
                *(f"http://{each}" for each in wanted),
            ]

    asyncio.run(story())
