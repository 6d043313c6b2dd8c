"""`srtm profile --store`: profiles over time, from a store of hours."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from srtm.cli.common import many, new_table, print_json, print_table, spark_for
from srtm.errors import InputError
from srtm.units import format_instant, parse_duration_ns, parse_instant_ns

if TYPE_CHECKING:
    from rich.table import Table

    from srtm.pipeline.history import GroupDrift, Period
    from srtm.pipeline.stored import Store
    from srtm.pipeline.traces.topics import Faults


def add(
    store: str, trace: str, master: str | None, remote: str | None, options: list[str] | None, *, groups: bool
) -> tuple[list[int], Faults]:
    """Put the hours of a trace into a store; returns these hours, and the topics that cannot be summed up."""
    from srtm.pipeline import history
    from srtm.pipeline.stored import Store

    with spark_for(trace, "summing up", master, remote, options) as (spark, _):
        return history.add(Store(store), trace, spark, with_groups=groups)


class Chosen(NamedTuple):
    """Which hours of a store are shown, and in which periods; without any choice, the hours that were just added."""

    since: str | None
    until: str | None
    every: str | None
    added: list[int] | None

    def folded(self, store: Store, headroom: str, quantile: str) -> list[Period]:
        """The topics of the store in these periods."""
        from srtm.pipeline.history import fold

        begin_ns, end_ns = (None if text is None else parse_instant_ns(text) for text in (self.since, self.until))
        if begin_ns is not None and end_ns is not None and begin_ns >= end_ns:
            raise InputError(f"--from {self.since} is not before --to {self.until}")
        if self.added and begin_ns is end_ns is None:
            begin_ns, end_ns = self.added[0], self.added[-1] + 1
        every_ns = None if self.every is None else parse_duration_ns(self.every)
        return fold(store, begin_ns=begin_ns, end_ns=end_ns, every_ns=every_ns, headroom=headroom, quantile=quantile)


def show(name: str, chosen: Chosen, *, headroom: str, quantile: str, as_json: bool) -> None:
    """Print the topics of a store over time."""
    from srtm.pipeline.history import group_drift
    from srtm.pipeline.stored import Store

    store, added = Store(name), chosen.added
    lines = chosen.folded(store, headroom, quantile)
    drifts = group_drift(store, lines)
    if as_json:
        rows = zip(_with_before(lines), drifts, strict=True)
        print_json({"added_hours": added, "periods": [facts(line, before, drift) for (before, line), drift in rows]})
        return
    if added is not None:
        print(f"{store.name}: added {many(len(added), 'hour')}; it now holds {len(store.hours()):,}")
    print_table(_table(lines, drifts))


def _with_before(lines: list[Period]) -> list[tuple[Period | None, Period]]:
    """Each period with the one before it of the same topic."""
    befores = [before if before.topic == line.topic else None for before, line in pairwise(lines)]
    return list(zip([None, *befores], lines, strict=True)) if lines else []


def facts(line: Period, before: Period | None, drift: GroupDrift | None) -> dict[str, object]:
    """A period's part of the JSON document."""
    return {
        "topic": line.topic,
        "begin_ns": line.begin_ns,
        "end_ns": line.end_ns,
        "observed_ns": line.observed_ns,
        "messages": line.messages,
        "publishers": line.publishers,
        "rate": line.rate_mps,
        "rate_change": line.rate_mps / before.rate_mps - 1 if before else None,
        "r": line.bucket.r,
        "b": line.bucket.b,
        "b_at_least": line.b_at_least,
        "envelope": [{"window_ns": ns, "messages": messages} for ns, messages in line.envelope.items()],
        "batches": [{"size": size, "count": count} for size, count in line.batches.items()],
        "groups": drift._asdict() if drift else None,
    }


def _table(lines: list[Period], drifts: list[GroupDrift | None]) -> Table:
    caption = (
        "rate: msg/s, mean of the time that traces cover; change: of the rate, since the period before; r: tokens/s;"
        " b ≥: no smaller b is enough"
    )
    heads = ["topic", "from", "to", "messages", "publishers", "rate", "change", "r", "b", "b ≥"]
    if any(drifts):
        heads += ["groups", "same", "moved"]
        caption += "; same: agreement of groups with those before, 1 if equal"
    table = new_table(*heads, caption=caption)
    for (before, line), drift in zip(_with_before(lines), drifts, strict=True):
        table.add_row(
            line.topic,
            format_instant(line.begin_ns),
            format_instant(line.end_ns),
            f"{line.messages:,}",
            f"{line.publishers:,}",
            f"{line.rate_mps:,.4g}",
            f"{line.rate_mps / before.rate_mps - 1:+.0%}" if before else "—",
            f"{line.bucket.r:,g}",
            f"{line.bucket.b:,g}",
            f"{line.b_at_least:,}",
            *_group_cells(drift, shown=any(drifts)),
        )
    return table


def _group_cells(drift: GroupDrift | None, *, shown: bool) -> list[str]:
    if not shown:
        return []
    if drift is None:
        return ["—"] * 3
    if drift.agreement is None:
        return [f"{drift.groups:,}", "—", "—"]
    return [f"{drift.groups:,}", f"{drift.agreement:.2f}", f"{drift.moved:,}"]
