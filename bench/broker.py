"""`python -m bench.broker [PART …]`: our broker beside nsqd, NATS and the floor, each on one core, in one run.

Our broker runs compiled if its modules are (`make native`; the first line says so), and beside that interpreted.

The broker under test has one core, the load (bench/load.c) another. 1,000 publishers send messages of 100 bytes,
Poisson as a whole, alone or ten at a time (MPUB; NATS has none and gets ten PUBs in one write); one subscriber with
RDY 2500 finishes them, one write per read. Peers take turns, so that what else happens on the host happens to all, and
sleep while others are measured. Latency counts from when a message was due, and includes how late the load itself was
(its p99 is printed). Of several turns, tables give the median of CPU and the least of percentiles, with the median of
p99 beside it: the least hides what the host does, but also a peer's own rare stops.

Parts, the first two unless named (about 6 minutes): `loads` (fixed rates), `highest` (the highest rate within a p99),
`features` (what ours cost), `idle` (10,000 silent clients), `collector` (Python's garbage collector as we run it, and
as it is by default), `drain` (a full topic, emptied by one subscriber as fast as both can).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import resource
import statistics
from typing import TYPE_CHECKING

from bench import host, peers
from bench.measure import show
from srtm import native

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.peers import Peer, Run, Running

SINGLE_RATES = (5_000, 10_000, 20_000)
BATCH_RATES = (20_000, 50_000, 100_000)
BATCH = 10
GOALS_MS = (1, 5)
STEPS = 28  # of a rate ladder, each 12 % above the last
_LADDER = 1.12
_IDLE = 10_000
_SPARE_FILES = 1_200
_FULL = {100: 200_000, 1_000: 100_000}  # messages in a full topic, by the size of bodies


class Bench:
    """The peers of one run, all up, and the loads that they are put under."""

    def __init__(self, found: Sequence[Running], turns: int, seed: int) -> None:
        self.found = found
        self.turns = turns
        self.seed = seed

    def loads(self) -> None:
        for batch, rates in ((1, SINGLE_RATES), (BATCH, BATCH_RATES)):
            for rate in rates:
                self._one_load(rate, batch)

    def _one_load(self, rate: int, batch: int) -> None:
        runs = interleaved(self.found, self.turns, loading(rate, batch, 1.0, self.seed))
        show(
            f"{rate:,} msg/s, {'one by one' if batch == 1 else f'{batch} at a time'}",
            [
                "",
                "CPU µs/msg",
                "p50 µs",
                "p95 µs",
                "p99 µs",
                "p99, median",
                "× nsqd CPU",
                "× nsqd p99",
                "× floor CPU",
                "lag µs, core",
            ],
            [self._row(name, runs) for name in runs],
        )

    def _row(self, name: str, runs: dict[str, list[Run]]) -> list[str]:
        mine = runs[name]

        def whole(name: str) -> bool:
            return all(run.complete for run in runs[name])

        def ratio(other: str, value: Callable[[Run], float], summary: Callable[..., float] = median) -> str:
            if other not in runs or (value is not cpu and not (whole(name) and whole(other))):
                return "–"
            return f"{summary(mine, value) / summary(runs[other], value):.2f}"

        return [
            name,
            f"{median(mine, cpu):.1f}",
            *(f"{least(mine, percentile(q)):,.0f}" if whole(name) else "behind" for q in (0.5, 0.95, 0.99)),
            f"{median(mine, percentile(0.99)):,.0f}" if whole(name) else "behind",
            ratio("nsqd", cpu),
            f"{ratio('nsqd', percentile(0.99), least)}, {ratio('nsqd', percentile(0.99), median)}",
            ratio("floor", cpu),
            f"{median(mine, lambda run: run.lag_ns) / 1_000:,.0f}, {median(mine, lambda run: run.own_load):.0%}",
        ]

    def highest(self) -> None:
        rows = []
        best: dict[tuple[str, int, int], float] = {}
        for batch in (1, BATCH):
            for goal_ms in GOALS_MS:
                for peer in self.found:
                    known = max(
                        (rate for (name, by, _), rate in best.items() if (name, by) == (peer.peer.name, batch)),
                        default=0,
                    )
                    best[peer.peer.name, batch, goal_ms] = self._bisect(peer, batch, goal_ms, known)
        for peer in self.found:
            name, cells = peer.peer.name, []
            for batch in (1, BATCH):
                for goal_ms in GOALS_MS:
                    mine, theirs = best[name, batch, goal_ms], best.get(("nsqd", batch, goal_ms), 0)
                    cells.append(f"{mine / 1000:,.1f}" + (f" ({mine / theirs:.2f} ×)" if theirs else ""))
            rows.append([name, *cells])
        titles = [f"{how}, p99 ≤ {goal} ms" for how in ("one by one", "ten at a time") for goal in GOALS_MS]
        show(f"Highest rate, thousand msg/s (× nsqd), in steps of {_LADDER - 1:.0%}", ["", *titles], rows)

    def _bisect(self, peer: Running, batch: int, goal_ms: int, known: float) -> float:
        """The highest step of the ladder that holds; a step fails when it fails twice, for hosts have hiccups."""
        lowest = 4_000 * (5 if batch > 1 else 1)

        def holds(step: int) -> bool:
            for attempt in range(2):
                run = peer.load(lowest * _LADDER**step, batch=batch, seconds=0.8, seed=self.seed + attempt)
                if run.within(goal_ms * 1_000_000):
                    return True
            return False

        low, high = round(math.log(known / lowest, _LADDER)) if known else -1, STEPS
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        return lowest * _LADDER**low if low >= 0 else 0.0


def interleaved(found: Sequence[Running], turns: int, run: Callable[[Running, int], Run]) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {peer.peer.name: [] for peer in found}
    for turn in range(turns):
        for peer in found:
            runs[peer.peer.name].append(run(peer, turn))
    return runs


def loading(rate: float, batch: int, seconds: float, seed: int) -> Callable[[Running, int], Run]:
    return lambda peer, turn: peer.load(rate, batch=batch, seconds=seconds, seed=seed + turn)


def median(runs: Sequence[Run], value: Callable[[Run], float]) -> float:
    return statistics.median(map(value, runs))


def least(runs: Sequence[Run], value: Callable[[Run], float]) -> float:
    """Of the run that the host disturbed least: what it takes away comes in stops of many milliseconds."""
    return min(map(value, runs))


def cpu(run: Run) -> float:
    return run.cpu_us


def percentile(q: float) -> Callable[[Run], float]:
    return lambda run: run.percentile_us(q)


def gather(makers: dict[str, Callable[[], Peer]]) -> list[Peer]:
    """Those that can be had; the others are said to be missing."""
    made = []
    for make in makers.values():
        try:
            made.append(make())
        except peers.Missing as reason:
            print(f"left out: {reason}")
    return made


PEERS: dict[str, Callable[[], Peer]] = {
    "srtm": peers.srtm,
    "interpreted": lambda: peers.srtm(name="srtm, interpreted", interpreted=True),
    "nsqd": peers.nsqd,
    "nsqd-1ms": lambda: peers.nsqd(buffer_ms=1),
    "nats": peers.nats,
    "floor": peers.floor,
}


def features(turns: int, seed: int, *, realtime: bool) -> None:
    """What bucket, statistics and stamps cost, one by one and together."""
    variants = [
        peers.srtm(),
        peers.srtm(name="no bucket", bucket=False),
        peers.srtm("statistics", name="no statistics"),
        peers.srtm("stamps", name="no stamps"),
        peers.srtm("statistics", "stamps", name="none of them", bucket=False),
    ]
    rows = []
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(peers.running(peer, realtime=realtime)) for peer in variants]
        for batch, rate in ((1, 10_000), (BATCH, 50_000)):
            runs = interleaved(found, turns + 2, loading(rate, batch, 1.0, seed))
            for name, mine in runs.items():
                saved = statistics.median(
                    ours.cpu_us - run.cpu_us for ours, run in zip(runs["srtm"], mine, strict=True)
                )
                rows.append([f"{rate:,}/s by {batch}: {name}", f"{median(mine, cpu):.2f}", f"{saved:+.2f}"])
    show("What features cost", ["", "CPU µs/msg", "saved µs/msg, median of pairs"], rows)


def idle(turns: int, seed: int, *, realtime: bool) -> None:
    """Silent clients: what they weigh, and what they do to those that speak."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    many = min(_IDLE, hard - _SPARE_FILES) if hard != resource.RLIM_INFINITY else _IDLE
    if many < _IDLE:
        print(f"only {many:,} silent clients: a process may have {hard:,} files here")
    rows = []
    with peers.running(peers.srtm(), realtime=realtime) as ours:
        before_mb = ours.peak_mb()
        kinds: dict[str, dict[str, int]] = {
            "none": {},
            f"{many:,} silent": {"idle": many},
            f"{many:,} with heartbeats every 5 s": {"idle": many, "heartbeat_ms": 5_000},
        }
        runs: dict[str, list[Run]] = {name: [] for name in kinds}
        for turn in range(turns):
            for name, kind in kinds.items():
                seconds = 6.0 if kind.get("heartbeat_ms") else 1.5
                runs[name].append(ours.load(10_000, seconds=seconds, seed=seed + turn, **kind))
        after_mb = ours.peak_mb()
        for name, mine in runs.items():
            tails = [f"{least(mine, percentile(q)):,.0f}" for q in (0.5, 0.99, 0.999)]
            rows.append([name, f"{median(mine, cpu):.1f}", *tails])
    show(
        f"Silent clients beside 10,000 msg/s; memory {before_mb:.0f} MB before, {after_mb:.0f} MB at most",
        ["clients", "CPU µs/msg", "p50 µs", "p99 µs", "p99.9 µs"],
        rows,
    )


def collector(turns: int, seed: int, *, realtime: bool) -> None:
    """Python's collector, frozen and in idle time only, against its default."""
    variants = [peers.srtm(name="frozen, when idle"), peers.srtm("freeze", name="default")]
    rows = []
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(peers.running(peer, realtime=realtime)) for peer in variants]
        for batch, rate in ((1, 10_000), (BATCH, 50_000)):
            runs = interleaved(found, turns, loading(rate, batch, 3.0, seed))
            for name, mine in runs.items():
                tails = [f"{least(mine, percentile(q)):,.0f}" for q in (0.5, 0.99, 0.999, 1)]
                rows.append([f"{rate:,}/s by {batch}: {name}", f"{median(mine, cpu):.1f}", *tails])
    show("Garbage collector", ["", "CPU µs/msg", "p50 µs", "p99 µs", "p99.9 µs", "longest µs"], rows)


def drain(turns: int, seed: int, *, realtime: bool) -> None:
    """A full topic, and one subscriber with RDY 2500 that takes all of it; `seed` changes nothing."""
    del seed
    room = ("--max-held-messages", "1000000", "--max-held-bytes", "1000000000")
    made = gather(
        {
            "srtm": lambda: peers.srtm(bucket=False, flags=room),
            "nsqd": lambda: peers.nsqd(buffer_ms=250),  # its default, and its fastest
            "unbuffered": peers.nsqd,
        }
    )
    rows = []
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(peers.running(peer, realtime=realtime)) for peer in made]
        for body, messages in _FULL.items():
            drains: dict[str, list[peers.Drain]] = {peer.peer.name: [] for peer in found}
            for turn in range(turns):
                for peer in found:
                    drains[peer.peer.name].append(peer.drain(messages, body, f"full-{body}-{turn}"))
            rates = {name: statistics.median(each.rate for each in mine) for name, mine in drains.items()}
            buffered = rates.get("nsqd, 250 ms buffer")
            for name, mine in drains.items():
                cpu_us = statistics.median(each.cpu_us for each in mine)
                times = f"{rates[name] / buffered:.2f}" if buffered else "–"
                own = statistics.median(each.own_load for each in mine)
                rows.append(
                    [f"{body:,} bytes: {name}", f"{rates[name] / 1_000:,.0f}", times, f"{cpu_us:.2f}", f"{own:.0%}"]
                )
    show("A full topic, emptied", ["", "thousand msg/s", "× nsqd, buffered", "CPU µs/msg", "load's core"], rows)


ALONE = {"drain": drain, "features": features, "idle": idle, "collector": collector}
PARTS = ("loads", "highest", *ALONE)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.broker", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"which: {', '.join(PARTS)} (default: the first two)")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"which, of {','.join(PEERS)}")
    parser.add_argument("--turns", type=int, default=2, help="runs of each peer under each load")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--no-realtime", action="store_true", help="do not put broker and load ahead of other processes"
    )
    options = parser.parse_args()
    parts = options.parts or PARTS[:2]
    unknown = [name for name in parts if name not in PARTS] + [
        name for name in options.peers.split(",") if name not in PEERS
    ]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}")
    realtime = not options.no_realtime and peers.can_be_realtime()
    print(host.describe(options.seed))
    print(
        f"srtm is {native.build()}; broker on core {peers.BROKER_CORE}, load on core {peers.LOAD_CORE},"
        f" {'both SCHED_FIFO' if realtime else 'both with ordinary priority'}; load average {os.getloadavg()[0]:.1f}"
    )
    if {"loads", "highest"} & set(parts):
        with contextlib.ExitStack() as stack:
            wanted = gather({name: PEERS[name] for name in options.peers.split(",")})
            found = [stack.enter_context(peers.running(peer, realtime=realtime)) for peer in wanted]
            bench = Bench(found, options.turns, options.seed)
            for part in parts:
                if part not in ALONE:
                    getattr(bench, part)()
    for part in parts:
        if part in ALONE:
            ALONE[part](options.turns, options.seed, realtime=realtime)
    longest, lost = host.jitter_us()
    print(f"host jitter afterwards: longest gap {longest:.0f} µs, {lost:.2f} % of a second lost in gaps over 50 µs")


if __name__ == "__main__":
    main()
