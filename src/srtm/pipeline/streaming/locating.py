"""Which logs hold a topic: brokers' own, those in front of an nsqd, or a stream of JetStream."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from srtm.errors import InputError
from srtm.pipeline.streaming.jetstream import Streams
from srtm.pipeline.streaming.logs import Away, Logs, Refused, Spools, ask

if TYPE_CHECKING:
    from srtm.pipeline.streaming.settings import Settings

_ONE_WAY = "select brokers with one engine in option brokers, or NATS servers in option engine"


def located(settings: Settings) -> Logs | None:
    """Where a topic's messages are: in a stream, or in brokers' logs; None if no broker has the topic yet."""
    if settings.engine:
        return Streams(settings, settings.engine)
    logs = Logs(settings)
    here = list(settings.brokers or logs.look().values())  # brokers with an engine are not in the lookup
    members = [] if settings.brokers else _members(settings.controller)
    engined = [each for each in members if each.kind != "local" and each.alive]
    found = {each.engine for each in engined if each.engine is not None}
    elsewhere = [each.url for each in engined if each.engine is None]
    if not engined and not settings.brokers:
        return logs if here else None
    if any(each.kind == "nsqd" for each in engined):  # the lookup may list nsqds beside our brokers
        here = [url for url in here if url in {each.url for each in members}]
    away = None
    for url in [*elsewhere, *here]:
        try:
            found.add(_engine_of(url))
        except Away as problem:
            away = problem
    nsqds = {engine for engine in found if engine.startswith("nsqd")}  # each broker has its own
    if len(found - nsqds) + bool(nsqds) > 1:
        ways = ", ".join(sorted(found))
        raise InputError(f"topic {settings.topic!r} has several delivery engines ({ways}): {_ONE_WAY}")
    if not found and elsewhere and away:
        raise away
    engine = found.pop() if found else "local"
    if nsqds:
        return Spools(settings, {each.name: each.url for each in engined})
    return logs if engine == "local" else Streams(settings, engine)


class _Member(NamedTuple):
    """A broker as the controller knows it; `engine` is None if the broker is too old to report its address."""

    name: str
    url: str
    alive: bool
    kind: str
    engine: str | None


def _members(controller: str) -> list[_Member]:
    """All brokers of a controller; a stock nsqlookupd has none."""
    try:
        listed = json.loads(ask(f"{controller}/v1/brokers"))["brokers"]
        return [
            _Member(
                each["name"],
                each["http"],
                each["status"] != "dead",
                each.get("engine", "local"),
                each.get("engine_address"),
            )
            for each in listed
        ]
    except (Refused, ValueError, KeyError, TypeError):
        return []


def _engine_of(url: str) -> str:
    """The address of a broker's engine, or `local`."""
    try:
        found = json.loads(ask(f"{url}/stats", format="json", include_clients="false"))["srtm"]["engine"]
    except (Refused, ValueError, KeyError, TypeError):  # not a broker, or of another version; `Logs` reports it
        return "local"
    return str(found.get("address") or found["kind"])
