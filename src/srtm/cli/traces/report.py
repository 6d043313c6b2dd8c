"""`srtm report`: everything about a trace on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from srtm.cli.common import (
    B,
    Contract,
    Master,
    Options,
    R,
    Remote,
    Trace,
    contracts_from,
    print_json,
    report_errors,
    spark_for,
)
from srtm.cli.traces.plan import fleet_from
from srtm.errors import InputError
from srtm.units import parse_duration_ns


def report(
    trace: Trace,
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    r: R = None,
    b: B = None,
    contract: Contract = None,
    window: Annotated[str, typer.Option(help="Length of the windows that waits are told in.")] = "1m",
    brokers: Annotated[
        str | None, typer.Option(help="Also plan: how many brokers there are, or a JSON file that describes each.")
    ] = None,
    slo_p99: Annotated[
        str, typer.Option("--slo-p99", help="99 % of the messages within this time; ms unless it has a unit.")
    ] = "1ms",
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False,
    master: Master = None,
    remote: Remote = None,
    spark_conf: Options = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document about the page.")] = False,
) -> None:
    """Write one self-contained HTML page: profile, groups, and of a recorded run also penalty and conformance.

    The contract that a recorded run is held against is its own profile unless it is given. Exit code 1 if a topic
    could not be judged; a contract that was broken is for the page to tell, and for srtm conformance. Example:

        srtm report run/ --r 11000 --b 6001 --brokers 6 --out report.html
    """
    from srtm.model.latency import SLO
    from srtm.pipeline.report import findings, write_report

    if not out.parent.is_dir() or out.is_dir():
        raise InputError(f"--out {out}: give the name of a file in a folder that exists")
    if out.exists() and not force:
        raise InputError(f"--out {out} exists already: choose another name, or overwrite it with --force")
    contracts = contracts_from(r, b, contract) if r or b or contract else None
    fleet = fleet_from(brokers) if brokers else []
    with spark_for(trace, "reporting on", master, remote, spark_conf) as (spark, status):
        found = findings(
            trace,
            spark,
            contracts=contracts,
            window_ns=parse_duration_ns(window),
            brokers=fleet,
            slo=SLO(parse_duration_ns(slo_p99, bare="ms")),
            say=lambda doing: status.update(f"{doing}: {trace}"),
        )
    write_report(out, found)
    if as_json:
        print_json({"out": str(out), "topics": len(found.profiles), "bytes": out.stat().st_size})
    else:
        print(f"{out}: {len(found.profiles)} topics, {out.stat().st_size:,} bytes")
    report_errors(found.errors())
