from __future__ import annotations

import json
from pathlib import Path

import pytest

from srtm.cli.traces.brokers import fleet_from
from srtm.control.options import ControllerOptions
from srtm.errors import InputError
from srtm.model.broker_models import BrokerModel, ServiceModel
from srtm.workload.calibration import read_calibration

FOUND = {"read_ns": 40_000, "message_ns": 20_000, "base_ns": 100_000, "mcap_mps": 12_345.6}


def test_a_plan_and_a_controller_read_the_same_calibration(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(FOUND))
    known = BrokerModel(ServiceModel(40_000, 20_000, 100_000), 12_345.6)
    assert read_calibration(path) == known
    assert ControllerOptions(calibration=str(path)).calibrated() == (known.service, known.mcap_mps)
    (broker,) = fleet_from("1", calibration=path)
    assert (broker.model, broker.mcap_mps) == (known.service, None)  # by each topic's SLO and batches
    (broker,) = fleet_from("1", calibration=path, mcap_mps=50.0)
    assert (broker.model, broker.mcap_mps) == (known.service, 50)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", json.dumps({**FOUND, "read_ns": -1}), json.dumps({**FOUND, "mcap_mps": None})]
)
def test_what_is_not_a_calibration(text: str, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"is not a calibration .*; write one with srtm calibrate --out"):
        read_calibration(path)
    with pytest.raises(InputError, match="No such file"):
        read_calibration(tmp_path / "nowhere")
