"""What the table of transcripts does not say about HTTP: a registry without room, and the application around it."""

from __future__ import annotations

import asyncio

import httpx

from srtm.control.controller import Controller
from srtm.control.discovery.registry import Registry
from srtm.control.options import ControllerOptions
from srtm.control.run import app
from srtm.control.service import Service
from srtm.control.store import Store


def ask(registry: Registry, method: str, path: str) -> httpx.Response:
    async def asked() -> httpx.Response:
        service = Service(Controller(ControllerOptions(), Store(), 0), registry)
        transport = httpx.ASGITransport(app(service))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://controller", follow_redirects=True
        ) as client:
            return await client.request(method, path)

    return asyncio.run(asked())


def test_no_room() -> None:
    registry = Registry(max_entries=1)
    assert ask(registry, "POST", "/topic/create?topic=t").status_code == 200
    assert ask(registry, "POST", "/topic/create?topic=t").status_code == 200
    answer = ask(registry, "POST", "/topic/create?topic=u")
    assert answer.status_code == 507
    assert answer.json()["message"].startswith("REGISTRY_FULL: the registry holds its limit of 1 names")
    assert registry.topics() == ["t"]


def test_a_slash_too_many_is_forgiven() -> None:
    registry = Registry()
    assert ask(registry, "GET", "/ping/").text == "OK"
    assert ask(registry, "POST", "/topic/create/?topic=t").status_code == 200
    assert registry.topics() == ["t"]


def test_the_application_describes_itself() -> None:
    assert ask(Registry(), "GET", "/openapi.json").json()["info"]["title"] == "SRTM controller"
