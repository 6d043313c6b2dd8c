"""`python -m bench.bursts [tables|split|virtual|live]`: b split by bursts against b split by rates, in turn.

tables: Table 1 and Fig. 9 in simulation, with b at 99 % (the paper's rule) and at 99.5 %.
split: groups that k does and does not divide, in simulation, without a fitting.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from bench import host
from bench.cluster import cluster, load, said
from srtm.control.members import DeclaredPublisher
from srtm.control.options import ControllerOptions
from srtm.control.placing.expected import expected
from srtm.control.reports import KEPT_S
from srtm.control.store import Store
from srtm.lab import burst_split
from srtm.lab.fig9 import GROUP_SIZES, population
from srtm.lab.result import Row, Rows
from srtm.lab.world import QUANTILES, Simulated, facts
from srtm.model.bucket import TokenBucket
from srtm.model.latency import Sketch
from srtm.model.profile import profile
from srtm.model.split import split
from srtm.protocol.exchange import Contract
from srtm.sim.simulate import SimulatedCluster
from srtm.testing.virtual import VirtualCluster
from srtm.units import NS_PER_MS

_simulate: Any = sys.modules["srtm.sim.simulate"]  # the package exports a function of that name


class ByRates(SimulatedCluster):
    """Brokers in virtual time whose shares of b are as their shares of r."""

    def _shares(self, broker_of: Any, dealt: Mapping[int, Any]) -> dict[int, TokenBucket]:
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
    """The lab's burst_split."""
    world, rows = Simulated(options.seconds), Rows()
    for seed in range(options.runs):
        for size in burst_split.SIZES:
            for k in burst_split.KS:
                rows += burst_split.run(world, {"group_size": size, "k": k}, seed)
    for divided in (False, True):
        some = Rows(row for row in rows if (int(row["group_size"]) % int(row["k"]) == 0) is divided)
        for rule, name in burst_split.RULES.items():
            tails = some.where(rule=rule).column("access_p99_ms")
            print(
                f"k {'divides' if divided else 'does not divide'} the group, b {name}: p99 access delay at the worst"
                f" broker {statistics.mean(tails):.2f} ms on average, {max(tails):.2f} at most"
            )


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
    print(f"{'run':<4}{'group':>6}  {'b by':<8}{'k':>3}{'p99 access ms':>15}{'at the worst':>14}{'load late ms':>14}")
    found: dict[tuple[int, str], list[float]] = {}
    for run in range(options.runs):
        for size, (rule, tree) in product(options.group_sizes, trees(options).items()):
            options.group_size = size
            with sources(tree), cluster(options.brokers, "--mcap-mps", str(options.mcap)) as url:
                sending = load(url, "t", options, "srtm", run + 1, "none")
                time.sleep(0.9 * options.seconds)  # the last ten seconds are what the controller remembers
                seen = said(url, "topic", "show", "t")
                out, _ = sending.communicate()
            worst = max(each["access_ms"]["p99"] for each in seen["brokers"] if each["access_ms"])
            late = float(json.loads(out)["lateness_ms"]["p99"])
            found.setdefault((size, rule), []).append(worst)
            print(
                f"{run + 1:<4}{size:>6}  {rule:<8}{seen['k']:>3}{seen['access_ms']['p99']:>15.3f}"
                f"{worst:>14.3f}{late:>14.2f}",
                flush=True,
            )
    summed_up(found)


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
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[30, 31], help="virtual, live")
    parser.add_argument("--slo", default="20ms", help="live")
    parser.add_argument("--quantile", default="0.995", help="virtual, live: of the profile")
    options = parser.parse_args()
    if options.part != "one":
        print(host.describe(1))
        print(" ".join(f"{name}={value}" for name, value in vars(options).items()))
    {"tables": tables, "split": splits, "virtual": virtual, "one": one, "live": live}[options.part](options)


if __name__ == "__main__":
    main()
