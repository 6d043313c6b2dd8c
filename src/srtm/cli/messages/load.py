"""`srtm load`: publishers that send by a schedule, and what their messages took."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from srtm.cli.cluster.topic import FitBy, Policy
from srtm.cli.common import STOPPED, AsJson, new_table, print_json, print_table
from srtm.cli.messages.pub import Brokers
from srtm.cli.remote import HERE, Controller, Engine, Token, topic_at
from srtm.units import NS_PER_MS, format_ns, parse_duration_ns

if TYPE_CHECKING:
    from rich.table import Table

    from srtm.client.cluster import Cluster
    from srtm.client.load import Load, LoadOptions, LoadReport, Second


def load(
    topic: Annotated[str, typer.Argument(help="The topic to publish to.", show_default=False)],
    publishers: Annotated[int, typer.Option(help="How many publishers send, each with a connection.")] = 1_000,
    rate: Annotated[float, typer.Option(help="Mean messages per second of each publisher.")] = 10.0,
    batch: Annotated[int, typer.Option(help="Messages that a publisher sends at once.")] = 10,
    process: Annotated[str, typer.Option(help="When publishers send: poisson or periodic.")] = "poisson",
    group_size: Annotated[int, typer.Option(help="Publishers that send together (1: nobody does).")] = 25,
    jitter: Annotated[str, typer.Option(help="Interval that the messages of a group are spread over.")] = "0ms",
    duration: Annotated[str, typer.Option(help="How long they send.")] = "60s",
    size: Annotated[int, typer.Option(help="Bytes of a message.")] = 64,
    seed: Annotated[int, typer.Option(help="The same seed makes the same schedule.")] = 1,
    prefix: Annotated[
        str, typer.Option(help="What publishers' names begin with: another for each load of several at once.")
    ] = "p",
    controller: Controller = HERE,
    broker: Brokers = None,
    token: Token = None,
    engine: Engine = None,
    channel: Annotated[
        str | None,
        typer.Option(
            help="The channel on which the load hears its own messages (one of its own); none: it goes by answers."
        ),
    ] = None,
    create: Annotated[
        bool,
        typer.Option("--create/--no-create", help="Create the topic if there is none, its (r, b) from the schedule."),
    ] = True,
    quantile: Annotated[
        str, typer.Option(help="Share of the schedule that must not wait for tokens, for a topic that is created.")
    ] = "0.995",
    slo_p99: Annotated[
        str, typer.Option(help="Latency goal of a topic that is created; ms unless it has a unit.")
    ] = "1ms",
    policy: Annotated[Policy, typer.Option(help="Policy of a topic that is created.")] = Policy.SRTM,
    fit: Annotated[FitBy, typer.Option(help="How a topic that is created is fitted.")] = FitBy.MODEL,
    as_json: AsJson = False,
) -> None:
    """Send by a schedule, whatever the cluster makes of it, and measure latency from the scheduled times.

    The schedule is that of `srtm trace synth`; Ctrl-C ends it early, with a report. Exit code 1 if an acknowledged
    message was lost, or one was refused or has no answer. Example:

        srtm load traffic --publishers 1000 --batch 10 --group-size 25 --duration 60

    or, without a controller, against any brokers or nsqds:

        srtm load traffic --broker 127.0.0.1:4150 --broker 127.0.0.1:4152
    """
    from srtm.client.load import LoadOptions, own_channel
    from srtm.program import run
    from srtm.workload.publishers import Population, Workload

    spread_ns = parse_duration_ns(jitter, bare="ms")
    population = Population(publishers, rate, batch, process, group_size, spread_ns, prefix)  # type: ignore[arg-type]
    workload = Workload((population,), parse_duration_ns(duration), seed)
    heard_on = None if channel == "none" else channel or own_channel()
    options = LoadOptions(topic, workload, size, heard_on, tuple(broker or ()), engine=engine)
    slo_ms = parse_duration_ns(slo_p99, bare="ms") / NS_PER_MS
    contract: dict[str, object] | None = (
        {"slo_ms": slo_ms, "policy": policy.value, "fit": fit.value} if create else None
    )
    report = run(_load(options, controller, token, quantile, contract))
    if report is None:
        raise typer.Exit(STOPPED)
    if as_json:
        print_json({**report.facts(), "seed": seed})
    else:
        print(
            f"{topic}: {report.publishers:,} publishers, {len(report.brokers)} brokers, {report.rate:,.0f} messages/s;"
            f" {report.received:,} of {report.sent:,} received, {report.lost:,} lost, {report.doubled:,} doubled;"
            f" {report.migrations:,} migrations, {report.reconnections:,} reconnections,"
            f" {report.throttles:,} throttles; {report.cpu_us:.1f} µs of CPU a message here"
        )
        print_table(_table(report))
    if report.bottleneck:
        _say_bottleneck(report)
    for count, what in ((report.refused, "refused"), (report.unanswered, "not answered")):
        if count:
            print(f"srtm: {count:,} messages were {what}: {report.problem or 'nobody said why'}", file=sys.stderr)
    if report.stopped:
        raise typer.Exit(STOPPED)
    if report.lost or report.refused or report.unanswered:
        raise typer.Exit(1)


async def _load(
    options: LoadOptions, controller: str, token: str | None, quantile: str, contract: dict[str, object] | None
) -> LoadReport | None:
    """The report; None if it was stopped before there was anything to report."""
    from srtm.client.cluster import Cluster
    from srtm.client.load import Load

    if options.brokers:
        return await _stoppable(Load(options, None))
    async with Cluster(controller, token=token) as cluster:
        if contract is not None:
            await _create(options, cluster, quantile, contract)
        return await _stoppable(Load(options, cluster))


async def _stoppable(load: Load) -> LoadReport | None:
    """Go, and at Ctrl-C or SIGTERM send no more."""
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
    """A topic that nobody knows gets the contract that the schedule needs."""
    from srtm.errors import ClientError
    from srtm.model.profile import profile

    try:
        await cluster.request("GET", topic_at(options.topic))
    except ClientError as error:
        if error.facts.get("status") != 404:
            raise
        bucket = profile(options.workload.arrivals().times_ns, quantile=quantile).bucket
        await cluster.request("PUT", topic_at(options.topic), {"r": bucket.r, "b": bucket.b, **contract})


def _show(second: Second) -> None:
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
        f"srtm: the load itself was the bottleneck: it wrote {format_ns(late)} (p99) after the scheduled time,"
        f" {late / total:.0%} of the p99 latency; these figures say little about the cluster."
        " Send less, or from several processes, each with a --prefix and a --seed of its own.",
        file=sys.stderr,
    )
