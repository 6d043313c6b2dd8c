"""All settings of a controller with their defaults; those with a help text become flags."""

from __future__ import annotations

import json
import math
import socket
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srtm.control.discovery.registry import INACTIVE_AFTER_S, TOMBSTONE_S
from srtm.errors import InputError
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from srtm.model.service import ServiceModel

_DEFAULT_MCAP_MPS = 11_000.0  # of the preset srtm-broker, for a p99 of 1 ms
_EVERYWHERE = ("", "0.0.0.0", "::")
_CLOCKS = 1.02  # our clock may run faster than a broker's by this factor
_SLACK_NS = 300_000_000  # a busy broker notices the end of its lease a little late


def _option(default: Any, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": text, **more})


def port_or_none(text: str) -> int | None:
    """The port in a flag; None for `none`."""
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise InputError(f"invalid port {text!r}; give a number from 0 to 65535, or none") from None


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """Settings of a controller."""

    host: str = _option("127.0.0.1", "Address to listen on.")
    tcp_port: int = _option(4160, "TCP port where brokers register; 0 picks a free one.")
    http_port: int = _option(4161, "HTTP port; 0 picks a free one.")
    web_port: int | None = _option(
        4171, "Port of the page; 0 picks a free one, none serves no page.", metavar="PORT", parser=port_or_none
    )
    broadcast_address: str | None = _option(
        None, "Address that brokers are told (default: --host, or the host's name)."
    )
    data_path: str | None = _option(None, "Folder for state that must survive a restart (default: memory only).")
    token: str | None = _option(None, "Token that changes under /v1 require (default: none).", envvar="SRTM_TOKEN")
    control_token: str | None = _option(None, "Token to send to brokers.", envvar="SRTM_CONTROL_TOKEN")
    inactive_after_s: float = _option(INACTIVE_AFTER_S, "Seconds of silence before discovery omits a broker.")
    tombstone_s: float = _option(TOMBSTONE_S, "Seconds that discovery omits a tombstoned broker from a topic.")
    lease_s: float = _option(30.0, "Seconds that a broker may use its whole share without hearing from the controller.")
    exchange_s: float = _option(1.0, "Seconds between exchanges with a broker.")
    safe_share: float = _option(0.5, "Part of a share that a broker keeps when its lease ends, 0 to 1.")
    calibration: str | None = _option(None, "File that srtm calibrate --out wrote on a broker's host.")
    mcap_mps: float | None = _option(
        None, "Capacity of a broker in messages per second (default: from the calibration)."
    )
    log_format: str = _option("text", "Log format: text or json.")
    log_level: str = _option("info", "Minimum log level: debug, info, warning or error.")
    recover: bool = _option(False, "Start with an empty store and rebuild it from what brokers report.")
    seed: int = 0
    move_s: float = 15.0
    calm_s: float = 30.0

    def __post_init__(self) -> None:
        """Raise InputError that lists all invalid settings."""
        problems = [
            f"{name} must be a port from 0 to 65535, not {value}"
            for name in ("tcp_port", "http_port", "web_port")
            if (value := getattr(self, name)) is not None and not 0 <= value <= 65535
        ]
        problems += [
            f"{each.name} must be a number of seconds above 0, not {value}"
            for each in fields(self)
            if each.name.endswith("_s") and not 0 < (value := getattr(self, each.name)) < math.inf
        ]
        if not 0 <= self.safe_share <= 1:
            problems.append(f"safe_share must be from 0 to 1, not {self.safe_share}")
        if self.mcap_mps is not None and not 0 < self.mcap_mps < math.inf:
            problems.append(f"mcap_mps must be a rate above 0, not {self.mcap_mps}")
        if problems:
            raise InputError("; ".join(problems))

    def calibrated(self) -> tuple[ServiceModel, float]:
        """The cost of a message at a broker, and the capacity of a broker in messages per second."""
        from srtm.model.service import PRESETS, ServiceModel  # slow: it imports a compiler

        service, found_mps = PRESETS["srtm-broker"], _DEFAULT_MCAP_MPS
        if self.calibration is not None:
            try:
                found = json.loads(Path(self.calibration).read_text())
                service = ServiceModel(found["read_ns"], found["message_ns"], found["base_ns"])
                found_mps = float(found["mcap_mps"])
            except (OSError, ValueError, KeyError, TypeError) as problem:
                raise InputError(
                    f"cannot use calibration {self.calibration}: {problem}; write one with srtm calibrate --out"
                ) from None
        return service, self.mcap_mps if self.mcap_mps is not None else found_mps

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
        """The address that others are told."""
        name = socket.gethostname() if self.host in _EVERYWHERE else self.host
        return self.broadcast_address or name
