"""`srtm groups`: the publishers of a trace that burst together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from srtm.cli.common import (
    AsJson,
    Force,
    Form,
    Format,
    Master,
    Options,
    Remote,
    Seed,
    Trace,
    many,
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

_SHOWN = 20  # groups of a topic, and lines about drift


def groups(
    trace: Trace,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON file to write the groups to, for srtm plan --groups")
    ] = None,
    force: Force = False,
    window: Annotated[
        str, typer.Option(metavar="DURATION", help="Bursts that start within this time coincide")
    ] = "20ms",
    silence: Annotated[str, typer.Option(metavar="DURATION", help="Silence that ends a publisher's burst")] = "20ms",
    min_confidence: Annotated[
        float, typer.Option(metavar="FRACTION", help="Minimum confidence of a group, in (0, 1]")
    ] = 0.25,
    significance: Annotated[float, typer.Option(metavar="FRACTION", help="Tolerated false-positive rate")] = 0.001,
    seed: Seed = 1,
    master: Master = None,
    remote: Remote = None,
    spark_conf: Options = None,
    form: Form = Format.TABLE,
    as_json: AsJson = False,
) -> None:
    """Find the publishers that burst together, from arrival times alone.

    A group is accepted if the bursts of its publishers coincide more often than they do after random shifts in time.
    Its confidence is the part of the coincidences that such shifts do not explain: 0 if chance may explain all of
    them, 1 if it explains none. --significance is the fraction of publishers that may be grouped when all are
    independent. If publishers declared groups, the drift shows how well the declared groups match the found ones.

    Example:
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
        raise InputError(f"--out: cannot write {out}; give a file in an existing folder")
    if out and out.exists() and not force:
        raise InputError(f"--out: {out} exists; choose another name, or overwrite it with --force")
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
    print(f"{line.topic}: {many(len(line.groups), 'group')} with {grouped:,} of {line.publishers:,} publishers")
    if line.groups:
        table = new_table("group", "publishers", "confidence", "sends")
        for group in line.groups[:_SHOWN]:
            sends = "at random" if group.period_ns is None else f"every {group.period_ns / NS_PER_S:.6g} s"
            table.add_row(group.name, f"{len(group.publishers):,}", f"{group.confidence:.2f}", sends)
        if len(line.groups) > _SHOWN:
            table.add_row(f"… and {len(line.groups) - _SHOWN:,} more", "", "", "")
        print_table(table)
    for text in _drift(line.drift) if line.drift else ():
        print(text)


def _drift(found: Drift) -> list[str]:
    lines = [f"drift: declared and found groups have an adjusted Rand index of {found.agreement:.3f} (1 is identical)"]
    for verb, groups in (("is split into", found.split), ("contains publishers of", found.merged)):
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
