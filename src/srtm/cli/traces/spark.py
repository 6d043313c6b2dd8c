"""`srtm spark up`, `down` and `status`: a standing Spark for the commands that run on it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from srtm.cli.common import AsJson, print_json
from srtm.cli.extras import require
from srtm.errors import InputError
from srtm.units import NS_PER_S, parse_duration_ns

if TYPE_CHECKING:
    from srtm.pipeline.runtime.server import Server

app = typer.Typer(help="Keep a Spark running, so that commands need not start their own.", no_args_is_help=True)


@app.command()
def up(
    idle: Annotated[str, typer.Option(help="End it when nobody has used it for so long.")] = "30m",
    as_json: AsJson = False,
) -> None:
    """Start a Spark Connect server in the background, for you alone and on this machine only.

    Commands that run on Spark use it from then on, unless they are told where to run (--master, --remote) or how
    (--spark-conf), or SRTM_SPARK_SERVER=off is set. Example:

        srtm spark up --idle 2h
    """
    from srtm.pipeline.runtime.server import start

    require("pyspark")
    idle_s = parse_duration_ns(idle) / NS_PER_S
    if idle_s <= 0:
        raise InputError(f"--idle {idle}: it must be longer than nothing, as in 30m")
    with Console(stderr=True).status("starting Spark"):
        server = start(idle_s)
    _say(server, as_json)


@app.command()
def down(as_json: AsJson = False) -> None:
    """End the server that `srtm spark up` started."""
    from srtm.pipeline.runtime.server import stop

    server = stop()
    if as_json:
        print_json({"stopped": server.pid if server else None})
    else:
        print(f"process {server.pid} has ended" if server else "no server is running")


@app.command()
def status(as_json: AsJson = False) -> None:
    """Say whether the server is running, and since when."""
    from srtm.pipeline.runtime.server import recorded_server

    _say(recorded_server(), as_json)


def _say(server: Server | None, as_json: bool) -> None:
    from srtm.pipeline.runtime.server import record_file

    if as_json:
        print_json({"running": server is not None, **(_facts(server) if server else {})})
    elif server is None:
        print("no server is running: start one with srtm spark up")
    else:
        minutes = (time.time() - server.started_s) / 60
        idle = server.idle_s / 60
        print(f"{server.address}, process {server.pid}, up for {minutes:.0f} min; ends after {idle:g} min unused")
        print(f"its token is in {record_file()}")
        if not server.fits:
            print("it runs other versions than this command, which will not use it: srtm spark up replaces it")


def _facts(server: Server) -> dict[str, object]:
    return {
        "address": server.address,
        "pid": server.pid,
        "started": server.started_s,
        "idle_s": server.idle_s,
        "versions": dict(zip(("python", "version", "pyspark", "srtm", "code"), server.versions, strict=True)),
        "fits": server.fits,
    }
