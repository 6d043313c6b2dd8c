"""`srtm lab list`, `run` and `report`: the paper's evaluation, simulated or live, with a verdict on every claim."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from srtm.cli.flags import flags_of
from srtm.cli.help import App
from srtm.cli.latency import jitter
from srtm.errors import InputError
from srtm.lab.live.options import PacedOptions
from srtm.options import check_logs
from srtm.units import NS_PER_MS, NS_PER_S, parse_duration_ns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from srtm.lab.claims import Verdict
    from srtm.lab.result import Result, Row, Rows
    from srtm.lab.sweep import Cell, Kept, Settings

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
        typer.Option(
            metavar="SECONDS",
            help="Traffic of each cell, by the paper's clock if paced",
            rich_help_panel=_SCALE,
            show_default="20; 5 if paced",
        ),
    ] = None,
    pace: Annotated[
        int | None,
        typer.Option(
            metavar="FACTOR",
            help="How many times slower than in the paper its figures run",
            rich_help_panel=_SCALE,
            show_default="by the host's gaps",
            min=1,
        ),
    ] = None,
    together: Annotated[
        int,
        typer.Option(metavar="N", help="Maximum number of paced cells at the same time", rich_help_panel=_SCALE, min=1),
    ] = 3,
    patience: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="Maximum time for a paced fit", rich_help_panel=_SCALE, show_default="2000s"
        ),
    ] = None,
    master: Master = None,
    remote: Remote = None,
    spark_conf: Options = None,
) -> None:
    """Run results of the paper on Spark, or live on this machine, and judge their claims.

    Finished cells in --out are not run again. The exit code does not depend on the verdicts.

    With --live, brokers are processes of this machine. fig6a and kernel_time run at its own speed. Figs. 7 to 11 and
    table1 run on paced brokers: service takes as long as in the paper, times a factor, so that six brokers fit on few
    cores; rates are divided by that factor, and the SLO is multiplied by it.

    Examples:
        srtm lab run all
        srtm lab run fig9 table1 --repetitions 3
        srtm lab run fig6a --live --publishers 400
        srtm lab run fig7a fig9a --live --pace 50 --repetitions 3
    """
    from srtm.lab.results import named, named_live
    from srtm.lab.sweep import Kept, Settings

    results = named_live(names) if live else named(names)
    often = repetitions if repetitions is not None else 1 if live else 2 if tiny else 10
    longest_s = None if patience is None else parse_duration_ns(patience) / NS_PER_S
    own = {"publishers": publishers, "rate_mps": rate, "seconds": seconds}
    paced = {"factor": pace, "seconds": seconds, "patience_s": longest_s}
    settings = Settings(seed, often, tiny, **_worlds(results, own, paced, live=live), thorough=thorough)
    given = spark_options(spark_conf)
    kept = Kept(out or (_LIVE_OUT if live else _OUT))
    kept.begin(settings)
    if live:
        _sweep_live(results, settings, kept, together)
    else:
        _sweep(results, settings, kept, master, remote, given)
    _tell(_verdicts(results, settings, kept), _tables(results, settings, kept), settings, as_json=as_json)


@app.command()
@flags_of(PacedOptions)
def broker(options: PacedOptions) -> None:
    """Run one broker whose service takes as long as a broker model says.

    A paced broker is a real one, but messages leave it when the model's broker would send them, times --factor. Live
    results use it to run the brokers of the paper on one machine. All flags of srtm broker apply.

    Example:
        srtm lab broker --model paper-testbed --factor 20 --beside broker-1=10000 --name broker-1
    """
    from srtm import program
    from srtm.lab.live.broker import run

    check_logs(options.log_format, options.log_level)
    program.log_to_stderr(options.log_format, options.log_level)
    program.run(run(options))


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


def _worlds(
    results: list[Result], own: Mapping[str, float | None], paced: Mapping[str, float | None], *, live: bool
) -> dict[str, Any]:
    """The scales of a live run; the factor of paced results follows from this host's gaps unless it is given."""
    if not live:
        if said := {name: value for name, value in {**own, **paced}.items() if value is not None}:
            raise InputError(f"{', '.join(said)}: only for live runs; add --live")
        return {}
    from srtm.lab.live.gaps import chosen_factor
    from srtm.lab.live.paced import Paced
    from srtm.lab.live.world import Live

    kinds: tuple[tuple[type[Any], Mapping[str, float | None]], ...] = ((Live, own), (Paced, paced))
    at_speed, slow = (
        kind(**{name: value for name, value in given.items() if value is not None}) for kind, given in kinds
    )
    if paced["factor"] is None and any(result.paced for result in results):
        factor, late_ms = chosen_factor()
        Console(stderr=True).print(f"this host is {late_ms:.3g} ms late for 1 % of the time; --pace {factor}")
        slow = replace(slow, factor=factor)
    return {"live": at_speed, "paced": slow}


def _sweep_live(results: list[Result], settings: Settings, kept: Kept, together: int) -> None:
    from srtm.lab.live.gaps import Gaps
    from srtm.lab.sweep import sweep_here, sweep_together, unfinished

    def host() -> Row:
        longest_ns, lost = jitter()
        return {"gap_ms": longest_ns / NS_PER_MS, "in_gaps": lost}

    cells = {
        paced: unfinished([result for result in results if result.paced is paced], settings, kept)
        for paced in (False, True)
    }
    if not any(cells.values()):
        return
    with _progress() as progress:
        task = progress.add_task("cells", total=sum(map(len, cells.values())))

        def done(cell: Cell) -> None:
            progress.update(task, advance=1, description=cell.result)

        sweep_here(cells[False], kept, host, done)
        if cells[True]:
            with Gaps.watched() as gaps:
                sweep_together(cells[True], kept, together, gaps.row, done)


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
        print("\n".join(world.name for world in (settings.live, settings.paced) if world))
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
