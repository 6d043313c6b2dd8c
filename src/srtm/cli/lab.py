"""`srtm lab list`, `run` and `report`: the paper's evaluation, simulated or live, with a verdict on every claim."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from srtm.cli.common import (
    AsJson,
    Master,
    Options,
    Remote,
    Seed,
    new_table,
    print_json,
    print_table,
    spark_options,
)
from srtm.cli.help import App
from srtm.cli.latency import jitter
from srtm.errors import InputError
from srtm.units import NS_PER_MS, NS_PER_S, parse_duration_ns

if TYPE_CHECKING:
    from rich.table import Table

    from srtm.lab.claims import Verdict
    from srtm.lab.live.world import Live
    from srtm.lab.result import Result, Row, Rows
    from srtm.lab.sweep import Kept, Settings

app = App("Reproduce the paper's figures and tables, and judge its claims.")
Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of finished cells")]
_OUT, _LIVE_OUT = Path("lab-results"), Path("lab-live")
_SCALE = "Scale of --live"


@app.command(name="list")
def list_(as_json: AsJson = False) -> None:
    """List the results."""
    from srtm.lab.results import RESULTS

    if as_json:
        results = [
            {"name": r.name, "title": r.title, "shows": r.shows, "points": len(r.points), "claims": len(r.claims)}
            for r in RESULTS.values()
        ]
        print_json({"results": results})
        return
    table = new_table("result", "points", "claims", "title")
    table.columns[-1].justify = "left"
    for result in RESULTS.values():
        table.add_row(result.name, str(len(result.points)), str(len(result.claims)), result.title)
    print_table(table)


@app.command()
def run(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME", help="Results, figures such as fig7, or all", show_default=False)
    ],
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Use fewer points and shorter traffic, as a quick check")
    ] = False,
    seed: Seed = 1,
    repetitions: Annotated[
        int | None,
        typer.Option(metavar="N", help="Runs of every point", show_default="10; 2 with --tiny; 1 with --live"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder of finished cells", show_default="lab-results; lab-live with --live"
        ),
    ] = None,
    thorough: Annotated[bool, typer.Option("--thorough", help="Also run points that take minutes each")] = False,
    live: Annotated[bool, typer.Option("--live", help="Run on real brokers and sockets of this machine")] = False,
    as_json: AsJson = False,
    publishers: Annotated[
        int | None, typer.Option(metavar="N", help="Number of publishers", rich_help_panel=_SCALE, show_default="400")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="RATE", help="Messages per second of a publisher", rich_help_panel=_SCALE, show_default="5"
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Recorded time of each cell", rich_help_panel=_SCALE, show_default="20"),
    ] = None,
    brokers: Annotated[
        int | None, typer.Option(metavar="N", help="Number of brokers", rich_help_panel=_SCALE, show_default="4")
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="p99 latency to hold", rich_help_panel=_SCALE, show_default="20ms"),
    ] = None,
    mcap_mps: Annotated[
        float | None,
        typer.Option(metavar="RATE", help="Declared capacity of a broker", rich_help_panel=_SCALE, show_default="800"),
    ] = None,
    patience: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Maximum time for a fit", rich_help_panel=_SCALE, show_default="300s"),
    ] = None,
    master: Master = None,
    remote: Remote = None,
    spark_conf: Options = None,
) -> None:
    """Run results of the paper on Spark, or live on this machine, and judge their claims.

    Finished cells in --out are not run again. Only some results have a live form. The exit code does not depend on
    the verdicts.

    Examples:
        srtm lab run all
        srtm lab run fig9 table1 --repetitions 3
        srtm lab run fig6a --live --publishers 400
    """
    from srtm.lab.results import named, named_live
    from srtm.lab.sweep import Kept, Settings

    scale = {
        "publishers": publishers,
        "rate_mps": rate,
        "seconds": seconds,
        "brokers": brokers,
        "slo_ms": None if slo is None else parse_duration_ns(slo, bare="ms") / NS_PER_MS,
        "mcap_mps": mcap_mps,
        "patience_s": None if patience is None else parse_duration_ns(patience) / NS_PER_S,
    }
    results = named_live(names) if live else named(names)
    often = repetitions if repetitions is not None else 1 if live else 2 if tiny else 10
    settings = Settings(seed, often, tiny, _scale(scale, live=live), thorough)
    given = spark_options(spark_conf)
    kept = Kept(out or (_LIVE_OUT if live else _OUT))
    kept.begin(settings)
    if live:
        _sweep_live(results, settings, kept)
    else:
        _sweep(results, settings, kept, master, remote, given)
    _tell(_verdicts(results, settings, kept), _tables(results, settings, kept), settings, as_json=as_json)


@app.command()
def report(
    out: Out = _OUT,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="HTML file to write", show_default="lab.html in --out")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also write every figure as SVG and PNG")
    ] = None,
    claims: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the table of claims as Markdown")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the finished results as an HTML page, and optionally as figures.

    Example:
        srtm lab report --figures docs/figures
    """
    from srtm.lab import report as reports
    from srtm.lab import results
    from srtm.lab.sweep import Kept

    kept = Kept(out)
    settings = kept.settings()
    forms = results.live() if settings.live else results.RESULTS
    found = {name: rows for name, result in forms.items() if (rows := kept.rows(result, settings)) is not None}
    if not found:
        raise InputError(f"no finished result in {out}; finish one with srtm lab run")
    where = page or out / "lab.html"
    reports.write_page(where, found, settings)
    if claims:
        reports.write_claims(claims, found, settings)
    drawn = []
    if figures:
        from srtm.lab import static

        drawn = static.write_figures(figures, found)
    if as_json:
        missing = [name for name in forms if name not in found]
        print_json({"page": str(where), "figures": [str(path) for path in drawn], "missing": missing})
    else:
        print(f"{where}: {len(found)} of {len(forms)} results" + (f", {len(drawn)} figures" if drawn else ""))


def _scale(given: dict[str, float | None], *, live: bool) -> Live | None:
    """The scale of a live run."""
    said = {name: value for name, value in given.items() if value is not None}
    if not live:
        if said:
            raise InputError(f"{', '.join(said)}: only for live runs; add --live")
        return None
    from srtm.lab.live.world import Live

    return Live(**said)  # type: ignore[arg-type]


def _sweep_live(results: list[Result], settings: Settings, kept: Kept) -> None:
    from srtm.lab.sweep import sweep_here, unfinished

    def host() -> Row:
        longest_ns, lost = jitter()
        return {"gap_ms": longest_ns / NS_PER_MS, "in_gaps": lost}

    if cells := unfinished(results, settings, kept):
        with _progress() as progress:
            task = progress.add_task(cells[0].result, total=len(cells))
            sweep_here(cells, kept, host, lambda cell: progress.update(task, advance=1, description=cell.result))


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))


def _sweep(
    results: list[Result], settings: Settings, kept: Kept, master: str | None, remote: str | None, given: dict[str, str]
) -> None:
    from srtm.lab.sweep import all_cells, sweep, unfinished
    from srtm.pipeline.session import spark_session

    cells = unfinished(results, settings, kept)
    if not cells:
        return
    total = len(all_cells(results, settings))
    with _progress() as progress:
        task = progress.add_task("starting Spark", total=total, completed=total - len(cells))
        with spark_session(master=master, remote=remote, options=given, standing=True) as spark:
            progress.update(task, description="cells")
            sweep(cells, kept, spark, lambda cell: progress.update(task, advance=1, description=cell.result))


def _verdicts(results: list[Result], settings: Settings, kept: Kept) -> list[Verdict]:
    from srtm.lab.claims import judge
    from srtm.lab.results import known

    wanted = {result.name for result in results}
    needed = {name for result in results for claim in result.claims for name in claim.needs}
    found = {name: rows for name in wanted | needed if (rows := kept.rows(known(name), settings)) is not None}
    return judge(results, found)


def _tables(results: list[Result], settings: Settings, kept: Kept) -> dict[str, Rows]:
    """Rows of the results that have tables."""
    shown = [result for result in results if result.columns]
    return {result.name: rows for result in shown if (rows := kept.rows(result, settings)) is not None}


def _tell(verdicts: list[Verdict], tables: dict[str, Rows], settings: Settings, *, as_json: bool) -> None:
    from srtm.lab.claims import rules, tally

    if as_json:
        claims = [asdict(verdict) for verdict in verdicts]
        print_json({**asdict(settings), "claims": claims, **({"rows": tables} if tables else {})})
        return
    if settings.live:
        print(settings.live.name)
    for name, rows in tables.items():
        print_table(_table(name, rows))
    caption = f"seed {settings.seed}, {settings.repetitions} repetitions{', tiny' if settings.tiny else ''}"
    table = new_table("result", "b at", "class", "claim", "paper", "ours", "verdict", caption=caption)
    for column in table.columns:
        column.justify = "left"
    for v in verdicts:
        table.add_row(v.result, v.b_at or "—", v.kind, v.claim, v.paper, v.ours, v.word)
    print_table(table)
    for rule, some in rules(verdicts).items():
        told = [
            f"{kind}: {', '.join(f'{count} {word}' for word, count in counts.items())}"
            for kind, counts in tally(some).items()
            if counts
        ]
        print(f"{f'b at {rule}: ' if rule else ''}{'; '.join(told)}")


def _table(name: str, rows: Rows) -> Table:
    from srtm.lab.report import shown
    from srtm.lab.results import known

    columns = known(name).columns
    table = new_table(*columns.values(), title=name)
    for row in rows:
        table.add_row(*(shown(row[column]) for column in columns))
    return table
