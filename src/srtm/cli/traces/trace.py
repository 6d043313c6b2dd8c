"""`srtm trace`: make trace files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from srtm.cli.common import (
    WORKLOAD,
    AsJson,
    Batch,
    Force,
    GroupSize,
    Jitter,
    Process,
    Publishers,
    Rate,
    Seed,
    many,
    print_json,
)
from srtm.cli.help import App
from srtm.cli.traces.ingest import import_trace
from srtm.errors import WorkloadError
from srtm.units import NS_PER_S, parse_duration_ns

if TYPE_CHECKING:
    from srtm.workload.publishers import Population, Workload

app = App("Make trace files: Parquet with one row per message.")
app.command("import")(import_trace)


@app.command()
def synth(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Parquet file to write", show_default=False)],
    force: Force = False,
    topic: Annotated[str, typer.Option(metavar="TOPIC", help="Name of the topic")] = "topic",
    start_ns: Annotated[int, typer.Option(metavar="NS", help="Time of the first moment, in ns")] = 0,
    seed: Seed = 1,
    as_json: AsJson = False,
    publishers: Publishers = 1_000,
    rate: Rate = 10.0,
    batch: Batch = 1,
    process: Process = "poisson",
    group_size: GroupSize = 1,
    jitter: Jitter = "0ms",
    duration: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="Length of the traffic, as in 10m", rich_help_panel=WORKLOAD, show_default="60s"
        ),
    ] = None,
    messages: Annotated[
        float | None,
        typer.Option(
            metavar="N", help="Approximate number of messages instead of --duration", rich_help_panel=WORKLOAD
        ),
    ] = None,
) -> None:
    """Make a trace of publishers that send at random or periodically, alone or in groups.

    Example: 1,000 sensors that report in groups of 25:

        srtm trace synth --publishers 1000 --batch 10 --group-size 25 --duration 60s --out trace.parquet
    """
    from srtm.workload.publishers import Population, Workload

    population = Population(publishers, rate, batch, process, group_size, parse_duration_ns(jitter, bare="ms"))  # type: ignore[arg-type]
    workload = Workload((population,), _duration_ns(duration, messages, population), seed, start_ns)
    if not topic:
        raise WorkloadError("--topic must not be empty")
    if (out.exists() and not out.is_file()) or not out.parent.is_dir():
        raise WorkloadError(f"--out: cannot write {out}; give a file in an existing folder")
    if out.exists() and not force:
        raise WorkloadError(f"--out: {out} exists; choose another name, or overwrite it with --force")
    began = time.perf_counter()
    written = _write(workload, topic, out)
    facts = {
        "out": str(out),
        "topic": topic,
        "messages": written,
        "publishers": publishers,
        "rate": written * NS_PER_S / workload.duration_ns,
        "duration_s": workload.duration_ns / NS_PER_S,
        "seed": seed,
        "bytes": out.stat().st_size,
        "seconds": round(time.perf_counter() - began, 3),
    }
    if as_json:
        print_json(facts)
    else:
        print(
            f"{out}: {written:,} messages from {many(publishers, 'publisher')} over {facts['duration_s']:g} s,"
            f" {facts['bytes']:,} bytes, in {facts['seconds']:.1f} s"
        )


def _write(workload: Workload, topic: str, out: Path) -> int:
    from srtm.workload.trace import ARRIVAL_SCHEMA, ArrivalWriter, writing

    about = {"srtm.workload": repr(workload)}
    written = 0
    columns = (
        TextColumn("writing {task.fields[name]}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with (
        writing(out, ARRIVAL_SCHEMA, about) as writer,
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
    ):
        rows = ArrivalWriter(writer, topic, workload.publishers())
        task = progress.add_task("", total=workload.duration_ns, name=out.name)
        for window in workload.windows():
            rows.write(window)
            written += len(window.times_ns)
            progress.advance(task, workload.window_ns)
        rows.flush()
    return written


def _duration_ns(duration: str | None, messages: float | None, population: Population) -> int:
    if duration is not None and messages is not None:
        raise WorkloadError("--duration and --messages exclude each other; give one")
    if messages is None:
        return parse_duration_ns(duration or "60s")
    if not 1 <= messages < 1e15:
        raise WorkloadError(f"--messages must be between 1 and 1e15, not {messages:g}")
    return max(1, round(messages / population.total_mps * NS_PER_S))
