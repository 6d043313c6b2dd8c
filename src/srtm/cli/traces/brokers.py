"""`--brokers N|FILE`: the brokers that a plan is for."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from srtm.errors import InputError
from srtm.model.broker_models import DEFAULT_BROKER_MODEL, ServiceModel, broker_model
from srtm.workload.calibration import read_calibration

if TYPE_CHECKING:
    from srtm.sim.simulate import SimulatedBroker


def fleet_from(
    brokers: str,
    model: str = DEFAULT_BROKER_MODEL,
    calibration: Path | None = None,
    mcap_mps: float | None = None,
    load: float = 0.0,
    load_batch: int = 10,
) -> list[SimulatedBroker]:
    """Identical brokers, or those that a file describes."""
    from srtm.model.server import Background
    from srtm.sim.simulate import SimulatedBroker

    known = broker_model(model) if calibration is None else read_calibration(calibration)
    if mcap_mps is not None and not 0 < mcap_mps < math.inf:
        raise InputError(f"--mcap-mps must be a rate above 0, not {mcap_mps:g}")
    if not brokers.isdigit():
        return _described(Path(brokers), known.service, mcap_mps)
    if not 1 <= int(brokers) <= 10_000:
        raise InputError(f"--brokers must be from 1 to 10,000, not {brokers}")
    background = Background(load, load_batch) if load else None
    if load > (most := known.service.most_mps(load_batch) if mcap_mps is None else mcap_mps):
        raise InputError(f"--load {load:g} exceeds the {most:,.0f} msg/s that a broker can carry (--mcap-mps)")
    return [SimulatedBroker(f"broker-{n + 1}", mcap_mps, known.service, background) for n in range(int(brokers))]


def _described(path: Path, usual: ServiceModel, usual_mcap_mps: float | None) -> list[SimulatedBroker]:
    """Brokers from a file: [{"broker", "mcap", "load", "load_batch", "read_ns", …}, …]."""
    from srtm.model.server import Background
    from srtm.sim.simulate import SimulatedBroker

    try:
        listed = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"--brokers: cannot read {path}: {error.strerror}; give a number or a JSON file") from None
    except ValueError as error:
        raise InputError(f"--brokers: {path} is not JSON: {error}") from None
    if not isinstance(listed, list) or not all(isinstance(entry, dict) and "broker" in entry for entry in listed):
        raise InputError(f'--brokers: {path} must hold a list of brokers, [{{"broker": name, "mcap": msg/s, …}}]')
    costs = [field.name for field in fields(ServiceModel)]
    known = {"broker", "mcap", "load", "load_batch", *costs}
    fleet = []
    for entry in listed:
        if unknown := sorted(entry.keys() - known):
            raise InputError(f"--brokers: unknown key {unknown[0]!r} in {path}; known keys: {', '.join(sorted(known))}")
        where = f"--brokers: {path}, broker {entry['broker']!r}"
        wrong = [name for name, value in entry.items() if name != "broker" and not _is_amount(value)]
        if wrong:
            raise InputError(f"{where}: {wrong[0]} must be a number of at least 0, not {entry[wrong[0]]!r}")
        mcap, load = entry.get("mcap", usual_mcap_mps), entry.get("load", 0)
        try:
            service = replace(usual, **{name: entry[name] for name in costs if name in entry})
            background = Background(load, entry.get("load_batch", 10))
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        if load > (most := service.most_mps(background.batch) if mcap is None else mcap):
            raise InputError(f"{where}: load of {load:g} msg/s exceeds mcap of {most:g}")
        fleet.append(SimulatedBroker(str(entry["broker"]), mcap, service, background if load else None))
    names = [broker.name for broker in fleet]
    if not fleet or len(set(names)) < len(names):
        raise InputError(f"--brokers: {path} must list brokers with different names, not {names}")
    return fleet


def _is_amount(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf  # type: ignore[operator]
