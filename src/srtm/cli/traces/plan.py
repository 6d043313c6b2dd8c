"""`srtm plan`: the predicted latency of every split of a topic."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from srtm.cli.common import (
    BROKERS,
    SLO_P99,
    TRACE,
    AsJson,
    Batch,
    BrokerModel,
    Calibration,
    Duration,
    Form,
    Format,
    GroupSize,
    Jitter,
    Lending,
    Master,
    Mcap,
    Options,
    Process,
    Publishers,
    Rate,
    Remote,
    Seed,
    Slo,
    many,
    new_table,
    plain,
    print_json,
    print_table,
    spark_for,
)
from srtm.cli.traces.brokers import fleet_from
from srtm.cli.traces.fleet import broker_facts, plan_fleet, points_ms
from srtm.errors import InputError
from srtm.model.broker_models import DEFAULT_BROKER_MODEL
from srtm.model.placement import POLICIES
from srtm.units import NS_PER_MS, parse_duration_ns

if TYPE_CHECKING:
    from srtm.pipeline.plan import Plan, Plans


def plan(
    trace: Annotated[
        str | None,
        typer.Argument(
            metavar="TRACE",
            help=f"{TRACE}; without it, a synthetic workload",
            show_default=False,
        ),
    ] = None,
    slo_p99: Slo = SLO_P99,
    policies: Annotated[str, typer.Option(metavar="NAMES", help="Policies to try, comma-separated")] = ",".join(
        POLICIES
    ),
    ks: Annotated[
        str | None,
        typer.Option("--k", metavar="NUMBERS", help="Numbers of brokers to try, as in 1,2,4", show_default="all"),
    ] = None,
    fit: Annotated[bool, typer.Option(help="Also let each policy search for its own fit")] = True,
    r: Annotated[
        str | None, typer.Option(metavar="RATE", help="Tokens per second", show_default="from srtm profile")
    ] = None,
    b: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="Bucket size", show_default="from srtm profile")
    ] = None,
    groups: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Correlation groups from srtm groups --out", show_default="as declared in the trace"
        ),
    ] = None,
    all_topics: Annotated[
        bool, typer.Option("--all", help="Plan all topics of the trace, on the same brokers together")
    ] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(metavar="CHANGE", help="With --all, also plan for a change, as in traffic=1.5; repeatable"),
    ] = None,
    topic: Annotated[str | None, typer.Option(metavar="TOPIC", help="Topic to plan, if the trace has several")] = None,
    lending: Lending = "off",
    round_trip: Annotated[
        str, typer.Option(metavar="DURATION", help="Round trip between brokers that lend; a bare number is in ms")
    ] = "0.5ms",
    seed: Seed = 1,
    compare: Annotated[bool, typer.Option("--compare", help="Print all plans, not only the chosen one")] = False,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw all plans into an HTML file, overwriting it")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the trace that the chosen plan would record")
    ] = None,
    form: Form = Format.TABLE,
    as_json: AsJson = False,
    brokers: Annotated[
        str,
        typer.Option(
            metavar="N|FILE", help="Number of brokers, or a JSON file that lists them", rich_help_panel=BROKERS
        ),
    ] = "6",
    model: BrokerModel = DEFAULT_BROKER_MODEL,
    calibration: Calibration = None,
    mcap_mps: Mcap = None,
    load: Annotated[
        float,
        typer.Option(
            metavar="RATE", help="Messages per second that each broker already carries", rich_help_panel=BROKERS
        ),
    ] = 0.0,
    load_batch: Annotated[
        int, typer.Option(metavar="N", help="Messages per read of that load", rich_help_panel=BROKERS)
    ] = 10,
    publishers: Publishers = 1_000,
    rate: Rate = 10.0,
    batch: Batch = 10,
    process: Process = "poisson",
    group_size: GroupSize = 1,
    jitter: Jitter = "0ms",
    duration: Duration = "60s",
    master: Master = None,
    remote: Remote = None,
    spark_conf: Options = None,
) -> None:
    """Predict latency under every policy on every number of brokers, and choose a plan.

    The chosen plan meets the SLO on the fewest brokers. The exit code is 1 if no plan meets it. Without a trace, the
    plan is for the synthetic workload that the options under Workload describe.

    --broker-model takes a name, or three costs in ns (per read, per message, constant), as in 9000,8000,150000.
    Further numbers are the cost per message in a serial stage, the number of cores, and the cost of waking an idle
    loop, before messages leave and after.
    paper-testbed is the broker of the paper.

    --all places every topic where its neighbours leave room, and prints how many brokers the fleet needs. What-ifs
    repeat that with other traffic (traffic=1.5), brokers (brokers=-1, +2 or 8), SLO (slo=2ms) or lending
    (lending=auto); commas join several changes. The exit code is 1 if a topic misses the SLO.

    Examples:
        srtm plan trace.parquet --brokers 6 --slo-p99 5ms --compare
        srtm plan --all traces/ --brokers 12 --what-if traffic=1.5 --what-if slo=2ms
        srtm plan --publishers 1000 --batch 10 --group-size 25 --brokers 8 --broker-model paper-testbed
    """
    from srtm.model.bucket import TokenBucket
    from srtm.model.latency import SLO
    from srtm.model.lending import known_term
    from srtm.pipeline import plan as job
    from srtm.pipeline.fleet import Scenario, Search
    from srtm.sim.simulate import Loans
    from srtm.workload.groups import read_groups
    from srtm.workload.publishers import Population, Workload

    if (r is None) != (b is None):
        raise InputError("--r and --b must be given together")
    if record and record.exists():
        raise InputError(f"--record: {record} exists; name a new folder")
    bucket = TokenBucket.of(r, b) if r is not None and b is not None else None
    slo = SLO(parse_duration_ns(slo_p99, bare="ms"))
    fleet = fleet_from(brokers, model, calibration, mcap_mps, load, load_batch)
    loans = Loans(term, parse_duration_ns(round_trip, bare="ms")) if (term := known_term(lending)) != "off" else None
    if all_topics:
        unused = {"--r": r, "--k": ks, "--groups": groups, "--topic": topic, "--figure": figure, "--record": record}
        plan_fleet(
            trace,
            [name for name, value in unused.items() if value is not None],
            Scenario("now", tuple(fleet), slo, loans),
            what_if or [],
            parse_duration_ns(round_trip, bare="ms"),
            Search([name.strip() for name in policies.split(",")], fit, seed),
            (master, remote, spark_conf),
            compare=compare,
            as_json=as_json or form is Format.JSON,
        )
        return
    if what_if:
        raise InputError("--what-if needs --all, which plans all topics of a trace")
    traffic: str | Workload
    if trace is None:
        population = Population(publishers, rate, batch, process, group_size, parse_duration_ns(jitter, bare="ms"))  # type: ignore[arg-type]
        traffic = Workload((population,), parse_duration_ns(duration), seed)
    else:
        traffic = trace
    with spark_for(trace, "planning", master, remote, spark_conf) as (spark, _):
        plans = job.plan(
            traffic,
            spark,
            fleet,
            bucket=bucket,
            slo=slo,
            policies=[name.strip() for name in policies.split(",")],
            ks=_numbers(ks) if ks else None,
            fit=fit,
            groups=read_groups(groups, topic) if groups else None,
            topic=topic,
            seed=seed,
            loans=loans,
        )
        if record:
            job.record(plans, traffic, fleet, record, spark, seed=seed)
    if figure:
        from srtm.pipeline import figures

        figures.write_page(figure, f"Plans for {plans.topic}", [figures.comparison(plans)])
    if as_json or form is Format.JSON:
        print_json(as_document(plans))
    else:
        _print(plans, compare=compare)
    if plans.chosen is None or not plans.chosen.meets_slo:
        raise typer.Exit(1)


def as_document(plans: Plans) -> dict[str, Any]:
    """The JSON document of all plans."""
    chosen = plans.chosen
    return {
        "topic": plans.topic,
        "r": plans.bucket.r,
        "b": plans.bucket.b,
        "slo_ms": plans.slo.limit_ns / NS_PER_MS,
        "lending": plans.loans.term if plans.loans else "off",
        "round_trip_ms": plans.loans.round_trip_ns / NS_PER_MS if plans.loans else None,
        "plans": [_facts(each) for each in plans.plans],
        "chosen": _facts(chosen) if chosen else None,
    }


def _facts(plan: Plan) -> dict[str, Any]:
    latency = plan.latency
    return {
        "policy": plan.policy,
        "k": plan.k,
        "fitted": plan.fitted,
        "brokers": [broker_facts(each) for each in plan.brokers],
        "access_ms": points_ms(latency.access) if latency else None,
        "processing_ms": points_ms(latency.processing) if latency else None,
        "total_ms": points_ms(latency.total) if latency else None,
        "meets_slo": plan.meets_slo,
        "lending": {"rule": plan.rule, "asks_per_message": plan.asks},
        "error": plan.error,
    }


def _print(plans: Plans, *, compare: bool) -> None:
    console = Console(soft_wrap=True, markup=False, highlight=False)
    limit = plans.slo.limit_ns / NS_PER_MS
    console.print(f"{plain(plans.topic)}: r = {plans.bucket.r:,g}/s, b = {plans.bucket.b:,g}; SLO p99 ≤ {limit:g} ms")
    if compare:
        heads = ["policy", "k", "access", "processing", "total", "worst broker", "SLO"]
        heads += ["rule", "asks/msg"] if plans.loans else []
        caption = (
            "p99 in ms, of all messages and at the worst broker, which must also meet the SLO; ★ fitted by the policy"
        )
        table = new_table(*heads, caption=caption)
        for each in sorted(plans.plans, key=lambda each: (each.policy, each.fitted, each.k)):
            name, k = each.policy + (" ★" if each.fitted else ""), str(each.k or "—")
            if each.latency is None:
                table.add_row(name, k, "—", "—", "—", "—", "does not fit")
                continue
            tails = (each.latency.access, each.latency.processing, each.latency.total)
            verdict = "met" if each.meets_slo else "missed"
            parts = [*(part.p99 for part in tails), max(broker.total.p99 for broker in each.brokers)]
            lent = (each.rule, f"{each.asks:.2g}") if plans.loans else ()
            table.add_row(name, k, *(f"{p99 / NS_PER_MS:.3f}" for p99 in parts), verdict, *lent)
        print_table(table)
    chosen = plans.chosen
    if chosen is None:
        reasons = {each.error for each in plans.plans if each.error}
        console.print(f"no plan is possible: {'; '.join(sorted(reasons))}")
        return
    assert chosen.latency is not None
    how = "fitted" if chosen.fitted else "split by rates"
    tail = f"p99 {chosen.latency.total.p99 / NS_PER_MS:.3f} ms"
    if chosen.meets_slo:
        console.print(f"chosen: {chosen.policy} on {many(chosen.k, 'broker')}, {how}: {tail}")
    else:
        console.print(f"no plan meets the SLO; closest: {chosen.policy} on {many(chosen.k, 'broker')}, {how}: {tail}")
    table = new_table("broker", "publishers", "r (tokens/s)", "b (tokens)", "p99 (ms)")
    for broker in chosen.brokers:
        sizes = (f"{broker.bucket.r:,.6g}", f"{broker.bucket.b:,.6g}", f"{broker.total.p99 / NS_PER_MS:.3f}")
        table.add_row(broker.broker, f"{broker.publishers:,}", *sizes)
    print_table(table)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--k must be whole numbers separated by commas, as in 1,2,4, not {text!r}") from None
