"""The demo's city and its judgement: the contract is one that a profile gives; what spoilt a run is said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from srtm.model import scan
from srtm.model.bucket import TokenBucket
from srtm.model.placement import Broker, Publisher, place
from srtm.model.profile import profile
from srtm.units import NS_PER_MS, NS_PER_S, percentile
from tests.conftest import ROOT

TRANSPORT = ROOT / "examples" / "transport"


@pytest.fixture
def city(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TRANSPORT))
    return import_module("city")


@pytest.fixture
def fairness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TRANSPORT))
    return import_module("fairness")


def traffic(city: ModuleType, seconds: float) -> tuple[Any, Any]:
    """When messages arrive, in ns, and of which sensor they are, by number."""
    reports = sorted(
        (int(at * NS_PER_S), junction * city.SENSORS + sensor)
        for junction in range(city.JUNCTIONS)
        for at in city.changes(junction, seconds)
        for sensor in range(city.SENSORS)
    )
    times, sensors = np.array(reports).T
    return np.repeat(times, city.BATCH), np.repeat(sensors, city.BATCH)


def test_the_contract_is_the_profile_of_ten_minutes(city: ModuleType) -> None:
    times, _ = traffic(city, 600)
    bucket = profile(times, headroom="1.3", quantile="0.999").bucket
    assert {"r": bucket.r, "b": bucket.b} == city.CONTRACT


def test_one_bucket_has_room_for_a_stall_and_a_blind_split_has_not_enough(city: ModuleType) -> None:
    times, sensors = traffic(city, 20)
    r, b = city.CONTRACT["r"], city.CONTRACT["b"]
    late = np.sort(np.where((times > 12e9) & (times < 12.3e9), int(12.3e9), times))  # 300 ms of the machine's
    assert percentile(scan.access_delays(late, TokenBucket.of(r, b)), "0.99") == 0
    roster = [Publisher(each["id"], each["rate"], each["group"]) for each in city.sensors()]
    broker_of = place(roster, [Broker(f"broker-{n}", 1e5) for n in range(1, 5)], "lb").broker_of[sensors]
    share = TokenBucket.of(r / 4, b / 4)
    waits = np.concatenate([scan.access_delays(times[broker_of == n], share) for n in range(4)])
    assert percentile(waits, "0.99") > 200 * NS_PER_MS


def test_r_in_force_is_what_the_controller_says_or_what_brokers_have(fairness: ModuleType) -> None:
    topic = {"r": 100.0, "brokers": [{"r": 25.0}, {"r": 50.0}], "access_ms": {"p99": 3.0}}
    assert fairness.Sample.of(1.0, topic) == fairness.Sample(1.0, 0.75, 3.0, ())
    told = {
        **topic,
        "access_ms": None,
        "shares": {"in_force_ratio": 0.5, "short_since_s": 2.0, "waits_for": ["broker-1"]},
    }
    assert fairness.Sample.of(1.0, told) == fairness.Sample(1.0, 0.5, None, ("broker-1",))


@pytest.mark.parametrize(
    ("in_force", "lost_s", "k", "access_ms", "told"),
    [
        (1.0, 0.05, 1, 0.0, []),
        (0.98, 0.0, 1, 0.0, ["at times only"]),
        (1.0, 0.2, 1, 0.0, ["the host stalled"]),
        (1.0, 0.2, 1, 90.0, ["the host stalled"]),
        (1.0, 0.2, 4, 90.0, []),
        (0.5, 0.2, 1, 90.0, ["at times only", "the host stalled"]),
    ],
)
def test_what_spoilt_a_run_that_missed_its_slo(
    fairness: ModuleType, in_force: float, lost_s: float, k: int, access_ms: float, told: list[str]
) -> None:
    samples = [fairness.Sample(at, force, 1.0) for at, force in ((0.0, 0.1), (11.0, 1.0), (12.0, in_force))]
    host = [fairness.Second(0.5, 3.0, 3.0), fairness.Second(11.5, 0.1, lost_s)]
    recorded = fairness.Stretch.between(10.0, 20.0, samples, host)
    assert recorded.longest_stall_s == 0.1
    seen = {"k": k, "slo_ms": 50.0, "slo_met": False, "access_ms": {"p99": access_ms}}
    causes = fairness.causes("srtm", seen, recorded)
    assert len(causes) == len(told)
    assert all(f"The run under srtm is not valid: {words}" in cause for words, cause in zip(told, causes, strict=True))
    assert not fairness.Stretch.between(10.0, 11.5, samples, []).short


@pytest.mark.processes
def test_the_probe_notices_a_stall() -> None:
    with subprocess.Popen([sys.executable, str(TRANSPORT / "probe.py")], stdout=subprocess.PIPE) as probe:
        assert probe.stdout is not None
        probe.stdout.readline()
        os.kill(probe.pid, signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(probe.pid, signal.SIGCONT)
        seconds = [json.loads(probe.stdout.readline()) for _ in range(2)]
        probe.terminate()
    assert max(second["longest_s"] for second in seconds) > 0.25
    assert max(second["lost_s"] for second in seconds) > 0.25
