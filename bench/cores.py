"""`python -m bench.cores`: one broker, and one broker for each of two cores, on the same topic.

1,000 publishers for each broker send messages of 100 bytes, one by one or ten at a time, and a subscriber takes them
(bench/load.c). Alone, a broker has one core and its load the other. Two brokers have a core each, and the load of each
runs on the other's core, so both cores carry a broker and a load: what the second broker adds is bounded by that.

`saturated` offers every broker more than it can carry, so that all work in full turns, and gives the rate that
subscribers get, and messages for each second of the brokers' processor time: what a core carries, whoever else has the
others.
`loads` gives every broker the same rate, alone or beside another. Messages that wait for a core are read together, and
are cheaper, so its processor times favour two brokers. `highest` is the highest rate in all within a p99 of 5 ms, in
steps of 12 %; brokers that share their cores with loads reach less of it than one that does not.
Brokers take turns and sleep while others are measured.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from bench import host, peers
from bench.measure import show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.peers import Run, Running

RATES = {1: (5_000, 10_000, 20_000), 10: (20_000, 40_000)}  # of each broker, by size of batches
OFFERED = {1: 120_000, 10: 400_000}
GOAL_MS = 5
_LADDER, _STEPS = 1.12, 24
_LOWEST = {1: 4_000, 10: 10_000}


class Group:
    """Brokers that are measured together."""

    def __init__(self, found: Sequence[Running]) -> None:
        self.found = found
        self._threads = ThreadPoolExecutor(len(found))
        cores = sorted({peers.BROKER_CORE, peers.LOAD_CORE})
        for number, peer in enumerate(found):
            own = cores[number % len(cores)]
            os.sched_setaffinity(peer.pid, {own})
            peer.load_core = next((core for core in cores if core != own), own)

    def load(self, rate: float, batch: int, seconds: float, seed: int) -> list[Run]:
        """Put every broker under a load of its own, at the same time."""

        def one(peer: Running) -> Run:
            return peer.load(rate, batch=batch, seconds=seconds, seed=seed + peer.port)

        return list(self._threads.map(one, self.found))


def loads(alone: Group, both: Group, turns: int, seed: int) -> None:
    rows = []
    for batch, rates in RATES.items():
        for rate in rates:
            runs: dict[str, list[list[Run]]] = {"one": [], "two": []}
            for turn in range(turns):
                runs["one"].append(alone.load(rate, batch, 1.5, seed + turn))
                runs["two"].append(both.load(rate, batch, 1.5, seed + turn))
            cpu = {name: statistics.median(_cpu(each) for each in mine) for name, mine in runs.items()}
            for name, mine in runs.items():
                p50, p99 = (statistics.median(_percentile(each, q) for each in mine) for q in (0.5, 0.99))
                brokers = len(mine[0])
                rows.append(
                    [
                        f"{rate:,}/s each, by {batch}: {name}",
                        f"{brokers * rate:,}",
                        f"{cpu[name]:.1f}",
                        f"{brokers * 1e6 / cpu[name]:,.0f}",
                        f"{brokers * cpu['one'] / cpu[name]:.2f}",
                        f"{p50:,.0f}",
                        f"{p99:,.0f}",
                    ]
                )
    show(
        "The same load on each broker",
        ["brokers", "msg/s in all", "CPU µs/msg", "msg/s at full cores", "× one broker", "p50 µs", "p99 µs"],
        rows,
    )


def _cpu(runs: Sequence[Run]) -> float:
    return sum(run.cpu_us * run.messages for run in runs) / sum(run.messages for run in runs)


def _percentile(runs: Sequence[Run], q: float) -> float:
    return float(np.percentile(np.concatenate([run.latency_ns for run in runs]), 100 * q)) / 1_000


def saturated(alone: Group, both: Group, turns: int, seed: int) -> None:
    rows = []
    for batch, rate in OFFERED.items():
        runs: dict[str, list[list[Run]]] = {"one": [], "two": []}
        for turn in range(turns):
            runs["one"].append(alone.load(rate, batch, 1.5, seed + turn))
            runs["two"].append(both.load(rate, batch, 1.5, seed + turn))
        carried = {
            name: statistics.median(sum(run.rate for run in each) for each in mine) for name, mine in runs.items()
        }
        cpu = {name: statistics.median(_cost(each) for each in mine) for name, mine in runs.items()}
        rows += [
            [
                f"by {batch}: {name}",
                f"{carried[name]:,.0f}",
                f"{carried[name] / carried['one']:.2f}",
                f"{cpu[name]:.1f}",
                f"{1e6 / cpu[name]:,.0f}",
                f"{cpu['one'] / cpu[name]:.2f}",
            ]
            for name in runs
        ]
    show(
        "More than brokers can carry",
        ["brokers", "msg/s in all", "× one broker", "CPU µs/msg", "msg/s of CPU time", "× one broker"],
        rows,
    )


def _cost(runs: Sequence[Run]) -> float:
    """Processor time of the brokers for each message that they delivered, in µs."""
    return sum(run.cpu_us * run.rate for run in runs) / sum(run.rate for run in runs)


def highest(alone: Group, both: Group, turns: int, seed: int) -> None:
    rows = []
    for batch in RATES:
        found: dict[str, list[float]] = {"one": [], "two": []}
        for turn in range(turns):
            for name, group in (("one", alone), ("two", both)):
                found[name].append(_bisect(group, batch, seed + turn))
        one, two = (statistics.median(values) for values in found.values())
        rows.append([f"by {batch}", f"{one:,.0f}", f"{two:,.0f}", f"{two / one:.2f}"])
    show(f"Highest rate in all within a p99 of {GOAL_MS} ms", ["", "one broker", "two brokers", "ratio"], rows)


def _bisect(group: Group, batch: int, seed: int) -> float:
    def holds(step: int) -> bool:
        for attempt in range(2):  # hosts have hiccups
            runs = group.load(_LOWEST[batch] * _LADDER**step, batch, 0.8, seed + attempt)
            if all(run.within(GOAL_MS * 1_000_000) for run in runs):
                return True
        return False

    low, high = -1, _STEPS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return len(group.found) * _LOWEST[batch] * _LADDER**low if low >= 0 else math.nan


PARTS = {"saturated": saturated, "loads": loads, "highest": highest}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.cores", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"which: {', '.join(PARTS)} (default: all)")
    parser.add_argument("--turns", type=int, default=3, help="runs of one and of two brokers under each load")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-realtime", action="store_true", help="do not put programs ahead of other processes")
    options = parser.parse_args()
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    realtime = not options.no_realtime and peers.can_be_realtime()
    print(host.describe(options.seed))
    print(f"{'SCHED_FIFO' if realtime else 'ordinary priority'}; load average {os.getloadavg()[0]:.1f}")
    with contextlib.ExitStack() as stack:
        found = [
            stack.enter_context(peers.running(peers.srtm(name=name), realtime=realtime)) for name in ("one", "a", "b")
        ]
        alone, both = Group(found[:1]), Group(found[1:])
        for part in options.parts or PARTS:
            PARTS[part](alone, both, options.turns, options.seed)
    print(host.jitter_line())


if __name__ == "__main__":
    main()
