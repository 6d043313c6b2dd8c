from __future__ import annotations

import pytest

from srtm.control.options import ControllerOptions
from srtm.errors import InputError
from srtm.model.broker_models import BROKER_MODELS, DEFAULT_BROKER_MODEL, BrokerModel, ServiceModel, broker_model
from srtm.sim import SimulatedBroker
from srtm.units import NS_PER_MS


def test_plans_simulations_and_controllers_assume_the_same_broker() -> None:
    usual = BROKER_MODELS[DEFAULT_BROKER_MODEL]
    simulated = SimulatedBroker("b")
    assert broker_model() == usual
    assert (simulated.model, simulated.mcap_mps) == (usual.service, usual.mcap_mps)
    assert ControllerOptions().calibrated() == (usual.service, usual.mcap_mps)


@pytest.mark.parametrize("name", BROKER_MODELS)
def test_a_model_is_chosen_by_name(name: str) -> None:
    known = BROKER_MODELS[name]
    assert SimulatedBroker.like(name, "b") == SimulatedBroker("b", known.mcap_mps, known.service)
    assert ControllerOptions(broker_model=name).calibrated() == (known.service, known.mcap_mps)


def test_our_mcap_is_what_the_model_carries_within_the_default_slo() -> None:
    ours = BROKER_MODELS["srtm-broker"]
    assert ours.mcap_mps == pytest.approx(ours.service.mcap_mps(NS_PER_MS), rel=0.05)


def test_three_costs_are_a_model_whose_mcap_follows() -> None:
    service = ServiceModel(9_000, 8_000, 150_000)
    assert broker_model("9000, 8000,150000") == BrokerModel(service, service.mcap_mps(NS_PER_MS))
    slow = "9000,8000,2000000"  # even an idle broker takes 2 ms
    assert broker_model(slow).mcap_mps == 0
    with pytest.raises(InputError, match="give --mcap-mps"):
        ControllerOptions(broker_model=slow).calibrated()
    assert ControllerOptions(broker_model=slow, mcap_mps=5.0).calibrated()[1] == 5


@pytest.mark.parametrize("text", ["", "paper", "1,2", "1,2,x", "1,2,3,4", "-1,2,3"])
def test_an_unknown_model_is_answered_with_the_known_ones(text: str) -> None:
    with pytest.raises(InputError, match=r"unknown broker model .*; known models: srtm-broker, paper-testbed"):
        broker_model(text)
