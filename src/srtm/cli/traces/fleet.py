"""`srtm plan --all`: all topics of a trace on the same brokers, and what-ifs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from srtm.cli.common import many, new_table, plain, print_json, print_table, report_errors, spark_for
from srtm.errors import InputError
from srtm.model.lending import known_term
from srtm.units import NS_PER_MS, exact, parse_duration_ns

if TYPE_CHECKING:
    from pathlib import Path

    from srtm.model.latency import Distribution
    from srtm.pipeline.fleet import FleetPlan, Scenario, Search, TopicPlan
    from srtm.pipeline.plan import BrokerPlan

_LISTED = 20  # topics that miss their SLO
_TOPIC, _CHANGE = {"topic", "k", "brokers", "total_ms", "meets_slo"}, {"name", "brokers_used", "meets_slo"}
_KEYS = ("traffic", "brokers", "slo", "lending")
_FORMS = "traffic=1.5, brokers=-1, slo=2ms or lending=auto; several changes at once are separated by commas"


def scenarios_from(base: Scenario, changes: list[str], round_trip_ns: int) -> list[Scenario]:
    """The scenario itself, and one for each what-if."""
    names = [base.name, *changes]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"--what-if {twice} is given more than once")
    return [base, *(_changed(base, text, round_trip_ns) for text in changes)]


def _changed(base: Scenario, text: str, round_trip_ns: int) -> Scenario:
    from srtm.model.latency import SLO
    from srtm.pipeline.fleet import resized
    from srtm.sim.simulate import Loans

    changed = replace(base, name=text)
    for change in text.split(","):
        key, equals, value = (part.strip() for part in change.partition("="))
        if not equals or key not in _KEYS:
            raise InputError(f"--what-if {text!r}: unknown change {change.strip()!r}; write {_FORMS}")
        if key == "traffic":
            changed = replace(changed, traffic=exact(value, f"--what-if {text!r}: traffic"))
        elif key == "brokers":
            changed = replace(changed, brokers=resized(base.brokers, _count(text, value, len(base.brokers))))
        elif key == "slo":
            changed = replace(changed, slo=SLO(parse_duration_ns(value, bare="ms"), base.slo.quantile))
        else:
            term = known_term(value)
            changed = replace(changed, loans=None if term == "off" else Loans(term, round_trip_ns))
    return changed


def _count(text: str, value: str, now: int) -> int:
    try:
        number = int(value)
    except ValueError:
        raise InputError(
            f"--what-if {text!r}: brokers must be a number, or a change such as -1 or +2, not {value!r}"
        ) from None
    return now + number if value.startswith(("+", "-")) else number


def plan_fleet(
    trace: str | None,
    unused: list[str],
    now: Scenario,
    changes: list[str],
    round_trip_ns: int,
    search: Search,
    where: tuple[str | None, str | None, list[str] | None],
    *,
    compare: bool,
    as_json: bool,
) -> None:
    """Plan all topics of a trace for the scenario and what-ifs, and print the result.

    `unused` are options that were given and are for one topic; `where` says which Spark.
    """
    from srtm.pipeline.fleet import NO_ROOM, plan_all

    if trace is None:
        raise InputError("--all plans the topics of a trace: name a file, a folder or a URI")
    if unused:
        raise InputError(f"{unused[0]} is for one topic, but --all plans every topic of the trace: omit one of them")
    scenarios = scenarios_from(now, changes, round_trip_ns)
    with spark_for(trace, "planning", *where) as (spark, status):
        plans = plan_all(trace, spark, scenarios, search, say=lambda doing: status.update(escape(f"{doing}: {trace}")))
    if as_json:
        print_json(fleet_document(plans))
    else:
        print_fleet(plans, compare=compare)
    report_errors([(line.topic, line.error) for line in plans[0].topics if line.error != NO_ROOM])
    if not plans[0].meets_slo:
        raise typer.Exit(1)


def fleet_document(plans: list[FleetPlan]) -> dict[str, Any]:
    """The JSON document of a fleet's plan and its what-ifs."""
    now, *others = plans
    return {
        "topics": [
            {
                "topic": line.topic,
                "k": line.k,
                "brokers": [broker_facts(each) for each in line.brokers],
                "total_ms": points_ms(line.total) if line.total else None,
                "meets_slo": line.meets_slo,
            }
            for line in now.topics
        ],
        "brokers_used": now.brokers_used,
        "what_if": [
            {"name": each.scenario.name, "brokers_used": each.brokers_used, "meets_slo": each.meets_slo}
            for each in others
        ],
    }


def read_fleet(path: Path) -> dict[str, Any]:
    """A document that `srtm plan --all --json` printed."""
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"--plan: cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"--plan: {path} is not JSON: {error}") from None
    if not _is_fleet(document):
        raise InputError(f"--plan: {path} is not a fleet's plan: save the output of srtm plan --all --json")
    return document


def _is_fleet(document: Any) -> bool:
    wanted = {"topics", "brokers_used", "what_if"}
    if not isinstance(document, dict) or not wanted <= document.keys():
        return False
    lines, changes = document["topics"], document["what_if"]
    return (
        all(isinstance(each, dict) and each.keys() >= _TOPIC for each in lines)
        and all(isinstance(each, dict) and each.keys() >= _CHANGE for each in changes)
        and all("broker" in broker and "publishers" in broker for each in lines for broker in each["brokers"])
    )


def broker_facts(found: BrokerPlan) -> dict[str, Any]:
    """A broker of a plan as JSON."""
    sizes = {"publishers": found.publishers, "r": found.bucket.r, "b": found.bucket.b}
    return {"broker": found.broker, **sizes, "total_ms": points_ms(found.total)}


def points_ms(found: Distribution) -> dict[str, float]:
    """The points of a distribution in milliseconds."""
    return {"p50": found.p50 / NS_PER_MS, "p95": found.p95 / NS_PER_MS, "p99": found.p99 / NS_PER_MS}


def print_fleet(plans: list[FleetPlan], *, compare: bool) -> None:
    """Print a fleet's plan: its brokers, topics that miss the SLO (or all), and the what-ifs."""
    now, console = plans[0], Console(soft_wrap=True, markup=False, highlight=False)
    there, slo_ms = len(now.scenario.brokers), now.scenario.slo.limit_ns / NS_PER_MS
    verdict = "all meet it" if now.meets_slo else f"{_missing(now):,} miss it"
    console.print(f"{many(len(now.topics), 'topic')} on {many(there, 'broker')}; SLO p99 ≤ {slo_ms:g} ms: {verdict}")
    console.print(_used(now))
    table = new_table("broker", "topics", "msg/s", "busy")
    for name, (parts, rate_mps, load) in now.loads.items():
        table.add_row(name, f"{parts:,}", f"{rate_mps:,.6g}", f"{load:.0%}")
    print_table(table)
    listed = [line for line in now.topics if compare or not line.meets_slo]
    if listed:
        _print_topics(listed if compare else listed[:_LISTED])
        if not compare and len(listed) > _LISTED:
            console.print(f"… and {len(listed) - _LISTED:,} more; --compare lists all topics")
    if len(plans) > 1:
        _print_what_ifs(plans)


def _used(plan: FleetPlan) -> str:
    """How many brokers the fleet needs, and what sharing them saves."""
    apart = sum(line.k for line in plan.topics)
    used = f"brokers in use: {plan.brokers_used:,}; with brokers of their own, these topics would use {apart:,}"
    homeless = sum(not line.brokers for line in plan.topics)
    if not homeless:
        return used
    needs = f"; {many(plan.needs, 'broker')} would have room for all" if plan.needs else ""
    return f"{used}; without a broker: {many(homeless, 'topic')}{needs}"


def _print_topics(lines: list[TopicPlan]) -> None:
    table = new_table("topic", "k", "p50 (ms)", "p95 (ms)", "p99 (ms)", "SLO", "brokers")
    for line in lines:
        points = list(points_ms(line.total).values()) if line.total else []
        cells = [f"{point:.3f}" for point in points] or ["—"] * 3
        where = ", ".join(each.broker for each in line.brokers) or plain(line.error or "")
        table.add_row(line.topic, str(line.k or "—"), *cells, "met" if line.meets_slo else "missed", where)
    print_table(table)


def _print_what_ifs(plans: list[FleetPlan]) -> None:
    now = plans[0]
    caption = "brokers in use; needed: those that have room for all topics"
    table = new_table("what if", "brokers", "change", "needed", "SLO", caption=caption)
    for each in plans:
        change = each.brokers_used - now.brokers_used
        verdict = "met" if each.meets_slo else f"missed by {_missing(each):,}"
        needs = "—" if each.needs is None else f"{each.needs:,}"
        used = f"{each.brokers_used:,} of {len(each.scenario.brokers):,}"
        table.add_row(each.scenario.name, used, f"{change:+d}" if change else "0", needs, verdict)
    print_table(table)


def _missing(plan: FleetPlan) -> int:
    return sum(not line.meets_slo for line in plan.topics)
