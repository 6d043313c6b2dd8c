"""`srtm certs`: a small certificate authority, for a first cluster with TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from srtm.cli.common import AsJson, print_json
from srtm.cli.help import App
from srtm.control.local.certificates import FOLDER, here, local_names
from srtm.errors import InputError
from srtm.net import certs

app = App("Make certificates for a first cluster with TLS.")

Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the CA and its certificates")]
Hosts = Annotated[
    list[str] | None,
    typer.Option("--host", metavar="NAME", help="Host or address; repeatable", show_default="this machine"),
]


@app.command()
def init(out: Out = Path(FOLDER), hosts: Hosts = None, as_json: AsJson = False) -> None:
    """Make a certificate authority, and a certificate for each host.

    Each host's certificate serves the controller or the broker there: a broker registers by a certificate of its own
    name, which is the name of its host by default. Without --host, the certificates are those of srtm up --tls on this
    machine: controller, broker-1, broker-2 and broker-3.

    Keep ca.key off the hosts of the cluster. No file is overwritten.

    Examples:
        srtm certs init --host control --host host-1 --host host-2
        srtm up --tls
    """
    wanted = {host: [host] for host in hosts} if hosts else dict.fromkeys(local_names(3), here())
    for name in wanted:
        if existing := [str(path) for path in certs.certificate(out, name) if path.exists()]:
            raise InputError(f"{existing[0]} exists; remove it first, or choose another folder with --out")
    certs.make_authority(out)
    for name, valid_for in wanted.items():
        certs.issue(out, name, valid_for)
    _say(out, [certs.CA, *wanted], as_json=as_json)


@app.command()
def issue(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a host or broker", show_default=False)],
    out: Out = Path(FOLDER),
    hosts: Hosts = None,
    as_json: AsJson = False,
) -> None:
    """Make one more certificate, signed by the authority in a folder.

    To renew a certificate, move the old files away first. Servers take up new files by themselves.

    Example:
        srtm certs issue host-3 --out certs
    """
    certs.issue(out, name, hosts or [name])
    _say(out, [name], as_json=as_json)


def _say(folder: Path, names: list[str], *, as_json: bool) -> None:
    made = [str(path) for name in names for path in certs.certificate(folder, name)]
    if as_json:
        print_json({"files": made})
        return
    for path in made:
        print(path)
