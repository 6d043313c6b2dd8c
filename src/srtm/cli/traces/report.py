"""`srtm report`: one HTML page about a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from srtm.cli.common import (
    BROKERS,
    SLO_P99,
    AsJson,
    B,
    BrokerModel,
    Calibration,
    Contract,
    Force,
    Master,
    Options,
    R,
    Remote,
    Slo,
    Trace,
    contracts_from,
    many,
    print_json,
    report_errors,
    spark_for,
)
from srtm.cli.traces.brokers import fleet_from
from srtm.cli.traces.fleet import read_fleet
from srtm.errors import InputError
from srtm.model.broker_models import DEFAULT_BROKER_MODEL
from srtm.units import parse_duration_ns


def report(
    trace: Trace,
    out: Annotated[Path, typer.Option(metavar="FILE", help="HTML file to write")] = Path("report.html"),
    force: Force = False,
    r: R = None,
    b: B = None,
    contract: Contract = None,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Length of the reporting windows",
            show_default="up to 100 of them over the trace",
        ),
    ] = None,
    slo_p99: Slo = SLO_P99,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also show the plan that srtm plan --all --json printed")
    ] = None,
    as_json: AsJson = False,
    brokers: Annotated[
        str | None,
        typer.Option(
            metavar="N|FILE", help="Also plan for N brokers, or those in a JSON file", rich_help_panel=BROKERS
        ),
    ] = None,
    model: BrokerModel = DEFAULT_BROKER_MODEL,
    calibration: Calibration = None,
    master: Master = None,
    remote: Remote = None,
    spark_conf: Options = None,
) -> None:
    """Write one self-contained HTML page about a trace.

    The page shows profiles and groups, and for a recorded run also penalty and conformance. Without --r and --b or
    --contract, the run is checked against its own profile. The exit code is 1 if a topic could not be analyzed; a
    broken contract appears on the page and does not change it (see srtm conformance).

    Examples:
        srtm report run/ --r 11000 --b 6001 --brokers 6 --out report.html
        srtm plan --all traces/ --brokers 12 --json > plan.json
        srtm report traces/ --plan plan.json
    """
    from srtm.model.latency import SLO
    from srtm.pipeline.report import findings, write_report

    if not out.parent.is_dir() or out.is_dir():
        raise InputError(f"--out: cannot write {out}; give a file in an existing folder")
    if out.exists() and not force:
        raise InputError(f"--out: {out} exists; choose another name, or overwrite it with --force")
    saved = read_fleet(plan) if plan else None
    contracts = contracts_from(r, b, contract) if r or b or contract else None
    fleet = fleet_from(brokers, model, calibration) if brokers else []
    with spark_for(trace, "reporting on", master, remote, spark_conf) as (spark, status):
        found = findings(
            trace,
            spark,
            contracts=contracts,
            window_ns=parse_duration_ns(window) if window else None,
            brokers=fleet,
            slo=SLO(parse_duration_ns(slo_p99, bare="ms")),
            fleet=saved,
            say=lambda doing: status.update(f"{doing}: {trace}"),
        )
    write_report(out, found)
    if as_json:
        print_json({"out": str(out), "topics": len(found.profiles), "bytes": out.stat().st_size})
    else:
        print(f"{out}: {many(len(found.profiles), 'topic')}, {out.stat().st_size:,} bytes")
    report_errors(found.errors())
