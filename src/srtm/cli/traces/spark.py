"""`srtm spark up`, `down` and `status`: a Spark server shared by the verbs that run on Spark."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from srtm.cli.common import AsJson, print_json
from srtm.cli.extras import require
from srtm.cli.help import App
from srtm.errors import InputError
from srtm.units import NS_PER_S, parse_duration_ns

if TYPE_CHECKING:
    from srtm.pipeline.runtime.server import Server

app = App("Keep a Spark server running, so that commands start faster.")


@app.command()
def up(
    idle: Annotated[str, typer.Option(metavar="DURATION", help="Stop the server after this time without use")] = "30m",
    as_json: AsJson = False,
) -> None:
    """Start a Spark Connect server in the background, for your user on this machine.

    Commands that run on Spark then use this server, unless you give --master, --remote or --spark-conf, or set
    SRTM_SPARK_SERVER=off.

    Example:
        srtm spark up --idle 2h
    """
    from srtm.pipeline.runtime.server import start

    require("pyspark")
    idle_s = parse_duration_ns(idle) / NS_PER_S
    if idle_s <= 0:
        raise InputError(f"--idle must be above 0, as in 30m, not {idle!r}")
    with Console(stderr=True).status("starting Spark"):
        server = start(idle_s)
    _say(server, as_json)


@app.command()
def down(as_json: AsJson = False) -> None:
    """Stop the server that srtm spark up started."""
    from srtm.pipeline.runtime.server import stop

    server = stop()
    if as_json:
        print_json({"stopped": server.pid if server else None})
    else:
        print(f"stopped process {server.pid}" if server else "no server is running")


@app.command()
def status(as_json: AsJson = False) -> None:
    """Show whether the server is running, and since when."""
    from srtm.pipeline.runtime.server import recorded_server

    _say(recorded_server(), as_json)


def _say(server: Server | None, as_json: bool) -> None:
    from srtm.pipeline.runtime.server import record_file

    if as_json:
        print_json({"running": server is not None, **(_facts(server) if server else {})})
    elif server is None:
        print("no server is running; start one with srtm spark up")
    else:
        minutes = (time.time() - server.started_s) / 60
        idle = server.idle_s / 60
        print(f"{server.address}, process {server.pid}, up for {minutes:.0f} min; stops after {idle:g} min without use")
        print(f"its token is in {record_file()}")
        if not server.fits:
            print("its versions differ from this command's, so it is not used; replace it with srtm spark up")


def _facts(server: Server) -> dict[str, object]:
    return {
        "address": server.address,
        "pid": server.pid,
        "started": server.started_s,
        "idle_s": server.idle_s,
        "versions": dict(zip(("python", "version", "pyspark", "srtm", "code"), server.versions, strict=True)),
        "fits": server.fits,
    }
