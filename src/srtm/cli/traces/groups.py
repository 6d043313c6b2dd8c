"""`srtm groups`: which publishers of a trace burst together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from srtm.cli.common import (
    AsJson,
    Form,
    Format,
    Master,
    Options,
    Remote,
    Trace,
    new_table,
    print_json,
    print_table,
    report_errors,
    spark_for,
)
from srtm.errors import InputError
from srtm.units import NS_PER_S, parse_duration_ns

if TYPE_CHECKING:
    from srtm.model.drift import Drift
    from srtm.pipeline.groups import TopicGroups

_SHOWN = 20  # groups of a topic, and lines about drift, that a table shows


def groups(
    trace: Trace,
    out: Annotated[
        Path | None, typer.Option(help="Write the groups to this file, for srtm plan and srtm topic create.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False,
    window: Annotated[str, typer.Option(help="Bursts that start within it of each other count as together.")] = "20ms",
    silence: Annotated[str, typer.Option(help="A publisher's burst ends when it is silent for so long.")] = "20ms",
    min_confidence: Annotated[
        float, typer.Option(help="Part of the agreement that chance must not explain, in (0, 1].")
    ] = 0.25,
    significance: Annotated[
        float, typer.Option(help="Share of publishers that may be grouped where all are independent.")
    ] = 0.001,
    seed: Annotated[int, typer.Option(help="Of the random time shifts; the same seed gives the same groups.")] = 1,
    master: Master = None,
    remote: Remote = None,
    spark_conf: Options = None,
    form: Form = Format.TABLE,
    as_json: AsJson = False,
) -> None:
    """Find which publishers burst together, from nothing but when their messages arrived.

    A group is trusted if its publishers agree more than the same publishers do after random shifts in time. Confidence
    is the part of their agreement that such shifts do not explain: 0, it may all be chance; 1, none of it. Where
    publishers declared groups, the drift says how far these still hold. Example:

        srtm groups trace.parquet --window 20ms --out groups.json
    """
    from srtm.model import correlation
    from srtm.pipeline.groups import document
    from srtm.pipeline.groups import groups as run
    from srtm.workload.groups import write_groups

    options = correlation.Options(
        silence_ns=parse_duration_ns(silence, bare="ms"),
        tolerance_ns=parse_duration_ns(window, bare="ms"),
        min_confidence=min_confidence,
        significance=significance,
        seed=seed,
    )
    if out and ((out.exists() and not out.is_file()) or not out.parent.is_dir()):
        raise InputError(f"--out {out}: give the name of a file in a folder that exists")
    if out and out.exists() and not force:
        raise InputError(f"--out {out} exists already: choose another name, or overwrite it with --force")
    with spark_for(trace, "finding groups in", master, remote, spark_conf) as (spark, _):
        lines = run(trace, spark, options=options)
    if out:
        write_groups(out, document(lines))
    if as_json or form is Format.JSON:
        print_json(document(lines))
    else:
        for line in lines:
            _show(line)
    report_errors([(line.topic, line.error) for line in lines])


def _show(line: TopicGroups) -> None:
    if line.error:
        return
    grouped = sum(len(group.publishers) for group in line.groups)
    print(f"{line.topic}: {len(line.groups):,} groups hold {grouped:,} of {line.publishers:,} publishers")
    if line.groups:
        table = new_table("group", "publishers", "confidence", "sends")
        for group in line.groups[:_SHOWN]:
            sends = "by chance" if group.period_ns is None else f"every {group.period_ns / NS_PER_S:.6g} s"
            table.add_row(group.name, f"{len(group.publishers):,}", f"{group.confidence:.2f}", sends)
        if len(line.groups) > _SHOWN:
            table.add_row(f"… and {len(line.groups) - _SHOWN:,} more", "", "", "")
        print_table(table)
    for text in _drift(line.drift) if line.drift else ():
        print(text)


def _drift(found: Drift) -> list[str]:
    lines = [f"drift: declared and found groups agree to {found.agreement:.3f} (adjusted Rand index; 1 is the same)"]
    for verb, groups in (("is split into", found.split), ("holds publishers of", found.merged)):
        for group, parts in groups[:_SHOWN]:
            told = ", ".join(f"{part or 'no group'} ({count})" for part, count in parts[:_SHOWN])
            lines.append(f"  {group} {verb} {told}")
        if len(groups) > _SHOWN:
            lines.append(f"  … and {len(groups) - _SHOWN:,} more")
    lines += [
        f"  {name} moved from {said or 'no group'} to {seen or 'no group'}" for name, said, seen in found.moved[:_SHOWN]
    ]
    if len(found.moved) > _SHOWN:
        lines.append(f"  … and {len(found.moved) - _SHOWN:,} more moved")
    return lines
