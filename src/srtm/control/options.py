"""All options of a controller with their defaults; flags and variables derive from those with a help text."""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from srtm.control.discovery.registry import INACTIVE_AFTER_S, TOMBSTONE_S
from srtm.control.keeping.address import StoreAddress, parse
from srtm.control.keeping.lease import LEASE_S
from srtm.errors import BrokerError, ControlError, InputError
from srtm.files import not_readable
from srtm.model.broker_models import BROKER_MODELS, DEFAULT_BROKER_MODEL, broker_model
from srtm.net.tls import AUTH_POLICIES, server_context
from srtm.options import LOG_FORMAT, LOG_LEVEL, option, secret
from srtm.units import NS_PER_S
from srtm.workload.calibration import read_calibration

if TYPE_CHECKING:
    import ssl

    from srtm.model.broker_models import ServiceModel

_EVERYWHERE = ("", "0.0.0.0", "::")
_CLOCKS = 1.02  # our clock may run faster than a broker's by this factor
_LEAST_LEASE_S = 1.0  # of a leader: writes to JetStream take milliseconds, but some take half a second
_SLACK_NS = 300_000_000  # a busy broker notices the end of its lease a little late
_TIMES, _CAPACITY, _LOGS, _ACCESS = "Times", "Capacity of brokers", "Logging", "Access"
_FILE: dict[str, Any] = {"metavar": "FILE", "panel": _ACCESS}
_SECONDS: dict[str, Any] = {"metavar": "SECONDS", "panel": _TIMES}


def port_or_none(text: str) -> int | None:
    """The port in a flag; None for `none`."""
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{text!r} is not a port; give a number from 0 to 65535, or none") from None


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """Options of one controller."""

    host: str = option("127.0.0.1", "Listen address", "ADDRESS")
    tcp_port: int = option(4160, "Port that brokers register at; 0 picks a free one", "PORT")
    http_port: int = option(4161, "Port of the HTTP API; 0 picks a free one", "PORT")
    web_port: int | None = option(
        4171, "Port of the web page; 0 picks a free one, none disables it", "PORT", parse=port_or_none
    )
    broadcast_address: str | None = option(
        None, "Host that brokers use for the HTTP API", "HOST", shown="--host, or the host name"
    )
    data_path: str | None = option(None, "Folder for the store", "FOLDER", shown="keep the store in memory")
    store: str | None = option(
        None,
        "Store: sqlite:FOLDER or nats://HOST:PORT,…/BUCKET",
        "ADDRESS",
        envvar="SRTM_STORE",
        shown="--data-path",
    )
    recover: bool = option(False, "Start with an empty store and rebuild it from the brokers' reports")
    token: str | None = secret("File with a token of an admin", "SRTM_TOKEN", _ACCESS)
    auth_required: bool = option(
        False, "Require a credential for everything, even before the first token exists", panel=_ACCESS
    )
    control_token: str | None = secret("File with the token to present to brokers", "SRTM_CONTROL_TOKEN", _ACCESS)
    broker_token: str | None = secret(
        "File with a token that every broker may register with", "SRTM_BROKER_TOKEN", _ACCESS
    )
    tls_cert: str | None = option(None, "Certificate (PEM); then all ports speak TLS", **_FILE)
    tls_key: str | None = option(None, "Private key of the certificate (PEM)", **_FILE)
    tls_root_ca_file: str | None = option(
        None, "CA file that verifies brokers and client certificates; then brokers must serve HTTPS", **_FILE
    )
    tls_client_auth_policy: str = option(
        "", f"Client certificates: {' or '.join(AUTH_POLICIES)}", "POLICY", panel=_ACCESS, shown="not required"
    )
    broker_model: str = option(
        DEFAULT_BROKER_MODEL, f"Broker model: {' or '.join(BROKER_MODELS)}", "MODEL", panel=_CAPACITY
    )
    calibration: str | None = option(None, "Broker model measured by srtm calibrate --out", "FILE", panel=_CAPACITY)
    mcap_mps: float | None = option(
        None, "Messages per second that a broker can carry", "RATE", panel=_CAPACITY, shown="from the model"
    )
    inactive_after_s: float = option(INACTIVE_AFTER_S, "Silence after which a broker is inactive", **_SECONDS)
    tombstone_s: float = option(TOMBSTONE_S, "Time that a tombstoned broker stays hidden", **_SECONDS)
    lease_s: float = option(30.0, "Time that a broker may use its full share without contact", **_SECONDS)
    safe_share: float = option(0.5, "Fraction of a share left after its lease", "FRACTION", panel=_TIMES)
    exchange_s: float = option(1.0, "Interval between exchanges with a broker", **_SECONDS)
    leader_lease_s: float = option(
        LEASE_S, "Time without contact to a shared store after which another controller leads", **_SECONDS
    )
    round_s: float = option(60.0, "Longest measurement of a round of a fitting", **_SECONDS)
    block_s: int = option(1, "Seconds that count as one observation of a round", min=1, **_SECONDS)
    log_format: str = option(*LOG_FORMAT, panel=_LOGS)
    log_level: str = option("info", *LOG_LEVEL, panel=_LOGS)
    # No flags: for tests.
    seed: int = 0
    move_s: float = 15.0
    calm_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse invalid values, listing all of them."""
        problems = [
            f"{_flag(name)} must be a port from 0 to 65535, not {value}"
            for name in ("tcp_port", "http_port", "web_port")
            if (value := getattr(self, name)) is not None and not 0 <= value <= 65535
        ]
        problems += [
            f"{_flag(each.name)} must be a number of seconds above 0, not {value}"
            for each in fields(self)
            if each.name.endswith("_s") and not 0 < (value := getattr(self, each.name)) < math.inf
        ]
        if not 0 <= self.safe_share <= 1:
            problems.append(f"--safe-share must be from 0 to 1, not {self.safe_share}")
        if self.mcap_mps is not None and not 0 < self.mcap_mps < math.inf:
            problems.append(f"--mcap-mps must be a rate above 0, not {self.mcap_mps}")
        try:
            shared = self.store_address.shared
        except InputError as problem:
            problems.append(str(problem))
        else:
            problems += self._store_problems(shared=shared)
        problems += self._tls_problems()
        if problems:
            raise InputError("; ".join(problems))

    def _tls_problems(self) -> list[str]:
        problems = []
        if bool(self.tls_cert) != bool(self.tls_key):
            problems.append("--tls-cert and --tls-key must be given together")
        if self.tls_root_ca_file and not self.tls_cert:
            problems.append("--tls-root-ca-file needs --tls-cert and --tls-key")
        if self.tls_client_auth_policy not in ("", *AUTH_POLICIES):
            known = " or ".join(AUTH_POLICIES)
            problems.append(f"--tls-client-auth-policy must be {known}, not {self.tls_client_auth_policy!r}")
        if self.tls_client_auth_policy and not self.tls_root_ca_file:
            problems.append("--tls-client-auth-policy needs --tls-root-ca-file to verify client certificates")
        for name in ("tls_cert", "tls_key", "tls_root_ca_file"):
            path = getattr(self, name)
            if path and (why := not_readable(path)):
                problems.append(f"{_flag(name)}: cannot read {path}: {why}")
        return problems

    def _store_problems(self, *, shared: bool) -> list[str]:
        problems = []
        if self.store is not None and self.data_path is not None:
            problems.append("--store and --data-path exclude each other; give one")
        if shared and self.leader_lease_s < _LEAST_LEASE_S:
            problems.append(f"--leader-lease-s must be at least {_LEAST_LEASE_S:g}, not {self.leader_lease_s}")
        if shared and self.tls_cert:
            problems.append(
                "--tls-cert excludes a store that controllers share (nats://), which pass requests on without TLS;"
                " use sqlite:FOLDER"
            )
        return problems

    @property
    def store_address(self) -> StoreAddress:
        """Where the store is."""
        return parse(self.store) if self.store is not None else StoreAddress(self.data_path)

    def tls(self, *, offered: bool = False) -> ssl.SSLContext | None:
        """The TLS context of its ports; None without a certificate. `offered`: clients may show a certificate."""
        if not self.tls_cert or not self.tls_key:
            return None
        required = bool(self.tls_client_auth_policy)
        try:
            return server_context(
                self.tls_cert,
                self.tls_key,
                self.tls_root_ca_file,
                min_version="tls1.2",
                client_certificates=required,
                offered=offered,
            )
        except BrokerError as problem:
            raise ControlError(str(problem)) from None

    def calibrated(self) -> tuple[ServiceModel, float]:
        """The cost of messages to a broker, and its mcap in messages per second."""
        model = broker_model(self.broker_model) if self.calibration is None else read_calibration(self.calibration)
        if self.mcap_mps is None and not model.mcap_mps:
            raise InputError(f"--broker-model {self.broker_model}: no rate keeps p99 within 1 ms; give --mcap-mps")
        return model.service, self.mcap_mps or model.mcap_mps

    @property
    def lease_ns(self) -> int:
        """A lease as brokers count it."""
        return round(self.lease_s * NS_PER_S)

    @property
    def longest_lease_ns(self) -> int:
        """The longest that a broker's lease may last by our clock."""
        return round(self.lease_ns * _CLOCKS) + _SLACK_NS

    @property
    def safe_percent(self) -> int:
        """The safe share as brokers are told it."""
        return round(100 * self.safe_share)

    @property
    def address(self) -> str:
        """The host that other machines connect to."""
        name = socket.gethostname() if self.host in _EVERYWHERE else self.host
        return self.broadcast_address or name


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
