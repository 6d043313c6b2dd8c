"""`srtm topic`: contracts of topics."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srtm.cli.cluster.check import over_contract
from srtm.cli.cluster.explanation import print_explanation
from srtm.cli.cluster.tables import print_topic, table_of
from srtm.cli.common import (
    LENDING,
    SLO_P99,
    AsJson,
    Lending,
    PolicyName,
    Slo,
    known_policy,
    lending_term,
    many,
    new_table,
    print_json,
    print_table,
)
from srtm.cli.help import App
from srtm.cli.remote import HERE, Controller, Token, ask, topic_at
from srtm.errors import InputError
from srtm.model import defaults
from srtm.model.placement import POLICIES
from srtm.units import NS_PER_MS, NS_PER_S, parse_duration_ns

if TYPE_CHECKING:
    from srtm.model.bucket import TokenBucket

app = App("Put topics under contract, watch them, and change them.")

_POLL_S = 0.5
_CONTRACT, _UNCHANGED = "Contract", "unchanged"
_WINDOW = "Traffic that shares follow; a bare number is in seconds"
_PERIOD = "Time between two adaptations of shares; a bare number is in seconds"
Name = Annotated[str, typer.Argument(metavar="TOPIC", help="Name of the topic", show_default=False)]
R = Annotated[float | None, typer.Option("--r", metavar="RATE", help="Tokens per second", rich_help_panel=_CONTRACT)]
B = Annotated[float | None, typer.Option("--b", metavar="TOKENS", help="Bucket size", rich_help_panel=_CONTRACT)]


class FitBy(StrEnum):
    """How a fitting finds the brokers of a topic."""

    MODEL = "model"
    MEASURE = "measure"
    NONE = "none"


class Durability(StrEnum):
    """Where messages are kept."""

    MEMORY = "memory"
    DISK = "disk"


class Overflow(StrEnum):
    """What happens to messages that find no token."""

    WAIT = "wait"
    DROP = "drop"


_WHO = "Identity that may {}, of AUTH or a certificate, or anyone; repeatable"
MayPublish = Annotated[list[str] | None, typer.Option(metavar="NAME", help=_WHO.format("publish"))]
MaySubscribe = Annotated[list[str] | None, typer.Option(metavar="NAME", help=_WHO.format("subscribe"))]
Fit = Annotated[FitBy, typer.Option(metavar="METHOD", help="Fitting: model (predict, then confirm), measure or none")]


@app.command()
def create(
    name: Name,
    r: R = None,
    b: B = None,
    trace: Annotated[
        str | None,
        typer.Option(metavar="TRACE", help="Trace to profile (r, b) from", rich_help_panel=_CONTRACT),
    ] = None,
    slo_p99: Slo = SLO_P99,
    policy: PolicyName = defaults.POLICY,
    fit: Fit = FitBy.MODEL,
    durability: Annotated[
        Durability, typer.Option(metavar="WHERE", help="Keep messages in memory or on disk")
    ] = Durability.MEMORY,
    overflow: Annotated[
        Overflow, typer.Option(metavar="ACTION", help="Messages without a token: wait or drop")
    ] = Overflow.WAIT,
    adapt: Annotated[bool, typer.Option(help="Let the shares of brokers follow the traffic")] = True,
    adapt_window: Annotated[
        str | None, typer.Option(metavar="DURATION", help=_WINDOW, show_default=f"{defaults.ADAPT_WINDOW_S}s")
    ] = None,
    adapt_period: Annotated[
        str | None, typer.Option(metavar="DURATION", help=_PERIOD, show_default=f"{defaults.ADAPT_PERIOD_S}s")
    ] = None,
    lending: Lending = defaults.LENDING,
    may_publish: MayPublish = None,
    may_subscribe: MaySubscribe = None,
    controller: Controller = HERE,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Put a topic under contract: a token bucket (r, b) and an SLO.

    Give --r and --b, or a --trace to profile them from.

    Examples:
        srtm topic create traffic --r 11000 --b 600 --slo-p99 1ms
        srtm topic create traffic --trace trace.parquet --policy lb
    """
    from srtm.model.bucket import TokenBucket

    publishers: list[dict[str, Any]] = []
    if trace is not None and r is None and b is None:
        bucket, publishers = _from_trace(name, trace)
    elif trace is None and r is not None and b is not None:
        bucket = TokenBucket.of(r, b)
    else:
        raise InputError("give --r and --b, or --trace to profile them from a trace")
    wish = {
        "r": bucket.r,
        "b": bucket.b,
        "slo_ms": parse_duration_ns(slo_p99, bare="ms") / NS_PER_MS,
        "policy": policy,
        "fit": fit.value,
        "durability": durability.value,
        "overflow": overflow.value,
        "adapt": adapt,
        **_adaptation(adapt_window, adapt_period),
        "lending": lending,
        "may_publish": _identities(may_publish) or [],
        "may_subscribe": _identities(may_subscribe) or [],
        "publishers": publishers,
    }
    made = ask(controller, token, "PUT", topic_at(name), wish)
    if as_json:
        print_json(made)
    else:
        print(_contract(made))


@app.command("set")
def set_(
    name: Name,
    r: Annotated[
        float | None, typer.Option("--r", metavar="RATE", help="Tokens per second", show_default=_UNCHANGED)
    ] = None,
    b: Annotated[
        float | None, typer.Option("--b", metavar="TOKENS", help="Bucket size", show_default=_UNCHANGED)
    ] = None,
    slo_p99: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="p99 end-to-end latency to hold; a bare number is in ms",
            show_default=_UNCHANGED,
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help=f"Placement policy: {', '.join(POLICIES)}",
            callback=known_policy,
            show_default=_UNCHANGED,
        ),
    ] = None,
    fit: Annotated[
        FitBy | None,
        typer.Option(metavar="METHOD", help="Fitting: model, measure or none", show_default=_UNCHANGED),
    ] = None,
    adapt: Annotated[
        bool | None,
        typer.Option(help="Let the shares of brokers follow the traffic", show_default=_UNCHANGED),
    ] = None,
    adapt_window: Annotated[str | None, typer.Option(metavar="DURATION", help=_WINDOW, show_default=_UNCHANGED)] = None,
    adapt_period: Annotated[str | None, typer.Option(metavar="DURATION", help=_PERIOD, show_default=_UNCHANGED)] = None,
    lending: Annotated[
        str | None, typer.Option(metavar="RULE", help=LENDING, callback=lending_term, show_default=_UNCHANGED)
    ] = None,
    may_publish: MayPublish = None,
    may_subscribe: MaySubscribe = None,
    controller: Controller = HERE,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Change a topic's contract while it runs, and fit the topic again.

    A larger bucket takes effect at once. A smaller one takes effect when every broker has cut its share; until then,
    no share grows.

    Example:
        srtm topic set traffic --r 15000 --b 800
    """
    from srtm.model.bucket import TokenBucket

    TokenBucket.of(1 if r is None else r, 1 if b is None else b)  # checks the values
    wish = {
        "r": r,
        "b": b,
        "slo_ms": parse_duration_ns(slo_p99, bare="ms") / NS_PER_MS if slo_p99 is not None else None,
        "policy": policy,
        "fit": fit.value if fit else None,
        "adapt": adapt,
        **_adaptation(adapt_window, adapt_period),
        "lending": lending,
        "may_publish": _identities(may_publish),
        "may_subscribe": _identities(may_subscribe),
    }
    asked = {key: value for key, value in wish.items() if value is not None}
    if not asked:
        raise InputError(
            "nothing to change; give --r, --b, --slo-p99, --policy, --fit, --adapt, --adapt-window, --adapt-period,"
            " --lending, --may-publish or --may-subscribe"
        )
    made = ask(controller, token, "PATCH", topic_at(name), asked)
    if as_json:
        print_json(made)
    else:
        print(_contract(made))


def _identities(given: list[str] | None) -> list[str] | None:
    """Identities as the API takes them; none is anyone."""
    return [] if given == ["anyone"] else given or None


def _adaptation(window: str | None, period: str | None) -> dict[str, int]:
    """The settings of the TB Adaptor that were given, in whole seconds."""
    found = {}
    for name, duration in (("window", window), ("period", period)):
        if duration is not None:
            found[f"adapt_{name}_s"], rest = divmod(parse_duration_ns(duration, bare="s"), NS_PER_S)
            if rest:
                raise InputError(
                    f"--adapt-{name} must be whole seconds, not {duration}: brokers report traffic once a second"
                )
    return found


def _contract(topic: dict[str, Any]) -> str:
    bucket = f"(r, b) = ({topic['r']:g}/s, {topic['b']:g})"
    kept = ", on disk" if topic["durability"] == "disk" else ""
    return f"topic {topic['topic']}: {bucket}, p99 within {topic['slo_ms']:g} ms, {topic['policy']}{kept}"


def _from_trace(name: str, trace: str) -> tuple[TokenBucket, list[dict[str, Any]]]:
    """(r, b) and the publishers of a trace's topic: its only one, or the one of that name."""
    from srtm.model.profile import profile
    from srtm.workload.trace import load

    topics = load(trace)
    found = topics if len(topics) == 1 else [topic for topic in topics if topic.topic == name]
    if not found:
        held = ", ".join(topic.topic for topic in topics)
        raise InputError(f"unknown topic {name!r} in {trace}; known topics: {held}")
    bucket = profile(found[0].arrivals.times_ns).bucket
    publishers = [{"id": each.id, "rate": each.rate_mps, "group": each.group} for each in found[0].publishers]
    return bucket, publishers


@app.command("ls")
def list_(controller: Controller = HERE, token: Token = None, as_json: AsJson = False) -> None:
    """List the topics under contract."""
    found = ask(controller, token, "GET", "/v1/topics")
    if as_json:
        print_json(found)
        return
    print_table(table_of(found["topics"]))


@app.command()
def show(name: Name, controller: Controller = HERE, token: Token = None, as_json: AsJson = False) -> None:
    """Show a topic's contract, shares, latencies and recent events."""
    topic = ask(controller, token, "GET", topic_at(name))
    if as_json:
        print_json(topic)
        return
    print_topic(topic)


@app.command()
def rm(name: Name, controller: Controller = HERE, token: Token = None) -> None:
    """End a topic's contract; its messages then pass without a limit."""
    ask(controller, token, "DELETE", topic_at(name))
    print(f"topic {name}: contract ended; messages pass without a limit")


@app.command()
def fit(
    name: Name,
    wait: Annotated[bool, typer.Option(help="Wait until the fitting ends")] = True,
    controller: Controller = HERE,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Place a topic's publishers again, on the fewest brokers that hold its SLO.

    The controller measures each placement until the SLO holds. With --wait, the exit code is 1 if the SLO is not met.
    """
    topic = ask(controller, token, "POST", topic_at(name, "fit"))
    said = ""
    while wait and topic["fitting"]:
        now = f"{topic['fitting']['state']}, {topic['fitting']['rounds']} rounds measured"
        if now != said and sys.stderr.isatty():
            print(f"{name}: {now}", file=sys.stderr)
        said = now
        time.sleep(_POLL_S)
        topic = ask(controller, token, "GET", topic_at(name))
    if as_json:
        print_json(topic)
    elif topic["fitted"]:
        fitted = topic["fitted"]
        verdict = "SLO met" if fitted["met"] else f"SLO not met: {fitted['reason']}"
        spent = f"{len(fitted['rounds'])} rounds in {fitted['elapsed_s']:.1f} s"
        print(f"{name}: k = {fitted['k']} after {spent}, {verdict}")
    if wait and not (topic["fitted"] and topic["fitted"]["met"]):
        raise typer.Exit(1)


@app.command()
def explain(name: Name, controller: Controller = HERE, token: Token = None, as_json: AsJson = False) -> None:
    """Explain a topic's placement, and predict its latency on other numbers of brokers."""
    found = ask(controller, token, "GET", topic_at(name, "explain"))
    if as_json:
        print_json(found)
        return
    now = ask(controller, token, "GET", topic_at(name))
    print_explanation(found, over_contract(now) if now["over_contract"] else None)


@app.command()
def advice(name: Name, controller: Controller = HERE, token: Token = None, as_json: AsJson = False) -> None:
    """Show advice about a topic: its contract, its SLO, undeclared groups.

    The advice comes from srtm advise, which must be running.
    """
    found = ask(controller, token, "GET", topic_at(name, "advice"))
    if as_json:
        print_json(found)
        return
    for each in found["advice"]:
        print(f"{each['kind']} ({each['since_s']:.0f} s): {each['text']}")
    if not found["advice"]:
        print(f"no advice about {name}; srtm advise must be running")


@app.command()
def move(
    name: Name,
    publishers: Annotated[list[str], typer.Argument(metavar="PUBLISHER", help="Ids of publishers", show_default=False)],
    to: Annotated[str, typer.Option("--to", metavar="BROKER", help="Broker that they move to")],
    controller: Controller = HERE,
    token: Token = None,
) -> None:
    """Move publishers to a broker."""
    wish = {"publishers": publishers, "broker": to}
    ask(controller, token, "POST", topic_at(name, "move"), wish)
    print(f"topic {name}: moving {many(len(publishers), 'publisher')} to {to}")


@app.command()
def publishers(
    name: Name,
    rm: Annotated[str | None, typer.Option("--rm", metavar="ID", help="Forget this publisher")] = None,
    controller: Controller = HERE,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """List a topic's publishers and their brokers, or forget one that will not return.

    Example:
        srtm topic publishers traffic --rm sensor-17
    """
    if rm is not None:
        if not rm:
            raise InputError("--rm needs the id of a publisher, not ''")
        ask(controller, token, "DELETE", topic_at(name, "publishers", rm))
    found = ask(controller, token, "GET", topic_at(name, "publishers"))
    if as_json:
        print_json(found)
        return
    table = new_table("publisher", "group", "msg/s", "broker")
    for each in found["publishers"]:
        rate = "—" if each["rate"] is None else f"{each['rate']:,g}"
        group = f"{each['group']} (found)" if each.get("group_found") else each["group"] or "—"
        table.add_row(each["id"], group, rate, each["broker"] or "—")
    print_table(table)
