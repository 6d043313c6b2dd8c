"""A service at several addresses: a list, or a name with several records.

In: text of flags, as in `a:4160,b:4160` or `http://a:4161,b:4161`. Out: one address each. A name with several records
counts as that many addresses, of one family: a host with an IPv4 and an IPv6 address is one.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

from srtm.errors import InputError


def listed(text: str) -> list[str]:
    """The addresses of a list, in order, each once; InputError if one is empty."""
    found = [each.strip() for each in text.split(",")]
    if not all(found):
        raise InputError(f"invalid list of addresses {text!r}: write host:port,host:port", addresses=text)
    return list(dict.fromkeys(found))


def urls(text: str) -> list[str]:
    """The base URLs of a list; an address without a scheme has that of the first, or http."""
    scheme = text.partition("://")[0] if "://" in text else "http"
    return [(each if "://" in each else f"{scheme}://{each}").rstrip("/") for each in listed(text)]


async def resolved(address: str) -> list[str]:
    """The `ip:port` of each record if the host of `host:port` has several; otherwise the address itself."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    with suppress(ValueError):
        ip_address(host)
        return [address]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError, NotImplementedError):  # a loop with a network of its own has no resolver
        return [address]
    family = socket.AF_INET if any(each[0] == socket.AF_INET for each in found) else socket.AF_INET6
    hosts = sorted({str(each[4][0]) for each in found if each[0] == family})
    if len(hosts) < 2:
        return [address]
    return [f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts]


async def resolved_urls(text: str) -> list[str]:
    """The base URLs of a list with names resolved; TLS names its host, so https stays as it is."""
    found: list[str] = []
    for url in urls(text):
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.port is None:
            found.append(url)
        else:
            found += [f"http://{each}" for each in await resolved(parts.netloc)]
    return found
