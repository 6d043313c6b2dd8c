"""Report: the results of all jobs on a trace, on one self-contained HTML page.

A trace of arrivals gives profile and groups; a recorded run, with its contract, also penalty and conformance; a
description of brokers adds plans, and a saved plan of the fleet its table. The page says what it leaves out, and what
that would need.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from srtm.model.timeline import Timeline
from srtm.pipeline import figures
from srtm.pipeline.conformance import conformance
from srtm.pipeline.groups import groups
from srtm.pipeline.penalty import penalty
from srtm.pipeline.plan import plan
from srtm.pipeline.profile import profile
from srtm.pipeline.traces.reading import columns_of
from srtm.units import NS_PER_MS, NS_PER_S, format_instant, format_ns
from srtm.workload.uris import absolute, only_spark_opens

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
_WINDOWS = 100  # of time, at most: as many points as a figure shows well
_MINUTE_NS = 60 * NS_PER_S
_LENGTHS_NS = (
    *(step * 10**power * NS_PER_MS for power in range(4) for step in (1, 2, 5)),
    *(seconds * NS_PER_S for seconds in (10, 15, 30)),
    *(minutes * _MINUTE_NS for minutes in (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440)),
)


@dataclass(frozen=True, slots=True)
class Findings:
    """The contents of a report; None for what was not asked for or cannot be known."""

    source: str
    profiles: list[TopicProfile]
    groups: list[TopicGroups]
    penalties: list[TopicPenalty] | None
    verdicts: list[TopicConformance] | None
    plans: list[Plans]
    fleet: Mapping[str, Any] | None = None  # the document of `srtm plan --all --json`

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
    window_ns: int | None = None,
    brokers: Sequence[SimulatedBroker] = (),
    slo: SLO | None = None,
    fleet: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Findings:
    """Run all jobs that the trace allows. Without contracts, a recorded run is compared with its own profile.

    Without `window_ns`, the length of the windows follows from that of the trace.
    """
    say("profiling")
    profiles = list(profile(trace, spark))
    say("looking for groups")
    found = groups(trace, spark)
    penalties = verdicts = None
    if {"broker", "release_ns"} <= columns_of(trace, spark):
        held = contracts or {line.topic: Timeline(line.bucket) for line in profiles if line.bucket}
        say("adding up waiting times")
        penalties = list(penalty(trace, held, spark, window_ns=window_ns or window_for(*_span(profiles))))
        say("checking conformance")
        verdicts = conformance(trace, held, spark)
    plans = []
    largest = sorted((line for line in profiles if line.bucket), key=lambda line: -line.messages)[:_DRAWN]
    for line in largest if brokers else ():
        say(f"planning {line.topic}")
        contract = contracts.get(line.topic) if isinstance(contracts, dict) else contracts
        bucket = contract.start if isinstance(contract, Timeline) else line.bucket
        plans.append(plan(trace, spark, brokers, bucket=bucket, slo=slo, topic=line.topic, fit=False))
    source = str(trace) if only_spark_opens(trace) else absolute(trace)
    return Findings(source, profiles, found, penalties, verdicts, plans, fleet)


def window_for(first_ns: int, last_ns: int) -> int:
    """A length of windows of which a trace between these times has up to a hundred."""
    least = -(-(last_ns - first_ns) // _WINDOWS)
    return next((length for length in _LENGTHS_NS if length >= least), least)


def _span(profiles: Sequence[TopicProfile]) -> tuple[int, int]:
    known = [line for line in profiles if line.bucket]
    return min((line.first_ns for line in known), default=0), max((line.last_ns for line in known), default=0)


def write_report(path: Path, found: Findings) -> None:
    """Write the page."""
    drawn = [figures.envelope(line) for line in _largest(found.profiles) if line.bucket]
    drawn += [figures.waits(line) for line in _largest(found.penalties or []) if line.windows]
    drawn += [figures.comparison(plans) for plans in found.plans]
    plots = iter(figures.as_html(drawn))
    title = f"Traffic report on {Path(found.source).name}"
    sections = [
        f"<h1>{escape(title)}</h1>",
        _lead(found),
        *_profile_section(found.profiles, plots),
        *_groups_section(found.groups),
        *_penalty_section(found.penalties, plots),
        *_conformance_section(found.verdicts),
        *_plan_section(found.plans, plots),
        *_fleet_section(found.fleet),
    ]
    figures.write_text(path, figures.page(f"SRTM: {escape(title)}", "\n".join(sections)))


def _lead(found: Findings) -> str:
    messages, (first_ns, last_ns) = sum(line.messages for line in found.profiles), _span(found.profiles)
    lines = len(found.profiles)
    text = f"{lines:,} topic{'s' * (lines != 1)} with {messages:,} messages over {format_ns(last_ns - first_ns)}"
    return _note(f"{text}, from {format_instant(first_ns)} on; trace: {found.source}")


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
            rows.append(
                [each.policy, str(each.k), *(format_ns(tail.p99) for tail in tails), _met(meets=each.meets_slo)]
            )
        heads = ["policy", "brokers", "p99 access", "p99 processing", "p99 total", "SLO"]
        sections += [f"<h3>{escape(plans.topic)}</h3>", next(plots), _table(heads, rows)]
    return sections


def _fleet_section(document: Mapping[str, Any] | None) -> list[str]:
    title = "<h2>All topics on the same brokers</h2>"
    if document is None:
        return [
            title,
            _note("Not requested: save the output of srtm plan --all --json, and name the file with --plan."),
        ]
    lines, used = document["topics"], document["brokers_used"]
    meeting = sum(bool(line["meets_slo"]) for line in lines)
    text = f"{len(lines):,} topics share {used:,} brokers, and {meeting:,} of them meet their SLO."
    apart = f" With brokers of their own, they would use {sum(line['k'] for line in lines):,}."
    changes = [
        [each["name"], f"{each['brokers_used']:,}", f"{each['brokers_used'] - used:+,}", _met(meets=each["meets_slo"])]
        for each in document["what_if"]
    ]
    parts = [(each["broker"], each["publishers"]) for line in lines for each in line["brokers"]]
    publishers, topics = Counter[str](), Counter(name for name, _ in parts)
    for name, count in parts:
        publishers[name] += count
    brokers = [[name, f"{topics[name]:,}", f"{publishers[name]:,}"] for name in sorted(topics, key=_numbered)]
    slowest = sorted(lines, key=lambda line: (line["meets_slo"], -(line["total_ms"] or {"p99": math.inf})["p99"]))
    rows = [
        [
            line["topic"],
            str(line["k"] or "—"),
            *(f"{line['total_ms'][point]:.3f}" if line["total_ms"] else "—" for point in ("p50", "p95", "p99")),
            _met(meets=line["meets_slo"]),
        ]
        for line in slowest
    ]
    sections = [title, f"<p>{escape(text + apart)}</p>"]
    if changes:
        sections += ["<h3>What if</h3>", _table(["change", "brokers in use", "more or less", "SLO"], changes)]
    sections += ["<h3>Brokers</h3>", _table(["broker", "topics", "publishers"], brokers)]
    heads = ["topic", "brokers", "p50 (ms)", "p95 (ms)", "p99 (ms)", "SLO"]
    return [*sections, "<h3>Topics, the slowest first</h3>", _table(heads, rows)]


def _numbered(name: str) -> tuple[str, int, str]:
    """An order in which broker-2 comes before broker-10."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0), name


def _met(*, meets: bool) -> _Html:
    return _Html('<span class="good">met</span>') if meets else _bad("missed")


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
