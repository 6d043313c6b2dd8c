"""`srtm trace`: make trace files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from srtm.cli.traces.ingest import import_trace
from srtm.errors import WorkloadError
from srtm.units import NS_PER_S, parse_duration_ns

if TYPE_CHECKING:
    from srtm.workload.publishers import Population, Workload

app = typer.Typer(help="Make trace files: Parquet, one row a message.", no_args_is_help=True)
app.command("import")(import_trace)


@app.command()
def synth(
    out: Annotated[Path, typer.Option(help="The Parquet file to write.", show_default=False)],
    topic: Annotated[str, typer.Option(help="Name of the topic.")] = "topic",
    publishers: Annotated[int, typer.Option(help="How many publishers send.")] = 1_000,
    rate: Annotated[float, typer.Option(help="Mean messages per second of each publisher.")] = 10.0,
    batch: Annotated[int, typer.Option(help="Messages that a publisher sends at once.")] = 1,
    process: Annotated[str, typer.Option(help="When publishers send: poisson or periodic.")] = "poisson",
    group_size: Annotated[int, typer.Option(help="Publishers that send together (1: nobody does).")] = 1,
    jitter: Annotated[str, typer.Option(help="Interval that the messages of a group are spread over.")] = "0ms",
    duration: Annotated[str | None, typer.Option(help="How long they send, as in 10m (60s unless given).")] = None,
    messages: Annotated[
        float | None, typer.Option(help="Instead of a duration: about how many messages, as in 1e8.")
    ] = None,
    start_ns: Annotated[int, typer.Option(help="Time of the trace's beginning, in ns.")] = 0,
    seed: Annotated[int, typer.Option(help="The same seed makes the same trace.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document about the trace.")] = False,
) -> None:
    """Make a trace of publishers that send by chance or by the clock, alone or in groups.

    Example, a topic of 1,000 sensors that report in groups of 25:

        srtm trace synth --publishers 1000 --batch 10 --group-size 25 --duration 60s --out trace.parquet
    """
    from srtm.workload.publishers import Population, Workload

    population = Population(publishers, rate, batch, process, group_size, parse_duration_ns(jitter, bare="ms"))  # type: ignore[arg-type]
    workload = Workload((population,), _duration_ns(duration, messages, population), seed, start_ns)
    if not topic:
        raise WorkloadError("the topic must have a name")
    if (out.exists() and not out.is_file()) or not out.parent.is_dir():
        raise WorkloadError(f"--out {out}: give the name of a file in a folder that exists")
    if out.exists() and not force:
        raise WorkloadError(f"--out {out} exists already: choose another name, or overwrite it with --force")
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
        print(json.dumps(facts))
    else:
        print(
            f"{out}: {written:,} messages of {publishers:,} publishers over {facts['duration_s']:g} s,"
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
        raise WorkloadError("give --duration or --messages, not both")
    if messages is None:
        return parse_duration_ns(duration or "60s")
    if not 1 <= messages < 1e15:
        raise WorkloadError(f"--messages {messages:g}: it must lie between 1 and 1e15")
    return max(1, round(messages / population.total_mps * NS_PER_S))
