"""Costs that made some loads are found again from what those loads show, and predict others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from srtm.model.broker_models import ServiceModel
from srtm.model.calibration import Observed, calibrated, quantiles_of
from srtm.model.service import busy_share, processing_latencies
from srtm.units import NS_PER_S

TRUE = ServiceModel(16_000, 5_000, 60_000, wake_ns=50_000, rest_ns=30_000)


def observed(rate_mps: int, batch: int, model: ServiceModel, noise_ns: int = 0, seed: int = 1) -> Observed:
    """A load of ten seconds on a broker with these costs; one message in thirty is delayed by the host."""
    rng = np.random.default_rng(seed)
    reads = np.sort(rng.integers(0, 10 * NS_PER_S, 10 * rate_mps // batch))
    times, senders = np.repeat(reads, batch), np.repeat(np.arange(len(reads), dtype=np.int32), batch)
    took = processing_latencies(times, times, senders, model) + noise_ns * (rng.random(len(times)) < 1 / 30)
    cpu_ns = busy_share(times, senders, model) * int(times[-1] - times[0]) / len(times)
    return Observed(times, senders, cpu_ns, quantiles_of(took))


@pytest.mark.parametrize(
    "true", [TRUE, ServiceModel(48_000, 23_000, 190_000), replace(TRUE, wake_ns=10_000, message_ns=9_000)], ids=str
)
def test_costs_are_found_again_and_predict(true: ServiceModel) -> None:
    busy_mps = round(0.8 * NS_PER_S / (true.wake_ns + true.cost_ns(1)))
    found = calibrated(observed(500, 1, true), observed(5_000, 10, true), observed(busy_mps, 1, true, seed=2))
    for name in ("read_ns", "message_ns"):
        assert getattr(found.service, name) == pytest.approx(getattr(true, name), rel=0.15)
    both = found.service.wake_ns + found.service.rest_ns
    assert both == pytest.approx(true.wake_ns + true.rest_ns, abs=0.1 * (true.wake_ns + true.read_ns))
    for part, batch in ((0.3, 1), (0.7, 1), (0.5, 10)):
        load = observed(round(part * true.most_mps(batch)), batch, true, seed=9)
        p50_ns, p99_ns = found.predicted_ns(load.times_ns, load.publisher_of)
        assert p50_ns == pytest.approx(load.quantiles_ns[1], rel=0.1)
        assert p99_ns == pytest.approx(load.quantiles_ns[3], rel=0.15)


def test_tails_that_the_model_does_not_explain_are_kept_apart() -> None:
    loads = [observed(rate, batch, TRUE, 150_000) for rate, batch in ((500, 1), (5_000, 10), (10_000, 1))]
    found = calibrated(*loads)
    assert found.tail > 1.3
    assert found.service.message_ns == pytest.approx(TRUE.message_ns, rel=0.15)
    load = observed(12_000, 1, TRUE, 150_000, seed=7)
    assert found.predicted_ns(load.times_ns, load.publisher_of)[1] == pytest.approx(load.quantiles_ns[3], rel=0.25)
