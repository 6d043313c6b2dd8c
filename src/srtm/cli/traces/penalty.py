"""`srtm penalty`: what splitting the token bucket cost a recorded run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from srtm.cli.common import (
    AsJson,
    B,
    Contract,
    Form,
    Format,
    Master,
    Options,
    R,
    Remote,
    Trace,
    contracts_from,
    new_table,
    plain,
    print_json,
    print_table,
    report_errors,
    spark_for,
)
from srtm.units import PICO_PER_TOKEN, format_instant, format_ns, parse_duration_ns
from srtm.workload.trace import moved_in
from srtm.workload.uris import only_spark_opens

if TYPE_CHECKING:
    from rich.table import Table

    from srtm.pipeline.penalty import Cost, TopicPenalty, Waits
    from srtm.workload.trace import Moved


def penalty(
    trace: Trace,
    r: R = None,
    b: B = None,
    contract: Contract = None,
    window: Annotated[str, typer.Option(metavar="DURATION", help="Length of the reporting windows")] = "1m",
    worst: Annotated[int, typer.Option(min=0, metavar="N", help="Number of the costliest windows to list")] = 5,
    master: Master = None,
    remote: Remote = None,
    spark_conf: Options = None,
    form: Form = Format.TABLE,
    as_json: AsJson = False,
) -> None:
    """Measure what splitting the token bucket cost a recorded run: the DRL penalty.

    The penalty is how much longer messages waited for tokens than they would have with one bucket.
    If brokers lent each other tokens, it is what lending left of the penalty.
    The trace must have the columns broker and release_ns.

    Example:
        srtm penalty run/ --r 11000 --b 6001 --window 10s
    """
    from srtm.pipeline.penalty import penalty as run

    contracts = contracts_from(r, b, contract)
    with spark_for(trace, "adding up", master, remote, spark_conf) as (spark, _):
        lines = list(run(trace, contracts, spark, window_ns=parse_duration_ns(window)))
    moved = {} if only_spark_opens(trace) else moved_in(trace)
    if as_json or form is Format.JSON:
        print_json({"topics": [facts(line, moved.get(line.topic)) for line in lines]})
    else:
        for line in lines:
            if line.whole:
                print_table(_table(line, worst))
                _print_moved(line.topic, moved.get(line.topic, {}))
    report_errors([(line.topic, line.error) for line in lines])


def facts(line: TopicPenalty, moved: dict[str, Moved] | None = None) -> dict[str, object]:
    """A topic's part of the JSON document, with what its brokers lent, if they did."""
    if line.whole is None:
        return {"topic": line.topic, "messages": line.messages, "error": line.error}
    return {
        "topic": line.topic,
        "messages": line.messages,
        **_cost(line.whole),
        "brokers": [
            {"broker": name, **_cost(cost), "lending": _lending((moved or {}).get(name))}
            for name, cost in line.brokers.items()
        ],
        "windows": [
            {
                "begin_ns": window.begin_ns,
                **_cost(window.whole),
                "brokers": [{"broker": name, **_cost(cost)} for name, cost in window.brokers.items()],
            }
            for window in line.windows
        ],
        "error": None,
    }


def _lending(moved: Moved | None) -> dict[str, float] | None:
    """What a broker lent and borrowed, in tokens."""
    if moved is None:
        return None
    return {"lent": moved.lent_ptok / PICO_PER_TOKEN, "borrowed": moved.borrowed_ptok / PICO_PER_TOKEN}


def _print_moved(topic: str, moved: dict[str, Moved]) -> None:
    for broker, (lent, borrowed) in sorted(moved.items()):
        amounts = f"lent {lent / PICO_PER_TOKEN:,.0f} tokens and borrowed {borrowed / PICO_PER_TOKEN:,.0f}"
        print(f"{plain(topic)}: {plain(broker)} {amounts}; the waits above include them")


def _cost(cost: Cost) -> dict[str, object]:
    return {"waited": _waits(cost.split), "one_bucket": _waits(cost.one), "penalty_ns": cost.penalty_ns}


def _waits(waits: Waits) -> dict[str, int]:
    return {
        "messages": waits.messages,
        "waiting": waits.waiting,
        "total_ns": waits.total_ns,
        "p50_ns": waits.p50,
        "p95_ns": waits.p95,
        "p99_ns": waits.p99,
        "max_ns": waits.longest_ns,
    }


def _table(line: TopicPenalty, worst: int) -> Table:
    assert line.whole is not None
    heads = ("", "messages", "waited", "mean", "p99", "longest", "one: mean", "one: p99", "penalty")
    table = new_table(*heads, title=f"{line.topic}: time that messages waited for tokens, split and with one bucket")
    table.add_row("all", *_cells(line.whole), end_section=True)
    for number, (broker, cost) in enumerate(line.brokers.items()):
        table.add_row(broker, *_cells(cost), end_section=number == len(line.brokers) - 1)
    for window in line.worst(worst):
        table.add_row(format_instant(window.begin_ns), *_cells(window.whole))
    table.caption = "penalty: mean cost of the split per message"
    if worst:
        table.caption += f"; last rows: the costliest {min(worst, len(line.windows))} of {len(line.windows)} windows"
    return table


def _cells(cost: Cost) -> list[str]:
    was, one = cost.split, cost.one
    return [
        f"{was.messages:,}",
        f"{was.waiting / was.messages:.2%}",
        format_ns(was.total_ns / was.messages),
        format_ns(was.p99),
        format_ns(was.longest_ns),
        format_ns(one.total_ns / one.messages),
        format_ns(one.p99),
        format_ns(cost.penalty_ns / was.messages),
    ]
