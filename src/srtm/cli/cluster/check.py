"""`srtm check`: the cluster's health in one line and an exit code, as Nagios plugins report it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, Any

import typer

from srtm.cli.common import AsJson, in_ms, many, plain, print_json
from srtm.cli.remote import HERE, Controller, Token, ask
from srtm.errors import ControlError
from srtm.units import NS_PER_S, parse_duration_ns


class Verdict(IntEnum):
    """The severity, and the exit code."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


def check(
    controller: Controller = HERE,
    token: Token = None,
    brokers: Annotated[int, typer.Option(min=1, metavar="N", help="Minimum brokers alive; fewer are critical")] = 1,
    opening: Annotated[
        str, typer.Option(metavar="DURATION", help="Time that a contract may take to reach all brokers")
    ] = "30s",
    patience: Annotated[str, typer.Option(metavar="DURATION", help="Timeout for the controller's answer")] = "5s",
    as_json: AsJson = False,
) -> None:
    """Report the health of the cluster in one line, for Nagios and similar monitors.

    The line ends with performance data. The exit code is 0 (ok), 1 (warning), 2 (critical) or 3 (unknown).

    Critical: the controller does not answer, too few brokers are alive, or an SLO is not met. Warning: a broker is not
    alive or is refused, a contract has not reached all brokers in time, shares stay idle, or a topic fits nowhere.

    Example:
        srtm check --brokers 3
    """
    longest_s = parse_duration_ns(opening) / NS_PER_S
    try:
        members, topics = _look(controller, token, parse_duration_ns(patience) / NS_PER_S)
        found = members["brokers"], topics["topics"]
        verdict, words, numbers = judged(*found, brokers, longest_s, members.get("refused", ()))
    except ControlError as problem:
        verdict = Verdict.UNKNOWN if problem.facts.get("stranger") else Verdict.CRITICAL
        words, numbers = [plain(str(problem))], {}
    except (KeyError, TypeError, ValueError, AttributeError):
        verdict, words, numbers = Verdict.UNKNOWN, [f"{controller} does not answer like a controller"], {}
    if as_json:
        print_json({"status": verdict.name, "code": int(verdict), "messages": words, "performance": numbers})
    else:
        data = " ".join(f"'{name}'={value}" for name, value in numbers.items())
        print(f"SRTM {verdict.name}: {'; '.join(words)}" + (f" | {data}" if data else ""))
    raise typer.Exit(int(verdict))


def _look(controller: str, token: str | None, patience_s: float) -> tuple[dict[str, Any], dict[str, Any]]:
    return (
        ask(controller, token, "GET", "/v1/brokers", patience_s=patience_s),
        ask(controller, token, "GET", "/v1/topics", patience_s=patience_s),
    )


def judged(
    members: list[dict[str, Any]],
    topics: list[dict[str, Any]],
    least: int,
    longest_s: float,
    refused: Sequence[dict[str, Any]] = (),
) -> tuple[Verdict, list[str], dict[str, str]]:
    """The verdict, its reasons, and the performance data."""
    alive = sum(each["status"] == "alive" for each in members)
    lost = [f"{each['name']} is {each['status']}" for each in members if each["status"] not in ("alive", "joining")]
    missed = [_missed(each) for each in topics if each["slo_met"] is False]
    slow = [each for each in topics if (each["opening_s"] or 0) > longest_s]
    late = [f"{each['topic']} waits for {', '.join(each['waits_for']) or 'a broker'}" for each in slow]
    unfit = [f"{each['topic']} fits on no brokers" for each in topics if each["state"] == "no capacity"]
    short = [_short(each) for each in topics if each["shares"]["overdue"]]
    critical = ([f"{many(alive, 'broker')} alive, at least {least} required"] if alive < least else []) + missed
    denied = [f"broker {each['name']} from {each['from']} is refused: {each['reason']}" for each in refused]
    warning = lost + late + unfit + short + denied
    numbers = {
        "brokers_alive": f"{alive};;{least}:;0;{len(members)}",
        "topics": str(len(topics)),
        "slo_missed": f"{len(missed)};;0;0;{len(topics)}",
        "rate": str(sum(each["rate"] for each in members)),
        "waiting": str(sum(each["waiting"] for each in topics)),
    }
    for each in topics:
        if each["total_ms"]:
            numbers[f"{each['topic']}_p99"] = f"{each['total_ms']['p99']:.6g}ms;;{each['slo_ms']:g};0"
    words = [plain(word) for word in critical + warning]
    verdict = Verdict.CRITICAL if critical else Verdict.WARNING if warning else Verdict.OK
    return verdict, words or [f"{many(alive, 'broker')} alive, {_slos(topics)}"], numbers


def _slos(topics: list[dict[str, Any]]) -> str:
    met = sum(each["slo_met"] is True for each in topics)
    if not topics:
        return "no topics under contract"
    if not met:
        return f"{many(len(topics), 'topic')}, too little traffic to judge SLOs"
    return f"{many(len(topics), 'topic')}, " + (
        "every SLO met" if met == len(topics) else f"{many(met, 'SLO')} met, others idle"
    )


def _short(topic: dict[str, Any]) -> str:
    shares = topic["shares"]
    waits = f", waiting for {', '.join(shares['waits_for'])}" if shares["waits_for"] else ""
    return f"{topic['topic']}: {shares['short_of']}, for {shares['short_since_s']:.0f} s{waits}"


def _missed(topic: dict[str, Any]) -> str:
    p99_ms = (topic["total_ms"] or {}).get("p99", 0)
    missed = f"{topic['topic']} misses its SLO ({in_ms(p99_ms)} of {in_ms(topic['slo_ms'])})"
    return f"{missed}: {over_contract(topic)}" if topic["over_contract"] else missed


def over_contract(topic: dict[str, Any]) -> str:
    """Why the messages of a topic wait that receives more than its contract."""
    return f"{topic['rate']:,.0f} msg/s arrive, but the contract passes {topic['r']:,g}; raise r or send less"
