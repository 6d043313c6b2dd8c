"""Paced brokers as processes: a small split does what the model says, and claims on such runs can fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from srtm.errors import InputError
from srtm.lab.claims import judge
from srtm.lab.live.gaps import Gaps, factor_for
from srtm.lab.live.paced import Laps, Paced
from srtm.lab.live.rows import PAPERS, row
from srtm.lab.result import Row, Rows
from srtm.lab.results import live
from srtm.lab.world import BROKERS, PAPERS_RULE, WITH_MARGIN
from srtm.units import NS_PER_MS, NS_PER_S
from srtm.workload.publishers import Arrivals, Population
from tests.programs import wait_for

SMALL = Paced(100, seconds=0.2, messages=600)


@pytest.mark.processes
def test_a_split_does_what_the_model_says() -> None:
    topic = SMALL.topic(Population(60, 100.0), 3, PAPERS_RULE)
    seen = SMALL.split(topic, "max_min", 2, 3, loads_kmps=(10, 40, 50, 60, 70, 80))
    assert seen.lost == 0
    assert seen.found.k == 2
    assert seen.found.latency.messages == len(topic.arrivals.times_ns)
    for name, simulated in seen.simulated.items():
        # Lateness of the host adds to the times of the model, and never takes from them.
        assert seen.found.by_broker[name].access == simulated.access
        assert seen.found.by_broker[name].processing.p50 >= simulated.processing.p50
    found = row(seen, PAPERS)
    assert float(found["p99_ms"]) >= float(found["simulated_p99_ms"])


@pytest.mark.processes
def test_the_controller_fits_paced_brokers() -> None:
    world = Paced(20, seconds=1.0, patience_s=120)
    aware, blind = world.fit(world.topic(Population(40, 50.0, batch=10, group_size=4), 1, WITH_MARGIN), 1, force=True)
    assert aware.over
    assert aware.found.rounds >= 1
    assert blind is not None
    assert blind.found.k == aware.found.k
    assert aware.found.latency.messages > 500


@pytest.mark.processes
def test_an_interrupted_run_ends_its_brokers(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "srtm", "lab", "run", "fig9a", "--live", "--tiny", "--pace", "10", "--together", "1"]
    ours = {**os.environ, "TMPDIR": str(tmp_path)}
    ignored = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # noqa: E731  as shells start background jobs
    with subprocess.Popen(
        [*run, "--out", str(tmp_path / "out")], env=ours, preexec_fn=ignored, stderr=subprocess.DEVNULL
    ) as process:
        while process.poll() is None and len(_processes_in(tmp_path)) < 1 + 1 + 1 + BROKERS:  # it, a cell, a controller
            time.sleep(0.1)
        process.terminate()
        assert process.wait(30) == 1
    wait_for(lambda: not _processes_in(tmp_path))


def _processes_in(folder: Path) -> list[str]:
    """Command lines of processes whose temporary folder this is."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"TMPDIR={folder}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


def test_laps_repeat_the_same_traffic() -> None:
    lap = Arrivals(np.array([1, 5]), np.array([0, 1], np.int32))
    times, senders = Laps((Population(2),), 30, 1, lap=lap, lap_ns=10).arrivals()
    assert times.tolist() == [1, 5, 11, 15, 21, 25]
    assert senders.tolist() == [0, 1] * 3


def test_the_factor_follows_from_gaps() -> None:
    assert [factor_for(late_ms) for late_ms in (0.1, 2, 2.1, 5, 19)] == [10, 10, 20, 30, 100]
    with pytest.raises(InputError, match=r"25 ms late .* give --pace"):
        factor_for(25)


def test_long_gaps_count_for_the_time_that_they_take() -> None:
    gaps = Gaps()
    for number in range(1_000):
        gaps._due_ns.append(number * NS_PER_MS)
        gaps._late_ns.append(21 * NS_PER_MS if number == 500 else 0)
    # 1,021 ms, of which 10.21 are at least so far from the end of the gap.
    assert gaps.beyond_ns() == 0
    gaps._late_ns[600] = 21 * NS_PER_MS
    assert gaps.beyond_ns(part=0.04) == 0
    assert gaps.row(0, NS_PER_S)["gap_ms"] == 21
    assert gaps.row(2 * NS_PER_S, 3 * NS_PER_S)["gap_ms"] == 0


BASE: Row = {"b_at": PAPERS, "simulated_p99_ms": 1.0, "scheduled_p99_ms": 1.0, "lost": 0, "process": "poisson"}


def holds(name: str, rows: list[Row]) -> dict[str, bool | None]:
    return {verdict.claim: verdict.holds for verdict in judge([live()[name]], {name: Rows(rows)})}


def test_claims_of_fig7_are_those_of_the_simulated_form_and_the_models() -> None:
    rows: list[Row] = [
        {**BASE, "publishers": n, "policy": policy, "k": k, "p99_ms": p99, "simulated_p99_ms": p99 * 0.9}
        for n, policy, k, p99 in (
            (1_000, "lb", 6, 10.0),
            (1_000, "conc", 1, 0.3),
            (4_000, "lb", 6, 3.0),
            (4_000, "conc", 1, 0.4),
        )
    ]
    found = holds("fig7a-live", rows)
    assert found.pop("so does the simulator, from the schedule") is False
    assert set(found.values()) == {True}
    worse = holds("fig7a-live", [{**each, "p99_ms": 2.0, "lost": 1} for each in rows])
    assert worse["Conc meets the SLO for every number of publishers"] is False
    assert worse["no message is lost"] is False
    assert worse["the model gives the recorded p99, from the recorded arrivals (within 15 %)"] is False


def test_claims_of_searches_can_fail() -> None:
    def rows(k: int, rounds: int, p99_ms: float) -> list[Row]:
        fit: Row = {"iterations": "1:1 2:1", "fit_met": True, "fit_over": True, "sim_k": 2, "sim_rounds": 2}
        return [
            {
                **BASE,
                **fit,
                "group_size": size,
                "policy": policy,
                "k": k if policy == "srtm" and size > 5 else 1,
                "rounds": rounds if size > 5 else 1,
                "p99_ms": p99_ms if policy == "srtm" else 5.0,
                "access_p99_ms": 0.1,
            }
            for size in (5, 10, 30)
            for policy in ("srtm", "max_min")
        ]

    good = holds("table1-live", rows(2, 2, 0.8))
    assert set(good.values()) == {True}
    bad = holds("table1-live", rows(4, 20, 0.8))
    assert bad["k within one of the same search in simulation"] is False
    assert bad["no more rounds than the paper's search"] is False
    assert holds("fig9a-live", rows(2, 2, 0.8))["every run of SRTM is faster than every run of Max-Min"] is True
    assert holds("fig9a-live", rows(2, 2, 6.0))["every run of SRTM is faster than every run of Max-Min"] is False
