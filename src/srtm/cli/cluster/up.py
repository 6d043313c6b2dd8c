"""`srtm up`: a whole cluster on this machine."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srtm.cli.common import BrokerModel, Calibration, Mcap
from srtm.cli.extras import require
from srtm.cli.remote import secret_from
from srtm.control.local.certificates import FOLDER
from srtm.control.options import port_or_none
from srtm.errors import ControlError, InputError
from srtm.model.broker_models import DEFAULT_BROKER_MODEL
from srtm.options import LOG_FORMAT, LOG_LEVEL, check_logs

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from srtm.control.local.cluster import LocalCluster

_BAD_USAGE = 2  # the exit code


def up(
    brokers: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Number of brokers")] = 3,
    controllers: Annotated[
        int,
        typer.Option(min=1, max=5, metavar="N", help="Number of controllers; several share a store at a NATS server"),
    ] = 1,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Listen address")] = "127.0.0.1",
    web_port: Annotated[
        str, typer.Option(metavar="PORT", help="Port of the web page; 0 picks a free one, none disables it")
    ] = "4171",
    free_ports: Annotated[bool, typer.Option("--free-ports", help="Pick free ports for everything")] = False,
    data_path: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder for disk topics and the controller's store", show_default="keep nothing"
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            envvar="SRTM_STORE",
            metavar="ADDRESS",
            help="Store that controllers share: nats://HOST:PORT,…/BUCKET",
            show_default="in --data-path",
        ),
    ] = None,
    recover: Annotated[
        bool, typer.Option("--recover", help="Start with an empty store and rebuild it from the brokers' reports")
    ] = False,
    trace_folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder that traces may be recorded in")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="File with a token of an admin, without which clients only read; SRTM_TOKEN holds it directly",
            callback=secret_from("SRTM_TOKEN"),
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(envvar="SRTM_ENGINE", metavar="ENGINE", help="Delivery engine: local, nsqd, nats or a URL")
    ] = "local",
    tls: Annotated[bool, typer.Option("--tls", help="Use TLS on all ports of the control plane")] = False,
    certs: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="Certificates for --tls, as srtm certs init makes them; made if missing"),
    ] = Path(FOLDER),
    model: BrokerModel = DEFAULT_BROKER_MODEL,
    calibration: Calibration = None,
    mcap_mps: Mcap = None,
    lease_s: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time that a broker may use its full share without contact")
    ] = 30.0,
    log_format: Annotated[str, typer.Option(metavar="FORMAT", help=LOG_FORMAT[1])] = LOG_FORMAT[0],
    log_level: Annotated[str, typer.Option(metavar="LEVEL", help=LOG_LEVEL[0])] = "warning",
) -> None:
    """Start a controller and brokers on this machine; Ctrl-C stops them all.

    Each broker is a process of its own; one that fails is restarted. --engine nsqd or nats starts that engine, too.
    With --controllers 3, one of them leads and the others are ready to; a NATS server keeps their state.

    Examples:
        srtm up --brokers 4
        srtm up --controllers 3 --engine nats
        srtm topic create traffic --r 11000 --b 600
    """
    from srtm import program
    from srtm.control.local.cluster import LocalCluster, LocalOptions

    require("fastapi", "re2")
    check_logs(log_format, log_level)
    told = ["--lease-s", str(lease_s), "--broker-model", model]
    told += ["--mcap-mps", str(mcap_mps)] if mcap_mps is not None else []
    told += ["--calibration", str(calibration)] if calibration is not None else []
    logs = ["--log-format", log_format, "--log-level", log_level]
    options = LocalOptions(
        brokers,
        host,
        data_path,
        trace_folder,
        token,
        free_ports,
        [*told, *logs],
        logs,
        port_or_none(web_port),
        engine,
        recover,
        certificates=certs if tls else None,
        controllers=controllers,
        store=_shared(store, controllers),
    )
    try:
        program.run(_serve(LocalCluster(options), host))
    except ControlError as problem:
        if free_ports or problem.facts.get("code") == _BAD_USAGE:  # the process has named the wrong option
            raise
        remedy = "if a port is in use, pick free ones with --free-ports, or another for the page with --web-port"
        raise ControlError(f"{problem}; {remedy}", **problem.facts) from None


def _shared(store: str | None, controllers: int) -> str | None:
    """The store, if controllers can share it."""
    from srtm.control.keeping.address import parse

    if store is not None and not parse(store).shared and controllers > 1:
        raise InputError(f"--store {store}: {controllers} controllers cannot share a file; give nats://host:4222")
    return store


async def _serve(cluster: LocalCluster, host: str) -> None:
    """Start, print the addresses, and run until stopped."""
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
    """Do the work unless stopped first; True if it was done."""
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
    for child in cluster.controllers[1:]:
        print(f"            {cluster.http(child)}")
    if cluster.page:
        print(f"page:       {cluster.page}")
    print(f"brokers:    {addresses}")
    if cluster.authority is not None:
        print(f"clients:    export SRTM_CONTROLLER={cluster.url} SRTM_CA={cluster.authority}")
    if cluster.engines:
        places = ", ".join(f"{child.name} {host}:{child.ports['TCP']}" for child in cluster.engines)
        print(f"engine:     {places}")
    print(f"ready after {seconds:.1f} s; press Ctrl-C to stop", flush=True)
