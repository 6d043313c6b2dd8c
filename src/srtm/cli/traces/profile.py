"""`srtm profile`: the token bucket that each topic of a trace needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from srtm.cli.common import (
    TRACE,
    AsJson,
    Form,
    Format,
    Master,
    Options,
    Remote,
    new_table,
    print_json,
    print_table,
    report_errors,
    spark_for,
)
from srtm.cli.traces import history
from srtm.errors import InputError, TraceError
from srtm.model import defaults
from srtm.units import NS_PER_MS, NS_PER_S, format_ns

if TYPE_CHECKING:
    from rich.table import Table

    from srtm.pipeline.profile import TopicProfile

_SCALES_NS = (NS_PER_MS, 10 * NS_PER_MS, 100 * NS_PER_MS, NS_PER_S, 10 * NS_PER_S)
_DRAWN = 20  # figures on a page
OVER = "Over time"  # heading of --help


def profile(
    trace: Annotated[
        str | None, typer.Argument(metavar="TRACE", help=f"{TRACE}; optional with --store", show_default=False)
    ] = None,
    headroom: Annotated[str, typer.Option(metavar="FACTOR", help="Ratio of r to the mean rate")] = defaults.HEADROOM,
    quantile: Annotated[
        str, typer.Option(metavar="FRACTION", help="Fraction of messages that must not wait for tokens")
    ] = defaults.QUANTILE,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw envelopes with (r, b) into an HTML file, overwriting it")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Store of profiles by hour: a path or a URI; TRACE is added to it",
            rich_help_panel=OVER,
        ),
    ] = None,
    groups: Annotated[
        bool,
        typer.Option("--groups", help="Also keep the correlation groups of each hour of TRACE", rich_help_panel=OVER),
    ] = False,
    since: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="First hour, as in 2026-11-18T03", rich_help_panel=OVER)
    ] = None,
    until: Annotated[
        str | None, typer.Option("--to", metavar="TIME", help="End of the last hour", rich_help_panel=OVER)
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Length of a period: whole hours, as in 24h", rich_help_panel=OVER),
    ] = None,
    master: Master = None,
    remote: Remote = None,
    spark_conf: Options = None,
    form: Form = Format.TABLE,
    as_json: AsJson = False,
) -> None:
    """Report each topic's traffic in a trace and the token bucket (r, b) it needs.

    r is the mean rate times --headroom; b is the smallest bucket for which a fraction of --quantile of the messages
    does not wait. The paper uses 0.99, which leaves a p99 SLO no room for processing.

    With --store, hours of traces are kept as small summaries, and profiles of days or months are computed from them.
    Adding the same hours again changes nothing, and hours may be added in any order.

    Example:
        srtm profile trace.parquet --quantile 0.999
        srtm profile monday/ --store profiles/
        srtm profile --store profiles/ --from 2026-11-01 --to 2026-12-01 --every 24h
    """
    printing_json = as_json or form is Format.JSON
    if store is not None:
        if figure is not None:
            raise InputError("--figure draws the profile of a trace; leave out --store, or --figure")
        added, faults = (
            (None, {}) if trace is None else history.add(store, trace, master, remote, spark_conf, groups=groups)
        )
        chosen = history.Chosen(since, until, every, added)
        if added != []:
            history.show(store, chosen, headroom=headroom, quantile=quantile, as_json=printing_json)
        report_errors([(topic, error) for topic, (_, error) in faults.items()])
        return
    if trace is None:
        raise InputError("no trace: give TRACE, or a store of profiles with --store")
    if since or until or every or groups:
        raise InputError("--from, --to, --every and --groups are for a store; name it with --store")
    from srtm.pipeline.profile import profile as run

    with spark_for(trace, "profiling", master, remote, spark_conf) as (spark, _):
        lines = list(run(trace, spark, headroom=headroom, quantile=quantile))
    if printing_json:
        print_json({"topics": [facts(line) for line in lines]})
    else:
        print_table(_table(lines))
    if figure:
        _draw(figure, lines)
    report_errors([(line.topic, line.error) for line in lines])


def _draw(path: Path, lines: list[TopicProfile]) -> None:
    from srtm.pipeline import figures

    known = sorted((line for line in lines if line.bucket), key=lambda line: -line.messages)
    if not known:
        raise TraceError(f"--figure: no topic to draw in {path}")
    title = "Envelopes" if len(known) <= _DRAWN else f"Envelopes of the {_DRAWN} largest of {len(known)} topics"
    figures.write_page(path, title, [figures.envelope(line) for line in known[:_DRAWN]])


def facts(line: TopicProfile) -> dict[str, object]:
    """A topic's part of the JSON document."""
    found = {
        "topic": line.topic,
        "messages": line.messages,
        "publishers": line.publishers,
        "rate": line.rate_mps,
        "r": line.bucket.r if line.bucket else None,
        "b": line.bucket.b if line.bucket else None,
        "error": line.error,
    }
    if line.error:
        return found
    batches = {name: line.batch_size(quantile) for name, quantile in (("p50", "0.5"), ("p99", "0.99"), ("max", "1"))}
    count = sum(line.batches.values())
    return found | {
        "first_ns": line.first_ns,
        "last_ns": line.last_ns,
        "batch": {"mean": line.messages / count, **batches},
        "peak_rates": {format_ns(ns).replace(" ", ""): line.peak_mps(ns) for ns in _SCALES_NS},
        "envelope": [{"window_ns": ns, "messages": messages} for ns, messages in line.envelope.items()],
    }


def _rate(mps: float) -> str:
    return f"{mps:,.0f}" if mps >= 100 else f"{mps:,.3g}"


def _table(lines: list[TopicProfile]) -> Table:
    peaks = [f"peak {format_ns(ns)}" for ns in _SCALES_NS[::2]]
    caption = "rate, peak: msg/s, mean and in the fullest window; batch: p99 of messages sent at once; r: tokens/s"
    table = new_table("topic", "messages", "publishers", "rate", *peaks, "batch", "r", "b", caption=caption)
    for line in lines:
        if line.bucket is None:
            table.add_row(line.topic, f"{line.messages:,}", *["—"] * 7)
            continue
        peak_rates = [_rate(line.peak_mps(ns)) for ns in _SCALES_NS[::2]]
        batch = f"{line.batch_size('0.99'):,}"
        sizes = (f"{line.bucket.r:,g}", f"{line.bucket.b:,g}")
        sent = (f"{line.messages:,}", f"{line.publishers:,}", f"{line.rate_mps:,.6g}")
        table.add_row(line.topic, *sent, *peak_rates, batch, *sizes)
    return table
