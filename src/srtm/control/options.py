"""All settings of a controller with their defaults; flags derive from those that have a help text."""

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
    """The port in a flag; `none` is none."""
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{text!r} is no port: give a number from 0 to 65535, or none") from None


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """What a controller is told at its start."""

    host: str = _option("127.0.0.1", "Address to listen on; this machine alone unless given.")
    tcp_port: int = _option(4160, "Port that brokers register at; 0 takes a free one.")
    http_port: int = _option(4161, "Port of HTTP; 0 takes a free one.")
    web_port: int | None = _option(
        4171, "Port of the page; 0 takes a free one, none serves none.", metavar="PORT", parser=port_or_none
    )
    broadcast_address: str | None = _option(None, "Where brokers reach its HTTP (the host it listens on, or its name).")
    data_path: str | None = _option(None, "A folder for what must outlive a restart (kept in memory, without).")
    token: str | None = _option(
        None, "What whoever changes anything under /v1 has to show (nothing, without).", envvar="SRTM_TOKEN"
    )
    control_token: str | None = _option(None, "What it shows to brokers.", envvar="SRTM_CONTROL_TOKEN")
    inactive_after_s: float = _option(INACTIVE_AFTER_S, "Seconds of silence until a broker is left out.")
    tombstone_s: float = _option(TOMBSTONE_S, "Seconds that a tombstoned broker is left out of its topic.")
    lease_s: float = _option(30.0, "Seconds that a broker may use its whole share without hearing of the controller.")
    exchange_s: float = _option(1.0, "Seconds between two exchanges with a broker.")
    safe_share: float = _option(0.5, "What is left of a share when its lease has ended, 0 to 1.")
    calibration: str | None = _option(None, "What srtm calibrate --out wrote on the brokers' hosts.")
    mcap_mps: float | None = _option(None, "Messages a second that a broker can take (from the calibration).")
    log_format: str = _option("text", "How it writes its log: text or json.")
    log_level: str = _option("info", "From what on: debug, info, warning or error.")
    recover: bool = _option(False, "Begin with an empty store, and rebuild it from what brokers report.")
    seed: int = 0
    move_s: float = 15.0
    calm_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what cannot be, all of it at once."""
        problems = [
            f"{name} is a port from 0 to 65535, not {value}"
            for name in ("tcp_port", "http_port", "web_port")
            if (value := getattr(self, name)) is not None and not 0 <= value <= 65535
        ]
        problems += [
            f"{each.name} is a number of seconds above 0, not {value}"
            for each in fields(self)
            if each.name.endswith("_s") and not 0 < (value := getattr(self, each.name)) < math.inf
        ]
        if not 0 <= self.safe_share <= 1:
            problems.append(f"safe_share is from 0 to 1, not {self.safe_share}")
        if self.mcap_mps is not None and not 0 < self.mcap_mps < math.inf:
            problems.append(f"mcap_mps is a rate above 0, not {self.mcap_mps}")
        if problems:
            raise InputError("; ".join(problems))

    def calibrated(self) -> tuple[ServiceModel, float]:
        """What a message costs a broker, and how many a second it can take."""
        from srtm.model.service import PRESETS, ServiceModel  # brings a compiler along, for which nobody should wait

        service, found_mps = PRESETS["srtm-broker"], _DEFAULT_MCAP_MPS
        if self.calibration is not None:
            try:
                found = json.loads(Path(self.calibration).read_text())
                service = ServiceModel(found["read_ns"], found["message_ns"], found["base_ns"])
                found_mps = float(found["mcap_mps"])
            except (OSError, ValueError, KeyError, TypeError) as problem:
                raise InputError(
                    f"{self.calibration} is no calibration ({problem}): write one with srtm calibrate --out"
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
        """Where others reach it."""
        name = socket.gethostname() if self.host in _EVERYWHERE else self.host
        return self.broadcast_address or name
