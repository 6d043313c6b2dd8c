"""All settings of a controller with their defaults; flags derive from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from srtm.model.service import PRESETS, ServiceModel


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """What a controller is told at its start."""

    host: str = "127.0.0.1"
    lease_s: float = 30.0
    exchange_s: float = 1.0
    safe_share: float = 0.5
    mcap_mps: float = 12_000.0
    service: ServiceModel = field(default_factory=lambda: PRESETS["paper-testbed"])
    seed: int = 0
    move_s: float = 15.0
    calm_s: float = 30.0
