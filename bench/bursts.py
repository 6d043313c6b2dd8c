"""`python -m bench.bursts [tables|split|virtual|live]`: b split by bursts against b split by rates, in turn.

tables: Table 1 and Fig. 9 in simulation, with b at 99 % (the paper's rule) and at 99.5 %.
split: shares from one trace, judged in that trace and in another one, in simulation, without a fitting.
virtual: 1,000 publishers, real controllers and brokers' gates in virtual time, of this tree and of another one
(--before), which splits by rates.
live: the same on live clusters.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np

from bench import host
from bench.cluster import cluster, load
from srtm.control.members import DeclaredPublisher
from srtm.control.options import ControllerOptions
from srtm.control.placing.expected import expected
from srtm.control.reports import KEPT_S
from srtm.control.store import Store
from srtm.lab import burst_split
from srtm.lab.fig9 import GROUP_SIZES, population
from srtm.lab.result import Row
from srtm.lab.world import QUANTILES, WITH_MARGIN, Simulated, brokers, facts
from srtm.model import scan
from srtm.model.bucket import TokenBucket
from srtm.model.latency import SLO, Sketch
from srtm.model.profile import profile
from srtm.model.split import split
from srtm.protocol.exchange import Contract
from srtm.sim.simulate import SimulatedCluster, SimulatedTopic, assess
from srtm.testing.virtual import VirtualCluster
from srtm.units import NS_PER_MS, NS_PER_S, percentile
from srtm.workload.publishers import Population, Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

_simulate: Any = sys.modules["srtm.sim.simulate"]  # the package exports a function of that name


class ByRates(SimulatedCluster):
    """Brokers in virtual time whose shares of b are as their shares of r."""

    def _shares(self, broker_of: Any, dealt: Any) -> dict[int, TokenBucket]:
        by_bursts, roster = super()._shares(broker_of, dealt), self._roster
        rates = roster.rates_by_broker(broker_of, len(self._brokers)).tolist()
        left = roster.rate - sum(rates)
        shares = split(self._topic.bucket, [rates[broker] for broker in by_bursts], unused=(left, left))
        return dict(zip(by_bursts, shares, strict=True))


RULES: dict[str, type[SimulatedCluster]] = {"rates": ByRates, "bursts": SimulatedCluster}


@contextmanager
def sharing_by(rule: str) -> Iterator[None]:
    _simulate.SimulatedCluster = RULES[rule]
    try:
        yield
    finally:
        _simulate.SimulatedCluster = SimulatedCluster


def tables(options: argparse.Namespace) -> None:
    world = Simulated(options.seconds)
    print(f"{'process':<10}{'group':>6}{'b at':>8}  {'b by':<8}{'k':>6}{'rounds':>8}{'p99 ms':>8}{'SLO met':>9}")
    for process in ("poisson", "periodic"):
        for size in GROUP_SIZES:
            for name, quantile in QUANTILES.items():
                found: dict[str, list[Row]] = {rule: [] for rule in RULES}
                for seed in range(options.runs):
                    topic = world.topic(population({"group_size": size, "process": process}), seed, quantile)
                    for rule, rows in found.items():
                        with sharing_by(rule):
                            rows.append(facts(world.fit(topic, "srtm", seed)))
                for rule, rows in found.items():
                    k, rounds, p99_ms, met = (
                        statistics.mean(float(row[what]) for row in rows)
                        for what in ("k", "rounds", "p99_ms", "meets_slo")
                    )
                    print(
                        f"{process:<10}{size:>6}{name:>8}  {rule:<8}{k:>6.1f}{rounds:>8.1f}{p99_ms:>8.2f}{met:>9.0%}",
                        flush=True,
                    )


def splits(options: argparse.Namespace) -> None:
    """Shares from one trace, judged by p99 access at the worst broker in the same trace and in another one."""
    print(f"{'topic':<30}{'k':>3}{'one bucket':>12}{'by rates':>10}{'by bursts':>11}{'same trace, by bursts':>23}")
    whole = [(f"groups of {size}", (population({"group_size": size}),)) for size in burst_split.SIZES]
    one = [
        (f"a group of {size} among singles", (replace(IN_GROUPS, publishers=size, group_size=size), SINGLES))
        for size in (10, 31)
    ]
    for (name, populations), k in product([*whole, *one], burst_split.KS):
        found: defaultdict[str, list[float]] = defaultdict(list)
        for seed in range(options.runs):
            topic, later = (_topic(populations, options.seconds, each) for each in (seed, seed + 1_000))
            placed = assess(topic, brokers(), "srtm", k, SLO(), seed=seed)
            by_bursts = list(placed.shares.values())
            by_rates = split(topic.bucket, [share.r_mtps for share in by_bursts])
            found["one bucket"].append(_worst_ms(later, np.zeros_like(placed.broker_of), [topic.bucket]))
            found["by rates"].append(_worst_ms(later, placed.broker_of, by_rates))
            found["by bursts"].append(_worst_ms(later, placed.broker_of, by_bursts))
            found["same"].append(_worst_ms(topic, placed.broker_of, by_bursts))
        means = [statistics.mean(tails) for tails in found.values()]
        print(f"{name:<30}{k:>3}{means[0]:>12.2f}{means[1]:>10.2f}{means[2]:>11.2f}{means[3]:>23.2f}", flush=True)


IN_GROUPS, SINGLES = Population(1_000, batch=10, prefix="grouped"), Population(990, prefix="single")


def _topic(populations: tuple[Population, ...], seconds: int, seed: int) -> SimulatedTopic:
    workload = Workload(populations, seconds * NS_PER_S, seed)
    arrivals = workload.arrivals()
    return SimulatedTopic(workload.publishers(), arrivals, profile(arrivals.times_ns, quantile=WITH_MARGIN).bucket)


def _worst_ms(topic: SimulatedTopic, broker_of: NDArray[np.int32], shares: list[TokenBucket]) -> float:
    times, senders = topic.arrivals
    brokers_of = broker_of[senders].astype(np.int32)
    delays = scan.split_access_delays(times, brokers_of, shares)
    tails = [percentile(delays[brokers_of == number], "0.99") for number in range(len(shares))]
    return max(tails) / NS_PER_MS


@contextmanager
def sources(tree: Path) -> Iterator[None]:
    """Commands run from another tree."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = str(tree / "src")
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = before


def trees(options: argparse.Namespace) -> dict[str, Path]:
    if options.before is None:
        raise SystemExit("give --before TREE: a checkout that splits b by rates")
    return {"rates": options.before.absolute(), "bursts": Path(__file__).parent.parent}


def virtual(options: argparse.Namespace) -> None:
    found: dict[tuple[int, str], list[float]] = {}
    print(f"{'run':<4}{'group':>6}  {'b by':<8}{'k':>3}{'p99 access ms at the worst broker':>35}")
    for run in range(options.runs):
        for size, (rule, tree) in product(options.group_sizes, trees(options).items()):
            command = [sys.executable, "-m", "bench.bursts", "one", *(f"--group-sizes {size} --runs {run + 1}").split()]
            for name in ("seconds", "brokers", "mcap", "publishers", "rate", "quantile"):
                command += [f"--{name}", str(getattr(options, name))]
            with sources(tree):
                done = subprocess.run(command, capture_output=True, text=True, check=True)
            k, worst = json.loads(done.stdout.splitlines()[-1])
            found.setdefault((size, rule), []).append(worst)
            print(f"{run + 1:<4}{size:>6}  {rule:<8}{k:>3}{worst:>35.3f}", flush=True)
    summed_up(found)


def one(options: argparse.Namespace) -> None:
    """One run in virtual time; `runs` is its seed."""
    (size,), rate = options.group_sizes, options.rate
    publishers = [DeclaredPublisher(f"p{n}", rate, f"g{n // size}") for n in range(options.publishers)]
    bucket = profile(expected(publishers, options.runs).times_ns, quantile=options.quantile).bucket
    world = VirtualCluster(options.runs, ControllerOptions(mcap_mps=options.mcap), Store(), options.brokers)
    assert world.controller
    topic = world.controller.create("t", Contract(bucket.r_mtps, bucket.b_ntok, fit="none"), world.now_ns)
    world.run(1)
    world.publish("t", publishers)
    access: dict[str, Sketch] = {}
    world.run(2)  # until the contract is open and publishers are in place
    for _ in range(options.seconds // KEPT_S):
        world.run(KEPT_S)
        for broker, seen in topic.layout.seen.items():
            access.setdefault(broker, Sketch()).add(seen.access)
    worst_ns = max(sketch.quantile_ns("0.99") for sketch in access.values())
    print(json.dumps([len(topic.layout.place.brokers), worst_ns / NS_PER_MS]))


def summed_up(found: Mapping[tuple[int, str], list[float]]) -> None:
    for (size, rule), tails in found.items():
        print(
            f"groups of {size}, b by {rule}: p99 access at the worst broker {statistics.median(tails):.3f} ms (median),"
            f" {statistics.mean(tails):.3f} (mean), {max(tails):.3f} (most)"
        )


def live(options: argparse.Namespace) -> None:
    """The controller remembers ten seconds; it is asked at the end of each ten."""
    print(f"{'run':<4}{'group':>6}  {'b by':<8}{'k':>3}{'load late ms':>14}  p99 access ms at the worst, by 10 s")
    found: dict[tuple[int, str], list[float]] = {}
    for run in range(options.runs):
        for size, (rule, tree) in product(options.group_sizes, trees(options).items()):
            options.group_size = size
            with sources(tree), cluster(options.brokers, "--mcap-mps", str(options.mcap)) as url:
                sending = load(url, "t", options, "srtm", run + 1, "none")
                tails, k = _tails(url, sending)
                out, _ = sending.communicate()
            late = float(json.loads(out)["lateness_ms"]["p99"])
            found.setdefault((size, rule), []).append(max(tails))
            shown = "  ".join(f"{tail:.2f}" for tail in tails)
            print(f"{run + 1:<4}{size:>6}  {rule:<8}{k:>3}{late:>14.2f}  {shown}", flush=True)
    summed_up(found)


def _tails(url: str, sending: subprocess.Popen[str]) -> tuple[list[float], int]:
    tails: list[float] = []
    k = 0
    with httpx.Client(base_url=url, trust_env=False, timeout=10.0) as client:
        while sending.poll() is None and not client.get("/v1/topics/t").is_success:
            time.sleep(0.1)
        began = time.monotonic()
        while sending.poll() is None:
            if time.monotonic() - began >= KEPT_S * (len(tails) + 1):
                topic = client.get("/v1/topics/t").json()
                tails.append(max(each["access_ms"]["p99"] for each in topic["brokers"] if each["access_ms"]))
                k = topic["k"]
            time.sleep(0.1)
    return tails, k


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.bursts", description=__doc__)
    parser.add_argument("part", nargs="?", choices=("tables", "split", "virtual", "one", "live"), default="tables")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--before", type=Path, help="virtual, live: a tree that splits b by rates")
    parser.add_argument("--brokers", type=int, default=3, help="virtual, live")
    parser.add_argument("--mcap", type=float, default=900.0, help="virtual and live: low enough for several brokers")
    parser.add_argument("--publishers", type=int, default=1_000, help="virtual, live")
    parser.add_argument("--rate", type=float, default=2.0, help="virtual, live: of a publisher")
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[10, 30, 31], help="virtual, live")
    parser.add_argument("--slo", default="20ms", help="live")
    parser.add_argument("--quantile", default="0.995", help="virtual, live: of the profile")
    options = parser.parse_args()
    if options.part != "one":
        print(host.describe(1))
        print(" ".join(f"{name}={value}" for name, value in vars(options).items()))
    {"tables": tables, "split": splits, "virtual": virtual, "one": one, "live": live}[options.part](options)


if __name__ == "__main__":
    main()
