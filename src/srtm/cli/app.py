"""The verbs of `srtm`, and what they have in common: exit codes, errors in one line, JSON on stdout, logs on stderr."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import srtm
from srtm.cli import lab, latency
from srtm.cli.cluster import check, debug, generate, top, topic, up
from srtm.cli.common import STOPPED
from srtm.cli.extras import remedy
from srtm.cli.messages import load, pub, sub
from srtm.cli.servers import broker, calibrate, controller
from srtm.cli.traces import conformance, groups, penalty, plan, profile, report, spark, trace
from srtm.errors import InputError, SRTMError

app = typer.Typer(
    name="srtm",
    help="Scalable real-time messaging: place publishers so that a topic's tail latency holds on the fewest brokers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(up.up)
app.add_typer(topic.app, name="topic")
app.command()(top.top)
app.command()(check.check)
app.add_typer(debug.app, name="debug")
app.add_typer(generate.app, name="generate")
app.add_typer(trace.app, name="trace")
app.add_typer(spark.app, name="spark")
app.add_typer(lab.app, name="lab")
app.command()(broker.broker)
app.command()(controller.controller)
app.command()(pub.pub)
app.command()(sub.sub)
app.command()(load.load)
app.command()(calibrate.calibrate)
app.command()(latency.latency)
app.command()(profile.profile)
app.command()(groups.groups)
app.command()(plan.plan)
app.command()(penalty.penalty)
app.command()(conformance.conformance)
app.command()(report.report)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(srtm.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    del version


def run(arguments: list[str]) -> int:
    """Run one command line; the exit code is 0 (done), 1 (failed) or 2 (bad usage); `srtm check` has its own."""
    try:
        app(arguments, prog_name="srtm")
    except SystemExit as end:  # typer ends so, having said itself what was wrong with the usage
        if end.code == STOPPED:
            print("srtm: stopped", file=sys.stderr)
        code = end.code or 0
        return code if isinstance(code, int) and code <= 3 else 1  # to be stopped is a failure like any other
    except InputError as error:
        print(f"srtm: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        missing = remedy(arguments, error)
        if missing is None:
            raise
        print(f"srtm: {missing}", file=sys.stderr)
        return 1
    except (SRTMError, OSError) as error:
        print(f"srtm: {error}", file=sys.stderr)
        return 1
    return 0
