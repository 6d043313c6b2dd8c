"""`srtm load`: publishers that send on a schedule, and the latency of their messages."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from srtm.cli.cluster.topic import FitBy
from srtm.cli.common import (
    LENDING,
    SLO_P99,
    WORKLOAD,
    AsJson,
    Batch,
    Duration,
    GroupSize,
    Jitter,
    Process,
    Publishers,
    Rate,
    Seed,
    known_policy,
    lending_term,
    new_table,
    print_json,
    print_table,
)
from srtm.cli.messages.pub import Brokers
from srtm.cli.outcome import STOPPED
from srtm.cli.remote import HERE, Controller, Engine, Token, topic_at
from srtm.model import defaults
from srtm.model.placement import POLICIES
from srtm.units import NS_PER_MS, format_ns, parse_duration_ns

if TYPE_CHECKING:
    from rich.table import Table

    from srtm.client.cluster import Cluster
    from srtm.client.load import Load, LoadOptions, LoadReport, Progress


_CREATION = "Contract of a new topic"


def load(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic to publish to", show_default=False)],
    publishers: Publishers = 1_000,
    rate: Rate = 10.0,
    batch: Batch = 10,
    process: Process = "poisson",
    group_size: GroupSize = 25,
    jitter: Jitter = "0ms",
    duration: Duration = "60s",
    size: Annotated[int, typer.Option(metavar="BYTES", help="Size of a message", rich_help_panel=WORKLOAD)] = 64,
    seed: Seed = 1,
    prefix: Annotated[
        str, typer.Option(metavar="TEXT", help="Prefix of publisher names; loads that run at once need different ones")
    ] = "p",
    split: Annotated[
        bool,
        typer.Option(
            "--split",
            help="Let publishers that are faster than a broker use several connections",
            rich_help_panel=WORKLOAD,
        ),
    ] = False,
    declare: Annotated[
        bool,
        typer.Option(help="Let publishers declare their groups and traffic", rich_help_panel=WORKLOAD),
    ] = True,
    channel: Annotated[
        str | None,
        typer.Option(
            metavar="CHANNEL",
            help="Channel to receive on; none measures acknowledgements only",
            show_default="a new one",
        ),
    ] = None,
    controller: Controller = HERE,
    broker: Brokers = None,
    token: Token = None,
    engine: Engine = None,
    as_json: AsJson = False,
    create: Annotated[
        bool,
        typer.Option("--create/--no-create", help="Create the topic if it does not exist", rich_help_panel=_CREATION),
    ] = True,
    quantile: Annotated[
        str,
        typer.Option(
            metavar="FRACTION", help="Fraction of messages that must not wait for tokens", rich_help_panel=_CREATION
        ),
    ] = defaults.QUANTILE,
    slo_p99: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="p99 end-to-end latency to hold; a bare number is in ms",
            rich_help_panel=_CREATION,
        ),
    ] = SLO_P99,
    policy: Annotated[
        str,
        typer.Option(
            metavar="POLICY",
            help=f"Placement policy: {', '.join(POLICIES)}",
            callback=known_policy,
            rich_help_panel=_CREATION,
        ),
    ] = defaults.POLICY,
    fit: Annotated[
        FitBy, typer.Option(metavar="METHOD", help="Fitting: model, measure or none", rich_help_panel=_CREATION)
    ] = FitBy.MODEL,
    lending: Annotated[
        str, typer.Option(metavar="RULE", help=LENDING, callback=lending_term, rich_help_panel=_CREATION)
    ] = defaults.LENDING,
) -> None:
    """Send messages on a fixed schedule, and measure latency from the scheduled times.

    The schedule is the same as that of srtm trace synth. The load never slows down for the cluster, so a slow cluster
    shows as latency. A topic that does not exist is created with the (r, b) that the schedule needs.

    Ctrl-C ends the load early, with a report. The exit code is 1 if an acknowledged message was lost, or if a message
    was refused or not answered.

    If the delivery engine needs credentials, pass them in SRTM_ENGINE, as in
    nats+tls://user:password@host?ca=ca.pem; other users can see command lines.

    Examples:
        srtm load traffic --publishers 1000 --batch 10 --group-size 25 --duration 60
        srtm load traffic --broker 127.0.0.1:4150 --broker 127.0.0.1:4152
    """
    from srtm.client.load import LoadOptions, own_channel
    from srtm.program import run
    from srtm.workload.publishers import Population, Workload

    spread_ns = parse_duration_ns(jitter, bare="ms")
    population = Population(publishers, rate, batch, process, group_size, spread_ns, prefix)  # type: ignore[arg-type]
    workload = Workload((population,), parse_duration_ns(duration), seed)
    heard_on = None if channel == "none" else channel or own_channel()
    options = LoadOptions(
        topic, workload, size, heard_on, tuple(broker or ()), split=split, declare=declare, engine=engine
    )
    slo_ms = parse_duration_ns(slo_p99, bare="ms") / NS_PER_MS
    contract: dict[str, object] = {"slo_ms": slo_ms, "policy": policy, "fit": fit.value, "lending": lending}
    report = run(_load(options, controller, token, quantile, contract if create else None))
    if report is None:
        raise typer.Exit(STOPPED)
    if as_json:
        print_json({**report.facts(), "seed": seed})
    else:
        print(
            f"{topic}: {report.publishers:,} publishers, {len(report.brokers)} brokers, {report.rate:,.0f} messages/s;"
            f" {report.received:,} of {report.sent:,} received, {report.lost:,} lost, {report.doubled:,} duplicates;"
            f" {report.migrations:,} migrations, {report.reconnections:,} reconnections,"
            f" {report.throttles:,} throttles; {report.cpu_us:.1f} µs of CPU per message here"
        )
        print_table(_table(report))
    if report.bottleneck:
        _say_bottleneck(report)
    for count, what in ((report.refused, "refused"), (report.unanswered, "not answered")):
        if count:
            print(f"srtm: {count:,} messages were {what}: {report.problem or 'no reason given'}", file=sys.stderr)
    if report.stopped:
        raise typer.Exit(STOPPED)
    if report.lost or report.refused or report.unanswered:
        raise typer.Exit(1)


async def _load(
    options: LoadOptions, controller: str, token: str | None, quantile: str, contract: dict[str, object] | None
) -> LoadReport | None:
    """The report; None if it was stopped before it sent anything."""
    from srtm.client.cluster import Cluster
    from srtm.client.load import Load

    if options.brokers:
        return await _stoppable(Load(options, None))
    async with Cluster(controller, token=token) as cluster:
        if contract is not None:
            await _create(options, cluster, quantile, contract)
        return await _stoppable(Load(options, cluster))


async def _stoppable(load: Load) -> LoadReport | None:
    """Run the load; Ctrl-C or SIGTERM ends the sending."""
    import asyncio

    from srtm import program

    going = asyncio.ensure_future(load.go(_show))
    stopped = asyncio.ensure_future(program.stop_signal().wait())
    await asyncio.wait({going, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not going.done() and not load.stop():
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
        return None
    return await going


async def _create(options: LoadOptions, cluster: Cluster, quantile: str, contract: dict[str, object]) -> None:
    """Create the topic, if it does not exist, with the contract that the schedule needs."""
    from srtm.errors import ClientError
    from srtm.model.profile import profile

    try:
        await cluster.request("GET", topic_at(options.topic))
    except ClientError as error:
        if error.facts.get("status") != 404:
            raise
        bucket = profile(options.workload.arrivals().times_ns, quantile=quantile).bucket
        await cluster.request("PUT", topic_at(options.topic), {"r": bucket.r, "b": bucket.b, **contract})


def _show(second: Progress) -> None:
    p99, late = ("-" if value is None else format_ns(value) for value in (second.p99_ns, second.late_ns))
    print(
        f"{second.second:4} s  sent {second.sent:8,}/s  received {second.received:8,}/s"
        f"  p99 {p99:>8}  own lateness p99 {late:>8}  waiting {second.waiting:,}",
        file=sys.stderr,
    )


def _table(report: LoadReport) -> Table:
    table = new_table("latency", "p50 ms", "p95 ms", "p99 ms")
    for name, found in (("total", report.total), ("own lateness", report.lateness)):
        times = (found.p50, found.p95, found.p99) if found else ()
        table.add_row(name, *(f"{value / NS_PER_MS:.3f}" for value in times))
    return table


def _say_bottleneck(report: LoadReport) -> None:
    assert report.total is not None
    assert report.lateness is not None
    late, total = report.lateness.p99, report.total.p99
    print(
        f"srtm: the load generator was the bottleneck: it wrote {format_ns(late)} (p99) after the scheduled time,"
        f" {late / total:.0%} of the p99 latency, so these figures say little about the cluster."
        " Send less, or from several processes, each with its own --prefix and --seed.",
        file=sys.stderr,
    )
