"""SRTM's HTTP API under /v1: contracts, publishers and their places, brokers, and streams of changes.

/openapi.json and /docs document it. Errors are `{"detail": …}`, a sentence that names the value and the remedy. If the
controller has a token, requests that change anything must send it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, HTTPException, Path, Request
from fastapi.responses import StreamingResponse

import srtm
from srtm.control import statistics
from srtm.control.api.advice import add_routes
from srtm.control.api.explain import explained
from srtm.control.api.problems import printable
from srtm.control.api.schema import (
    ContractChange,
    DeliveryOut,
    MoveIn,
    PlaceOut,
    PlacesOut,
    PublishersIn,
    Refusal,
    TopicIn,
    TopicName,
    bucket_of,
    delivery_out,
    member_out,
    parts_out,
    topic_out,
)
from srtm.control.clock import now_ns
from srtm.control.placing.expected import expected
from srtm.control.service import Service
from srtm.errors import InputError, SRTMError
from srtm.model.profile import profile
from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from srtm.control.members import DeclaredPublisher
    from srtm.control.topic import ManagedTopic
    from srtm.model.bucket import TokenBucket

log = logging.getLogger(__name__)

_ALIVE_S = 10.0
_NAMED = 10  # publishers of a move named in the audit log

InPath = Annotated[TopicName, Path()]


def router(service: Service) -> APIRouter:
    """All endpoints."""
    controller = service.controller

    def may_change(request: Request) -> None:
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
            raise HTTPException(
                403, f"cross-origin request from {printable(origin)}: only the controller's own page may make changes"
            )
        token = controller.options.token
        shown = request.headers.get("authorization", "")
        if token and not hmac.compare_digest(shown.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "missing or wrong token; send the controller's token as Authorization: Bearer …")

    def done(request: Request, action: str, **arguments: Any) -> None:
        """Log an action, and add it to the audit log."""
        who = request.client.host if request.client else "?"
        log.info("AUDIT(%s): %s %s", who, action, json.dumps(arguments))
        controller.store.note_action(now_ns(), who, action, arguments)

    refusals: dict[int | str, dict[str, Any]] = {
        404: {"description": "not found"},
        422: {"model": Refusal, "description": "invalid value"},
    }
    api = APIRouter(prefix="/v1", responses=refusals)
    changes = APIRouter(
        dependencies=[Depends(may_change)],
        responses={
            400: {"description": "unreadable body"},
            401: {"description": "missing or wrong token"},
            403: {"description": "cross-origin request"},
        },
    )

    def known(topic: str) -> Any:
        if topic not in controller.topics:
            raise HTTPException(404, f"topic {topic!r} is not under contract; create it first")
        return controller.topics[topic]

    def shown(topic: ManagedTopic) -> dict[str, Any]:
        at = now_ns()
        return topic_out(statistics.of_topic(controller.state, topic, at), topic.journal.events, at)

    @api.get("/topics")
    async def topics() -> dict[str, Any]:
        """List all topics under contract."""
        return {"topics": [topic_out(each) for each in controller.statistics(now_ns()).topics]}

    @api.get("/topics/{topic}")
    async def topic_(topic: InPath) -> dict[str, Any]:
        """Get one topic: contract, shares, latencies, delivery, events."""
        return {**shown(known(topic)), "delivery": _delivery(service, topic)}

    @changes.put("/topics/{topic}", responses={409: {"description": "the topic is under another contract"}})
    async def create(topic: InPath, wish: TopicIn, request: Request) -> dict[str, Any]:
        """Put a topic under contract; if publishers are given, register and place them."""
        declared = [each.declared() for each in wish.publishers]
        try:
            asked = bucket_of(wish)
            bucket = asked if asked is not None else await asyncio.to_thread(_profiled, declared)
            contract = wish.contract(bucket)
        except (ValueError, SRTMError) as problem:
            raise HTTPException(422, str(problem)) from None
        before = controller.topics.get(topic)
        if before is not None and before.contract != contract:
            raise HTTPException(
                409, f"topic {topic!r} is under another contract; change that one instead (srtm topic set)"
            )
        found = controller.create(topic, contract, now_ns())
        if declared:
            controller.register(topic, declared, now_ns())
            controller.gather(topic, now_ns())
        if before is None:
            done(request, "create", topic=topic, **wish.model_dump(exclude={"publishers"}), publishers=len(declared))
        return shown(found)

    @changes.patch("/topics/{topic}")
    async def change(topic: InPath, wish: ContractChange, request: Request) -> dict[str, Any]:
        """Change a topic's contract without interrupting it; fields that are not given stay."""
        found = known(topic)
        try:
            contract = wish.applied_to(found.contract)
        except (ValueError, SRTMError) as problem:
            raise HTTPException(422, str(problem)) from None
        controller.change(topic, contract, now_ns())
        done(request, "change", topic=topic, **wish.model_dump(exclude_none=True))
        return shown(found)

    @changes.delete("/topics/{topic}", status_code=204)
    async def remove(topic: InPath, request: Request) -> None:
        """End a contract; the topic's messages then pass freely."""
        known(topic)
        controller.remove(topic, now_ns())
        done(request, "remove", topic=topic)

    @changes.post("/topics/{topic}/fit", responses={409: {"description": "nothing to fit"}})
    async def fit(topic: InPath, request: Request) -> dict[str, Any]:
        """Start a fitting; follow it with /watch or by polling the topic."""
        known(topic)
        try:
            controller.fit(topic, now_ns())
        except InputError as problem:
            raise HTTPException(409, str(problem)) from None
        done(request, "fit", topic=topic)
        return shown(known(topic))

    @changes.post(
        "/topics/{topic}/move", responses={409: {"description": "unknown publisher, or broker not available"}}
    )
    async def move(topic: InPath, wish: MoveIn, request: Request) -> dict[str, Any]:
        """Move publishers to a broker."""
        known(topic)
        try:
            controller.move(topic, wish.publishers, wish.broker, now_ns())
        except InputError as problem:
            raise HTTPException(409, str(problem)) from None
        first = wish.publishers[:_NAMED]
        done(request, "move", topic=topic, broker=wish.broker, count=len(wish.publishers), publishers=first)
        return shown(known(topic))

    @changes.post("/topics/{topic}/pause")
    async def pause(topic: InPath, request: Request, *, on: bool = True) -> dict[str, Any]:
        """Pause delivery to the topic's channels, or resume it with on=false; brokers keep taking messages."""
        controller.pause(known(topic).name, now_ns(), on=on)
        done(request, "pause" if on else "resume", topic=topic)
        return shown(known(topic))

    @api.get("/topics/{topic}/explain")
    async def explain(topic: InPath) -> dict[str, Any]:
        """Explain the topic's placement: what was measured, and what every other number of brokers would cost."""
        return await asyncio.to_thread(explained, known(topic), controller)

    @changes.post(
        "/topics/{topic}/publishers",
        response_model=PlacesOut,
        responses={
            409: {"description": "publishers would break a neighbour's SLO on every broker"},
            503: {"description": "no broker is available"},
        },
    )
    async def register(topic: InPath, asked: PublishersIn) -> PlacesOut:
        """Register publishers and get the broker of each; idempotent, and meant for many at once."""
        found = controller.topics.get(topic)
        if found is None:
            return _anywhere(service, topic, asked)
        places = controller.register(topic, [each.declared() for each in asked.publishers], now_ns(), asked.lost)
        refused = [each.id for each in asked.publishers if each.id in found.layout.refused]
        if refused and not places:
            raise HTTPException(409, found.fitting.refusal)
        if asked.publishers and not places:
            raise HTTPException(503, "no broker is available; start one with --controller")
        at = {
            each: PlaceOut(broker=broker, address=controller.members[broker].address) for each, broker in places.items()
        }
        asking = [each.id for each in asked.publishers if each.id in at]
        return PlacesOut(
            topic=topic,
            managed=True,
            publishers={each: at[each] for each in asking},
            brokers=_addresses(service, topic),
            delivery=[DeliveryOut(**each) for each in _delivery(service, topic)],
            refused=dict.fromkeys(refused, found.fitting.refusal),
            parts=parts_out(found, asking, at),
        )

    @api.get("/topics/{topic}/publishers")
    async def publishers(topic: InPath) -> dict[str, Any]:
        """List a topic's publishers and the broker of each."""
        found = known(topic)
        return {
            "topic": topic,
            "publishers": [
                {
                    "id": each.id,
                    "group": each.group,
                    "group_found": each.found,
                    "rate": each.rate_mps,
                    "broker": found.layout.place.get(each.id),
                }
                for each in found.layout.publishers.values()
            ],
        }

    @changes.delete("/topics/{topic}/publishers/{publisher:path}", status_code=204)
    async def unregister(topic: InPath, publisher: str) -> None:
        """Unregister a publisher that will not come back."""
        known(topic)
        try:
            controller.unregister(topic, publisher)
        except InputError as problem:
            raise HTTPException(404, str(problem)) from None

    @api.get("/topics/{topic}/watch", response_class=StreamingResponse)
    async def watch(topic: InPath) -> StreamingResponse:
        """Stream server-sent events: `brokers` at once and at every change, and each event of the topic."""
        return StreamingResponse(_events(service, topic), media_type="text/event-stream")

    @api.get("/topics/{topic}/history")
    async def history(topic: InPath) -> dict[str, Any]:
        """Get the last ten minutes of a topic: a point every five seconds, each over the ten seconds before it."""
        return {"topic": known(topic).name, "points": service.feed.history(topic)}

    @api.get("/watch", response_class=StreamingResponse)
    async def watch_all() -> StreamingResponse:
        """Stream server-sent events: a `snapshot` of all brokers and topics, then a JSON merge `patch` every second."""
        headers = {"Cache-Control": "no-store"}
        return StreamingResponse(service.feed.events(), media_type="text/event-stream", headers=headers)

    @api.get("/brokers")
    async def brokers() -> dict[str, Any]:
        """List all brokers."""
        return {"brokers": [member_out(each) for each in statistics.of_brokers(controller.state)]}

    @api.get("/targets")
    async def targets() -> list[dict[str, Any]]:
        """List brokers for Prometheus' HTTP service discovery."""
        return [
            {"targets": [urlsplit(each.url).netloc], "labels": {"broker": each.name}}
            for each in controller.members.values()
            if each.status != "dead"
        ]

    @api.get("/audit")
    async def audit() -> dict[str, Any]:
        """Get the audit log: the last thousand actions, newest first."""
        kept = controller.store.actions()
        return {
            "entries": [
                {"at_ms": at_ns // NS_PER_MS, "who": who, "action": action, "arguments": arguments}
                for at_ns, who, action, arguments in kept
            ]
        }

    @changes.post("/brokers/{name}/drain")
    async def drain(name: str, request: Request, *, on: bool = True) -> dict[str, Any]:
        """Drain a broker: move its publishers elsewhere, and send it no new ones; on=false ends that."""
        try:
            controller.drain(name, now_ns(), on=on)
        except InputError as problem:
            raise HTTPException(404, str(problem)) from None
        done(request, "drain" if on else "use again", broker=name)
        return next(member_out(each) for each in statistics.of_brokers(controller.state) if each.name == name)

    @changes.delete("/brokers/{name}", status_code=204, responses={409: {"description": "the broker is alive"}})
    async def forget(name: str, request: Request) -> None:
        """Forget a broker that is dead and will not come back; its shares are free at once."""
        if name not in controller.members:
            raise HTTPException(404, f"unknown broker {name!r}")
        if controller.members[name].status == "alive":
            raise HTTPException(409, f"broker {name!r} is alive and holds shares; drain it, and stop it first")
        controller.forget(name, now_ns())
        done(request, "forget", broker=name)

    @changes.get("/options")
    async def options() -> dict[str, Any]:
        """Get the controller's version and settings; secrets are masked."""
        started = asdict(controller.options)
        secret = {name: "(given)" for name in ("token", "control_token") if started[name] is not None}
        started["store"] = str(controller.options.store_address)  # without a login
        return {"version": srtm.__version__, "epoch": controller.state.epoch, "options": {**started, **secret}}

    add_routes(api, changes, controller, known)
    api.include_router(changes)
    return api


def _profiled(publishers: list[DeclaredPublisher]) -> TokenBucket:
    return profile(expected(publishers, 0).times_ns).bucket


def _anywhere(service: Service, topic: str, asked: PublishersIn) -> PlacesOut:
    member = service.controller.placing.least_loaded()
    if member is None:
        raise HTTPException(503, "no broker is available; start one with --controller")
    place = PlaceOut(broker=member.name, address=member.address)
    return PlacesOut(
        topic=topic,
        managed=False,
        publishers={each.id: place for each in asked.publishers},
        brokers={each.name: each.address for each in service.controller.members.values() if each.usable},
        delivery=[DeliveryOut(**each) for each in _delivery(service, topic)],
    )


def _brokers(service: Service, topic: str) -> set[str]:
    """Brokers that have messages of a topic, or will get some."""
    found = service.controller.topics.get(topic)
    return service.producers_of(topic) | (found.layout.brokers() if found else set())


def _addresses(service: Service, topic: str) -> dict[str, str]:
    """Addresses of the brokers that publishers of a topic may use."""
    members = service.controller.members
    here = [members[name] for name in sorted(_brokers(service, topic)) if name in members]
    return {member.name: member.address for member in here if member.status != "dead"}


def _delivery(service: Service, topic: str) -> list[dict[str, Any]]:
    """Where subscribers find a topic's messages."""
    return delivery_out(service.controller, topic, _brokers(service, topic))


async def _events(service: Service, topic: str) -> AsyncIterator[str]:
    told: dict[str, Any] | None = None
    noted = 0
    found = service.controller.topics.get(topic)
    since = found.journal.events[-1] if found and found.journal.events else None
    changes = service.changes(topic, _ALIVE_S)
    changed = True
    while True:
        if not changed:
            yield ":\n\n"
        places = {"brokers": _addresses(service, topic), "delivery": _delivery(service, topic)}
        if places != told:
            told = places
            yield _event("brokers", {"topic": topic, **places})
        found = service.controller.topics.get(topic)
        for event in found.journal.events if found else ():
            if since is None or event.at_ns > since.at_ns:
                since = event
                noted += 1
                yield _event(event.kind, {"topic": topic, "text": event.text})
        changed = await anext(changes)


def _event(kind: str, data: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"
