"""Report: the results of all jobs on a trace, on one self-contained HTML page.

A trace of arrivals gives profile and groups; a recorded run, with its contract, also penalty and conformance; a
description of brokers adds plans. The page says what it leaves out, and what that would need.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from srtm.model.timeline import Timeline
from srtm.pipeline import figures
from srtm.pipeline.conformance import conformance
from srtm.pipeline.groups import groups
from srtm.pipeline.penalty import WINDOW_NS, penalty
from srtm.pipeline.plan import plan
from srtm.pipeline.profile import profile
from srtm.pipeline.traces.reading import columns_of
from srtm.units import NS_PER_MS, NS_PER_S, format_instant, format_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pyspark.sql import SparkSession

    from srtm.model.latency import SLO
    from srtm.pipeline.conformance import TopicConformance
    from srtm.pipeline.groups import TopicGroups
    from srtm.pipeline.penalty import Cost, TopicPenalty
    from srtm.pipeline.plan import Plans
    from srtm.pipeline.profile import TopicProfile
    from srtm.sim.simulate import SimulatedBroker

Line = TypeVar("Line", "TopicProfile", "TopicPenalty")

_LISTED = 50  # rows of a table
_DRAWN = 6  # figures of a kind


@dataclass(frozen=True, slots=True)
class Findings:
    """The contents of a report; None for what was not asked for or cannot be known."""

    source: str
    profiles: list[TopicProfile]
    groups: list[TopicGroups]
    penalties: list[TopicPenalty] | None
    verdicts: list[TopicConformance] | None
    plans: list[Plans]

    def errors(self) -> list[tuple[str, str | None]]:
        """The topics that a job could not judge, and its error."""
        found: dict[tuple[str, str | None], None] = {}
        for lines in (self.profiles, self.groups, self.penalties or [], self.verdicts or []):
            found |= {(line.topic, line.error): None for line in lines if line.error}
        return list(found)


def findings(
    trace: str | Path,
    spark: SparkSession,
    *,
    contracts: Mapping[str, Timeline] | Timeline | None = None,
    window_ns: int = WINDOW_NS,
    brokers: Sequence[SimulatedBroker] = (),
    slo: SLO | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Findings:
    """Run all jobs that the trace allows. Without contracts, a recorded run is compared with its own profile."""
    say("profiling")
    profiles = list(profile(trace, spark))
    say("looking for groups")
    found = groups(trace, spark)
    penalties = verdicts = None
    if {"broker", "release_ns"} <= columns_of(trace, spark):
        held = contracts or {line.topic: Timeline(line.bucket) for line in profiles if line.bucket}
        say("adding up waiting times")
        penalties = list(penalty(trace, held, spark, window_ns=window_ns))
        say("checking conformance")
        verdicts = conformance(trace, held, spark)
    plans = []
    largest = sorted((line for line in profiles if line.bucket), key=lambda line: -line.messages)[:_DRAWN]
    for line in largest if brokers else ():
        say(f"planning {line.topic}")
        contract = contracts.get(line.topic) if isinstance(contracts, dict) else contracts
        bucket = contract.start if isinstance(contract, Timeline) else line.bucket
        plans.append(plan(trace, spark, brokers, bucket=bucket, slo=slo, topic=line.topic, fit=False))
    return Findings(str(trace), profiles, found, penalties, verdicts, plans)


def write_report(path: Path, found: Findings) -> None:
    """Write the page."""
    drawn = [figures.envelope(line) for line in _largest(found.profiles) if line.bucket]
    drawn += [figures.waits(line) for line in _largest(found.penalties or []) if line.windows]
    drawn += [figures.comparison(plans) for plans in found.plans]
    plots = iter(figures.as_html(drawn))
    sections = [
        f"<h1>{escape(Path(found.source).name)}</h1>",
        *_profile_section(found.profiles, plots),
        *_groups_section(found.groups),
        *_penalty_section(found.penalties, plots),
        *_conformance_section(found.verdicts),
        *_plan_section(found.plans, plots),
    ]
    figures.write_text(path, figures.page(f"SRTM: {escape(Path(found.source).name)}", "\n".join(sections)))


def _largest(lines: list[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: (-line.messages, line.topic))[:_DRAWN]


def _profile_section(lines: list[TopicProfile], plots: Iterator[str]) -> list[str]:
    rows = []
    for line in lines:
        if line.bucket is None:
            rows.append([line.topic, f"{line.messages:,}", _bad(line.error or ""), *[""] * 7])
            continue
        peaks = [f"{line.peak_mps(ns):,.0f}" for ns in (NS_PER_MS, 100 * NS_PER_MS, NS_PER_S)]
        sent = [f"{line.messages:,}", f"{line.publishers:,}", f"{line.rate_mps:,.6g}"]
        sizes = [f"{line.bucket.r:,g}", f"{line.bucket.b:,g}"]
        rows.append([line.topic, format_instant(line.first_ns), *sent, *peaks, f"{line.batch_size('0.99'):,}", *sizes])
    heads = ["topic", "from", "messages", "publishers", "msg/s"]
    heads += ["peak 1 ms", "peak 100 ms", "peak 1 s", "batch p99", "r (tokens/s)", "b (tokens)"]
    drawn = [next(plots) for line in _largest(lines) if line.bucket]
    return ["<h2>Traffic, and the token buckets it needs</h2>", _table(heads, rows), *drawn]


def _groups_section(lines: list[TopicGroups]) -> list[str]:
    rows = []
    for line in lines:
        if line.error:
            rows.append([line.topic, _bad(line.error), *[""] * 4])
            continue
        members = sum(len(group.publishers) for group in line.groups)
        mean = sum(group.confidence for group in line.groups) / len(line.groups) if line.groups else None
        drift = line.drift
        rows.append(
            [
                line.topic,
                f"{len(line.groups):,}",
                f"{members:,} of {line.publishers:,}",
                f"{max((len(group.publishers) for group in line.groups), default=0):,}",
                f"{mean:.2f}" if mean is not None else "—",
                f"{drift.agreement:.3f}" if drift else "none declared",
            ]
        )
    heads = ["topic", "groups", "publishers in groups", "largest", "mean confidence", "agreement with declared"]
    return ["<h2>Publishers that burst together</h2>", _table(heads, rows)]


def _penalty_section(lines: list[TopicPenalty] | None, plots: Iterator[str]) -> list[str]:
    title = "<h2>What splitting the bucket cost</h2>"
    if lines is None:
        return [title, _note("Unknown: the trace lacks the columns broker and release_ns. Record a run to see it.")]
    sections = [title]
    for line in _largest(lines):
        if line.whole is None:
            sections.append(f"<p>{escape(line.topic)}: {_bad(line.error or '')}</p>")
            continue
        rows = [["all", *_cost(line.whole)], *([name, *_cost(cost)] for name, cost in line.brokers.items())]
        heads = [
            "",
            "messages",
            "waited",
            "mean",
            "p99",
            "longest",
            "mean, one bucket",
            "p99, one bucket",
            "penalty each",
        ]
        worst = [[format_instant(window.begin_ns), *_cost(window.whole)] for window in line.worst()]
        heads_of_time = ["costliest windows", *heads[1:]]
        sections += [f"<h3>{escape(line.topic)}</h3>", _table(heads, rows), next(plots), _table(heads_of_time, worst)]
    return sections


def _cost(cost: Cost) -> list[str]:
    was, one = cost.split, cost.one
    shares = [f"{was.messages:,}", f"{was.waiting / was.messages:.2%}"]
    times = [was.total_ns / was.messages, was.p99, was.longest_ns, one.total_ns / one.messages, one.p99]
    return [*shares, *(format_ns(time) for time in times), format_ns(cost.penalty_ns / was.messages)]


def _conformance_section(lines: list[TopicConformance] | None) -> list[str]:
    title = "<h2>Did the run keep its contract?</h2>"
    if lines is None:
        return [title, _note("Unknown: the trace lacks the column release_ns.")]
    rows = []
    for line in lines:
        if line.excess is None:
            rows.append([line.topic, f"{line.messages:,}", _bad(line.error or ""), "", ""])
            continue
        verdict = _Html('<span class="good">yes</span>') if line.conforms else _bad("no")
        excess = f"{float(line.excess.tokens):,.6g}"
        rows.append([line.topic, f"{line.messages:,}", verdict, excess, format_instant(line.excess.at_ns)])
    heads = ["topic", "messages", "kept", "largest excess (messages)", "worst window ends"]
    return [title, _table(heads, rows)]


def _plan_section(found: list[Plans], plots: Iterator[str]) -> list[str]:
    title = "<h2>What other splits would cost</h2>"
    if not found:
        return [title, _note("Not requested: give the number of brokers with --brokers.")]
    sections = [title]
    for plans in found:
        rows = []
        for each in plans.plans:
            if each.latency is None:
                rows.append([each.policy, str(each.k), *["—"] * 3, "does not fit"])
                continue
            tails = (each.latency.access, each.latency.processing, each.latency.total)
            verdict = _Html('<span class="good">met</span>') if each.meets_slo else _bad("missed")
            rows.append([each.policy, str(each.k), *(format_ns(tail.p99) for tail in tails), verdict])
        heads = ["policy", "brokers", "p99 access", "p99 processing", "p99 total", "SLO"]
        sections += [f"<h3>{escape(plans.topic)}</h3>", next(plots), _table(heads, rows)]
    return sections


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; cells are escaped unless they are HTML already, as names come from users."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows[:_LISTED])
    more = _note(f"… and {len(rows) - _LISTED:,} more.") if len(rows) > _LISTED else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>{more}"


class _Html(str):
    """Text that is already HTML."""

    __slots__ = ()


def _cell(text: str) -> str:
    return text if isinstance(text, _Html) else escape(text)


def _bad(text: str) -> _Html:
    return _Html(f'<span class="bad">{escape(text)}</span>')


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'
