"""`srtm lab list`, `run` and `report`: the paper's evaluation, simulated, with every claim judged."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from srtm.cli.common import AsJson, Master, Options, Remote, new_table, print_json, print_table, spark_options
from srtm.errors import InputError

if TYPE_CHECKING:
    from srtm.lab.claims import Verdict
    from srtm.lab.result import Result
    from srtm.lab.sweep import Kept, Settings

app = typer.Typer(help="Reproduce the paper's figures and tables, and judge its claims.", no_args_is_help=True)
Out = Annotated[Path, typer.Option(help="The folder that finished cells are kept in.")]
_OUT = Path("lab-results")


@app.command(name="list")
def list_(as_json: AsJson = False) -> None:
    """Say which results there are."""
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
    names: Annotated[list[str], typer.Argument(help="Results, figures (fig7 for its panels), or all.")],
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Fewer points and shorter traffic: a check, not a result.")
    ] = False,
    seed: Annotated[int, typer.Option(help="The same seed gives the same numbers.")] = 1,
    repetitions: Annotated[int | None, typer.Option(help="Runs of every point (10; 2 if --tiny).")] = None,
    out: Out = _OUT,
    master: Master = None,
    remote: Remote = None,
    spark_conf: Options = None,
    as_json: AsJson = False,
) -> None:
    """Run results on Spark, then judge their claims.

    What --out holds already is not run again. Exit code 0 whatever the verdicts. Examples:

        srtm lab run all

        srtm lab run fig9 table1 --repetitions 3
    """
    from srtm.lab.results import named
    from srtm.lab.sweep import Kept, Settings

    results = named(names)
    settings = Settings(seed, repetitions if repetitions is not None else 2 if tiny else 10, tiny)
    given = spark_options(spark_conf)
    kept = Kept(out)
    kept.begin(settings)
    _sweep(results, settings, kept, master, remote, given)
    _tell(_verdicts(results, settings, kept), settings, as_json=as_json)


@app.command()
def report(
    out: Out = _OUT,
    page: Annotated[Path | None, typer.Option(help="The HTML page to write (lab.html in the folder).")] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Also write every figure into this folder, as SVG and PNG.")
    ] = None,
    claims: Annotated[Path | None, typer.Option(help="Also write the table of claims into this Markdown file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write what was run as one self-contained HTML page, and as figures for documents. Example:

    srtm lab report --figures docs/figures
    """
    from srtm.lab import report as reports
    from srtm.lab.results import RESULTS
    from srtm.lab.sweep import Kept

    kept = Kept(out)
    settings = kept.settings()
    found = {name: rows for name, result in RESULTS.items() if (rows := kept.rows(result, settings)) is not None}
    if not found:
        raise InputError(f"no result in {out} is finished: finish one with srtm lab run")
    where = page or out / "lab.html"
    reports.write_page(where, found, settings)
    if claims:
        reports.write_claims(claims, found, settings)
    drawn = []
    if figures:
        from srtm.lab import static

        drawn = static.write_figures(figures, found)
    if as_json:
        missing = [name for name in RESULTS if name not in found]
        print_json({"page": str(where), "figures": [str(path) for path in drawn], "missing": missing})
    else:
        print(f"{where}: {len(found)} of {len(RESULTS)} results" + (f", {len(drawn)} figures" if drawn else ""))


def _sweep(
    results: list[Result], settings: Settings, kept: Kept, master: str | None, remote: str | None, given: dict[str, str]
) -> None:
    from srtm.lab.sweep import cells_of, sweep, unfinished
    from srtm.pipeline.session import spark_session

    cells = unfinished(results, settings, kept)
    if not cells:
        return
    total = sum(len(cells_of(result, settings)) for result in results)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting Spark", total=total, completed=total - len(cells))
        with spark_session(master=master, remote=remote, options=given, standing=True) as spark:
            progress.update(task, description="cells")
            sweep(cells, kept, spark, lambda cell: progress.update(task, advance=1, description=cell.result))


def _verdicts(results: list[Result], settings: Settings, kept: Kept) -> list[Verdict]:
    from srtm.lab.claims import judge
    from srtm.lab.results import RESULTS

    wanted = {result.name for result in results}
    needed = {name for result in results for claim in result.claims for name in claim.needs}
    found = {name: rows for name in wanted | needed if (rows := kept.rows(RESULTS[name], settings)) is not None}
    return judge(results, found)


def _tell(verdicts: list[Verdict], settings: Settings, *, as_json: bool) -> None:
    if as_json:
        print_json({**asdict(settings), "claims": [asdict(verdict) for verdict in verdicts]})
        return
    caption = f"seed {settings.seed}, {settings.repetitions} repetitions{', tiny' if settings.tiny else ''}"
    table = new_table("result", "b at", "claim", "paper", "ours", "verdict", caption=caption)
    for column in table.columns:
        column.justify = "left"
    for v in verdicts:
        table.add_row(v.result, v.b_at or "—", v.claim, v.paper, v.ours, v.word)
    print_table(table)
    holds = sum(verdict.holds is True for verdict in verdicts)
    print(f"{holds} of {len(verdicts)} claims hold")
