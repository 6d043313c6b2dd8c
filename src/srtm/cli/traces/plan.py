"""`srtm plan`: what every split of a topic would cost."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from srtm.cli.common import (
    AsJson,
    Form,
    Format,
    Master,
    Options,
    Remote,
    new_table,
    plain,
    print_json,
    print_table,
    spark_for,
)
from srtm.errors import InputError
from srtm.units import NS_PER_MS, parse_duration_ns

if TYPE_CHECKING:
    from srtm.model.latency import Distribution
    from srtm.pipeline.plan import Plan, Plans
    from srtm.sim.simulate import SimulatedBroker

_WORKLOAD = "Workload, where there is no trace"
_BROKERS = "Brokers"


def plan(
    trace: Annotated[
        Path | None, typer.Argument(help="A trace: a Parquet file, or a folder of them.", show_default=False)
    ] = None,
    brokers: Annotated[
        str,
        typer.Option(help="How many brokers there are, or a JSON file that describes each.", rich_help_panel=_BROKERS),
    ] = "6",
    mcap: Annotated[
        float | None, typer.Option(help="msg/s that a broker can carry (its model's).", rich_help_panel=_BROKERS)
    ] = None,
    load: Annotated[float, typer.Option(help="msg/s that it carries already.", rich_help_panel=_BROKERS)] = 0.0,
    load_batch: Annotated[int, typer.Option(help="Messages per read of that load.", rich_help_panel=_BROKERS)] = 10,
    service: Annotated[
        str,
        typer.Option(
            help="A preset, or ns per read, per message and in any case, as in 9000,8000,150000.",
            rich_help_panel=_BROKERS,
        ),
    ] = "paper-testbed",
    slo_p99: Annotated[
        str, typer.Option("--slo-p99", help="99 % of the messages within this time; ms unless it has a unit.")
    ] = "1ms",
    policies: Annotated[str, typer.Option(help="Which policies, with commas between.")] = "lb,conc,max_min,srtm",
    ks: Annotated[str | None, typer.Option("--k", help="How many brokers to try, as in 1,2,4 (all).")] = None,
    fit: Annotated[bool, typer.Option(help="Also let each policy search for its own fit.")] = True,
    r: Annotated[str | None, typer.Option(help="Tokens a second (as srtm profile says).")] = None,
    b: Annotated[str | None, typer.Option(help="Tokens of a full bucket (as srtm profile says).")] = None,
    groups: Annotated[
        Path | None, typer.Option(help="Who bursts together, as srtm groups --out wrote it (as the trace declares).")
    ] = None,
    topic: Annotated[str | None, typer.Option(help="Which topic of the trace, if it has several.")] = None,
    publishers: Annotated[int, typer.Option(help="How many send.", rich_help_panel=_WORKLOAD)] = 1_000,
    rate: Annotated[float, typer.Option(help="msg/s of each.", rich_help_panel=_WORKLOAD)] = 10.0,
    batch: Annotated[int, typer.Option(help="Messages at once.", rich_help_panel=_WORKLOAD)] = 10,
    process: Annotated[str, typer.Option(help="poisson or periodic.", rich_help_panel=_WORKLOAD)] = "poisson",
    group_size: Annotated[int, typer.Option(help="Publishers that send together.", rich_help_panel=_WORKLOAD)] = 1,
    jitter: Annotated[str, typer.Option(help="Spread of a group's messages.", rich_help_panel=_WORKLOAD)] = "0ms",
    duration: Annotated[str, typer.Option(help="How long they send.", rich_help_panel=_WORKLOAD)] = "60s",
    seed: Annotated[int, typer.Option(help="The same seed makes the same plans.")] = 1,
    compare: Annotated[bool, typer.Option("--compare", help="Print every plan, not only the one to take.")] = False,
    figure: Annotated[Path | None, typer.Option(help="Draw all plans into this HTML file, over what is there.")] = None,
    record: Annotated[
        Path | None, typer.Option(help="Write the trace that the chosen plan's run would record into this folder.")
    ] = None,
    master: Master = None,
    remote: Remote = None,
    spark_conf: Options = None,
    form: Form = Format.TABLE,
    as_json: AsJson = False,
) -> None:
    """Predict what messages would see under every policy on every number of brokers, and say which plan to take.

    That is the one that meets the SLO on the fewest brokers. Exit code 1 if none does. Examples:

        srtm plan trace.parquet --brokers 6 --slo-p99 1ms --compare

        srtm plan --publishers 1000 --batch 10 --group-size 25 --brokers 8
    """
    from srtm.model.bucket import TokenBucket
    from srtm.model.latency import SLO
    from srtm.pipeline import plan as job
    from srtm.workload.groups import read_groups
    from srtm.workload.publishers import Population, Workload

    if (r is None) != (b is None):
        raise InputError("give both --r and --b, or neither")
    if record and record.exists():
        raise InputError(f"--record {record} exists already: name a folder that does not")
    bucket = TokenBucket.of(r, b) if r is not None and b is not None else None
    slo = SLO(parse_duration_ns(slo_p99, bare="ms"))
    fleet = fleet_from(brokers, mcap, load, load_batch, service)
    traffic: Path | Workload
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
        )
    if record:
        job.record(plans, traffic, fleet, record, seed=seed)
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
    """The JSON document of plans."""
    chosen = plans.chosen
    return {
        "topic": plans.topic,
        "r": plans.bucket.r,
        "b": plans.bucket.b,
        "slo_ms": plans.slo.limit_ns / NS_PER_MS,
        "plans": [_facts(each) for each in plans.plans],
        "chosen": _facts(chosen) if chosen else None,
    }


def _facts(plan: Plan) -> dict[str, Any]:
    latency = plan.latency
    return {
        "policy": plan.policy,
        "k": plan.k,
        "fitted": plan.fitted,
        "brokers": [
            {"broker": b.broker, "publishers": b.publishers, "r": b.bucket.r, "b": b.bucket.b, "total_ms": _ms(b.total)}
            for b in plan.brokers
        ],
        "access_ms": _ms(latency.access) if latency else None,
        "processing_ms": _ms(latency.processing) if latency else None,
        "total_ms": _ms(latency.total) if latency else None,
        "meets_slo": plan.meets_slo,
        "error": plan.error,
    }


def _ms(found: Distribution) -> dict[str, float]:
    return {"p50": found.p50 / NS_PER_MS, "p95": found.p95 / NS_PER_MS, "p99": found.p99 / NS_PER_MS}


def _print(plans: Plans, *, compare: bool) -> None:
    console = Console(soft_wrap=True, markup=False, highlight=False)
    limit = plans.slo.limit_ns / NS_PER_MS
    console.print(f"{plain(plans.topic)}: r = {plans.bucket.r:,g}/s, b = {plans.bucket.b:,g}; SLO p99 ≤ {limit:g} ms")
    if compare:
        heads = ("policy", "k", "access", "processing", "total", "at worst", "SLO")
        caption = "p99 in ms, of all messages and at the worst broker, where the SLO must hold too; ★ fitted by itself"
        table = new_table(*heads, caption=caption)
        for each in sorted(plans.plans, key=lambda each: (each.policy, each.fitted, each.k)):
            name, k = each.policy + (" ★" if each.fitted else ""), str(each.k or "—")
            if each.latency is None:
                table.add_row(name, k, "—", "—", "—", "—", "does not fit")
                continue
            tails = (each.latency.access, each.latency.processing, each.latency.total)
            verdict = "met" if each.meets_slo else "missed"
            parts = [*(part.p99 for part in tails), max(broker.total.p99 for broker in each.brokers)]
            table.add_row(name, k, *(f"{p99 / NS_PER_MS:.3f}" for p99 in parts), verdict)
        print_table(table)
    chosen = plans.chosen
    if chosen is None:
        reasons = {each.error for each in plans.plans if each.error}
        console.print(f"no plan can be made: {'; '.join(sorted(reasons))}")
        return
    assert chosen.latency is not None
    how = "fitted" if chosen.fitted else "split by rates"
    tail = f"p99 {chosen.latency.total.p99 / NS_PER_MS:.3f} ms"
    if chosen.meets_slo:
        console.print(f"take {chosen.policy} on {chosen.k} broker{'s' * (chosen.k > 1)}, {how}: {tail}")
    else:
        console.print(f"no plan meets the SLO; {chosen.policy} on {chosen.k}, {how}, comes closest: {tail}")
    table = new_table("broker", "publishers", "r (tokens/s)", "b (tokens)", "p99 (ms)")
    for broker in chosen.brokers:
        sizes = (f"{broker.bucket.r:,.6g}", f"{broker.bucket.b:,.6g}", f"{broker.total.p99 / NS_PER_MS:.3f}")
        table.add_row(broker.broker, f"{broker.publishers:,}", *sizes)
    print_table(table)


def fleet_from(
    brokers: str, mcap: float | None = None, load: float = 0.0, load_batch: int = 10, service: str = "paper-testbed"
) -> list[SimulatedBroker]:
    """Brokers all alike, or as a file describes them."""
    from srtm.model.service import PAPER_MCAP_MPS, PRESETS, Background, ServiceModel
    from srtm.sim.simulate import SimulatedBroker

    if not brokers.isdigit():
        return _described(Path(brokers))
    if service in PRESETS:
        model = PRESETS[service]
    else:
        costs = service.split(",")
        if len(costs) != 3 or not all(cost.strip().isdigit() for cost in costs):
            raise InputError(
                f"--service {service!r}: give {', '.join(PRESETS)} or three costs in ns, as in 9000,8000,150000"
            )
        model = ServiceModel(*(int(cost) for cost in costs))
    if mcap is not None and not 0 < mcap < math.inf:
        raise InputError(f"--mcap {mcap:g}: it must be a positive rate")
    most = mcap if mcap is not None else PAPER_MCAP_MPS
    if load > most:
        raise InputError(f"--load {load:g}: it is more than the {most:g} msg/s that a broker can carry")
    if not 1 <= int(brokers) <= 10_000:
        raise InputError(f"--brokers {brokers}: there must be between 1 and 10,000")
    background = Background(load, load_batch) if load else None
    return [SimulatedBroker(f"broker-{n + 1}", most, model, background) for n in range(int(brokers))]


def _described(path: Path) -> list[SimulatedBroker]:
    """Brokers from a file: [{"broker", "mcap", "load", "load_batch", "read_ns", "message_ns", "base_ns"}, …]."""
    from srtm.model.service import PAPER_MCAP_MPS, PRESETS, Background, ServiceModel
    from srtm.sim.simulate import SimulatedBroker

    try:
        listed = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"--brokers {path}: give a number, or a JSON file of brokers ({error.strerror})") from None
    except ValueError as error:
        raise InputError(f"--brokers {path} is not JSON: {error}") from None
    if not isinstance(listed, list) or not all(isinstance(entry, dict) and "broker" in entry for entry in listed):
        raise InputError(f'--brokers {path}: it must hold a list of brokers, [{{"broker": name, "mcap": msg/s, …}}]')
    usual = PRESETS["paper-testbed"]
    known = {"broker", "mcap", "load", "load_batch", "read_ns", "message_ns", "base_ns"}
    fleet = []
    for entry in listed:
        if unknown := sorted(entry.keys() - known):
            raise InputError(f"--brokers {path}: {unknown[0]!r} is unknown; a broker has {', '.join(sorted(known))}")
        where = f"--brokers {path}, {entry['broker']!r}"
        wrong = [name for name, value in entry.items() if name != "broker" and not _is_amount(value)]
        if wrong:
            raise InputError(f"{where}: {wrong[0]} must be a number of at least 0, not {entry[wrong[0]]!r}")
        mcap, load = entry.get("mcap", PAPER_MCAP_MPS), entry.get("load", 0)
        if load > mcap:
            raise InputError(f"{where}: its load of {load:g} msg/s is more than its mcap of {mcap:g}")
        try:
            costs = ServiceModel(
                entry.get("read_ns", usual.read_ns),
                entry.get("message_ns", usual.message_ns),
                entry.get("base_ns", usual.base_ns),
            )
            background = Background(load, entry.get("load_batch", 10))
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        fleet.append(SimulatedBroker(str(entry["broker"]), mcap, costs, background if load else None))
    names = [broker.name for broker in fleet]
    if not fleet or len(set(names)) < len(names):
        raise InputError(f"--brokers {path}: there must be brokers, of different names, not {names}")
    return fleet


def _is_amount(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf  # type: ignore[operator]


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--k {text!r}: give whole numbers with commas between, as in 1,2,4") from None
