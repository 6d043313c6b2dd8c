"""`srtm up`: a whole cluster on this machine."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srtm.cli.common import check_logs
from srtm.cli.extras import require
from srtm.control.options import port_or_none
from srtm.errors import ControlError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from srtm.control.local.cluster import LocalCluster

_BAD_USAGE = 2  # the exit code


def up(
    brokers: Annotated[int, typer.Option(min=1, max=64, help="How many brokers, one process each.")] = 3,
    host: Annotated[str, typer.Option(help="Address to listen on; this machine alone unless given.")] = "127.0.0.1",
    data_path: Annotated[
        Path | None,
        typer.Option(help="A folder for disk topics and the controller's store (nothing is kept, without)."),
    ] = None,
    recover: Annotated[
        bool, typer.Option("--recover", help="The controller's store is lost: begin a new one beside it.")
    ] = False,
    trace_folder: Annotated[Path | None, typer.Option(help="A folder that runs may be recorded into.")] = None,
    token: Annotated[str | None, typer.Option(envvar="SRTM_TOKEN", help="What changes have to show.")] = None,
    mcap_mps: Annotated[float | None, typer.Option(help="Messages a second that a broker can take.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="Instead: what srtm calibrate --out wrote.")] = None,
    lease_s: Annotated[float, typer.Option(help="Seconds that shares last without the controller.")] = 30.0,
    log_format: Annotated[str, typer.Option(help="How its processes write their logs: text or json.")] = "text",
    log_level: Annotated[str, typer.Option(help="From what on: debug, info, warning or error.")] = "warning",
    web_port: Annotated[
        int | None, typer.Option(parser=port_or_none, metavar="PORT", help="Port of the page; none serves none.")
    ] = 4171,
    free_ports: Annotated[bool, typer.Option("--free-ports", help="Take any free ports.")] = False,
    engine: Annotated[
        str,
        typer.Option(
            envvar="SRTM_ENGINE",
            metavar="ENGINE",
            help="Who delivers: local (brokers' channels), nsqd or nats (started here), or the address of one.",
        ),
    ] = "local",
) -> None:
    """Start a controller and brokers, and stop them all with Ctrl-C. A broker that ends is started again.

    srtm up --brokers 4

    srtm topic create traffic --r 11000 --b 600
    """
    from srtm import program
    from srtm.control.local.cluster import LocalCluster, LocalOptions

    require("fastapi", "re2")
    check_logs(log_format, log_level)
    told = ["--lease-s", str(lease_s)]
    told += ["--mcap-mps", str(mcap_mps)] if mcap_mps is not None else []
    told += ["--calibration", str(calibration)] if calibration is not None else []
    logs = ["--log-format", log_format, "--log-level", log_level]
    options = LocalOptions(
        brokers, host, data_path, trace_folder, token, free_ports, [*told, *logs], logs, web_port, engine, recover
    )
    try:
        program.run(_serve(LocalCluster(options), host))
    except ControlError as problem:
        if free_ports or problem.facts.get("code") == _BAD_USAGE:  # what was wrong with an option has been said
            raise
        remedy = "if a port is taken, take any with --free-ports, or another for the page with --web-port"
        raise ControlError(f"{problem}; {remedy}", **problem.facts) from None


async def _serve(cluster: LocalCluster, host: str) -> None:
    """Start, say where everything is, and stop when told to."""
    from srtm import program

    stopped = asyncio.ensure_future(program.stop_signal().wait())
    began = time.monotonic()
    try:
        if await _unless(stopped, cluster.start()):
            _say(cluster, host, time.monotonic() - began)
            await _unless(stopped, cluster.watch(lambda line: print(line, flush=True)))
    finally:
        stopped.cancel()
        await cluster.stop()
    print("cluster stopped", flush=True)


async def _unless(stopped: asyncio.Future[Any], work: Coroutine[Any, Any, None]) -> bool:
    """Work until it is done, or until somebody wants to stop; gives whether it was done."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False
    task.result()
    return True


def _say(cluster: LocalCluster, host: str, seconds: float) -> None:
    addresses = ", ".join(f"{host}:{child.ports['TCP']}" for child in cluster.brokers)
    print(f"controller: {cluster.url} (API: {cluster.url}/docs)")
    if cluster.page:
        print(f"page:       {cluster.page}")
    print(f"brokers:    {addresses}")
    if cluster.engines:
        places = ", ".join(f"{child.name} {host}:{child.ports['TCP']}" for child in cluster.engines)
        print(f"engine:     {places}")
    print(f"ready after {seconds:.1f} s; Ctrl-C stops it", flush=True)
