"""Certificates of a local cluster: one for the controller and one for each broker, made if they are missing."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

from srtm.net import certs

FOLDER: Final = "certs"
CONTROLLER: Final = "controller"


def local_names(brokers: int) -> list[str]:
    """The names of a local cluster's processes."""
    return [CONTROLLER, *(f"broker-{number + 1}" for number in range(brokers))]


def here() -> list[str]:
    """The names and addresses of this machine that its certificates are valid for."""
    return ["localhost", "127.0.0.1", "::1", socket.gethostname()]


def ensured(folder: Path, brokers: int, host: str) -> Path:
    """Make the CA and the certificates that a local cluster lacks; returns the path of the CA's certificate."""
    authority, _ = certs.certificate(folder, certs.CA)
    if not authority.exists():
        certs.make_authority(folder)
    hosts = here() if host in ("", "0.0.0.0", "::") else [*here(), host]
    for name in local_names(brokers):
        if not certs.certificate(folder, name)[0].exists():
            certs.issue(folder, name, hosts)
    return authority


def flags(folder: Path, name: str) -> list[str]:
    """The flags by which a process uses its certificate."""
    path, key = certs.certificate(folder, name)
    authority, _ = certs.certificate(folder, certs.CA)
    return ["--tls-cert", str(path), "--tls-key", str(key), "--tls-root-ca-file", str(authority)]
