"""The brokers of a topic, polled from nsqlookupds: stock ones, or a controller."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator
from random import random

import httpx

from srtm.errors import InputError

_ANSWER_S = 5.0
_JITTER = 0.3  # of the interval, so that clients that started together do not poll together


async def lookup(
    addresses: list[str], topic: str, poll_s: float, tls: ssl.SSLContext | None = None
) -> AsyncGenerator[set[str], None]:
    """Yield all brokers that any of these nsqlookupds lists for the topic: now, and at every poll."""
    if not addresses:
        raise InputError("lookupd is empty: give at least one address, as in 127.0.0.1:4161")
    urls = [address if "://" in address else f"http://{address}" for address in addresses]
    async with httpx.AsyncClient(timeout=_ANSWER_S, trust_env=False, verify=tls or True) as http:
        last: dict[str, set[str]] = {}  # the last answer of each counts while it is away
        while True:
            answers = await asyncio.gather(*(_ask(http, url, topic) for url in urls))
            last |= {url: answer for url, answer in zip(urls, answers, strict=True) if answer is not None}
            yield set().union(*last.values())
            await asyncio.sleep(poll_s * (1 + _JITTER * random()))


async def _ask(http: httpx.AsyncClient, url: str, topic: str) -> set[str] | None:
    try:
        answer = await http.get(f"{url}/lookup", params={"topic": topic})
        if answer.status_code == 404:  # no such topic yet
            return set()
        producers = answer.raise_for_status().json()["producers"]
        return {f"{each['broadcast_address']}:{each['tcp_port']}" for each in producers}
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None
