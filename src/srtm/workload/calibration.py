"""Calibration files: the broker model that `srtm calibrate --out` measured on a host."""

from __future__ import annotations

import json
from pathlib import Path

from srtm.errors import InputError
from srtm.model.broker_models import BrokerModel, ServiceModel


def read_calibration(path: str | Path) -> BrokerModel:
    """The broker model in the file; InputError if it is not a calibration."""
    try:
        found = json.loads(Path(path).read_text())
        later = {
            name: found[name] for name in ("serial_ns", "cores", "wake_ns", "rest_ns") if name in found
        }  # older files have none
        service = ServiceModel(found["read_ns"], found["message_ns"], found["base_ns"], **later)
        return BrokerModel(service, float(found["mcap_mps"]))
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise InputError(
            f"{path} is not a calibration ({problem}); write one with srtm calibrate --out {path}"
        ) from None
