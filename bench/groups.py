"""`python -m bench.groups [NAME …]`: correlation groups at full size: how well and how fast they are found.

Groups of 5 to 30 publishers, a batch of 10 messages a second from each. Where only the model is asked, each batch is
one message, for that is what it makes of a batch.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from bench import host
from bench.measure import show
from srtm.model import correlation, onsets
from srtm.model.broker_models import broker_model
from srtm.model.drift import adjusted_rand_index
from srtm.model.latency import SLO
from srtm.sim import SimulatedBroker, SimulatedTopic, simulate
from srtm.units import NS_PER_MS, NS_PER_S
from srtm.workload.groups import with_groups
from srtm.workload.publishers import Population, Workload
from srtm.workload.trace import ARRIVAL_SCHEMA, ArrivalWriter, writing

if TYPE_CHECKING:
    from srtm.model.placement import Publisher

Process = Literal["poisson", "periodic"]
SEEDS = 3
LOTS = 6
SIZES = (5, 10, 15, 20, 25, 30)
SPREADS_MS = (0, 1, 4, 16)


def grouped(process: Process, publishers: int, spread_ms: int, seconds: int, seed: int, batch: int = 1) -> Workload:
    counts = [publishers // len(SIZES) + (number < publishers % len(SIZES)) for number in range(len(SIZES))]
    return Workload(
        tuple(
            Population(count, float(batch), batch, process, size, spread_ms * NS_PER_MS, f"p{size}-")
            for count, size in zip(counts, SIZES, strict=True)
        ),
        seconds * NS_PER_S,
        seed,
    )


def found_in(workload: Workload) -> tuple[list[correlation.Group], float]:
    arrivals = workload.arrivals()
    names = [publisher.id for publisher in workload.publishers()]
    began = time.perf_counter()
    found = onsets.onsets_of(arrivals.times_ns, arrivals.publisher_of, names, correlation.Options().silence_ns)
    return correlation.find_groups(found), time.perf_counter() - began


def agreement(publishers: list[Publisher], groups: list[correlation.Group]) -> float:
    group_of = {name: group.name for group in groups for name in group.publishers}
    return adjusted_rand_index(
        [publisher.group or (publisher.id,) for publisher in publishers],
        [group_of.get(publisher.id) or (publisher.id,) for publisher in publishers],
    )


def quality(seed: int) -> None:
    """Adjusted Rand index of found against declared groups."""
    cases: list[tuple[Process, int, int]] = [
        ("poisson", 1_000, 60),
        ("poisson", 10_000, 600),
        ("periodic", 1_000, 60),
        ("periodic", 1_000, 600),
        ("periodic", 10_000, 60),
        ("periodic", 10_000, 600),
    ]
    rows = []
    for process, publishers, seconds in cases:
        cells, taken = [], []
        for spread_ms in SPREADS_MS:
            indices = []
            for number in range(seed, seed + SEEDS):
                workload = grouped(process, publishers, spread_ms, seconds, number)
                groups, took = found_in(workload)
                indices.append(agreement(workload.publishers(), groups))
                taken.append(took)
            cells.append(f"{np.mean(indices):.3f} ({min(indices):.3f})")
        rows.append([f"{process}, {publishers:,} × {seconds} s", *cells, f"{np.median(taken):.1f} s"])
    show(
        f"Adjusted Rand index by spread, mean (least) of {SEEDS} seeds; groups of 5 to 30; time of the model alone",
        ["", *(f"{spread_ms} ms" for spread_ms in SPREADS_MS), "time"],
        rows,
    )


def independence(seed: int) -> None:
    """Publishers that are grouped although nobody bursts with anybody."""
    cases: list[tuple[Process, int, float, int]] = [
        ("poisson", 10_000, 1.0, 600),
        ("poisson", 1_000, 10.0, 600),
        ("poisson", 1_000, 100.0, 60),
        ("periodic", 1_000, 1.0, 600),
        ("periodic", 10_000, 1.0, 600),
        ("periodic", 1_000, 10.0, 60),
    ]
    rows = []
    for process, publishers, rate, seconds in cases:
        shares, taken = [], []
        for number in range(seed, seed + SEEDS):
            groups, took = found_in(Workload((Population(publishers, rate, 1, process),), seconds * NS_PER_S, number))
            shares.append(sum(len(group.publishers) for group in groups) / publishers)
            taken.append(took)
        rows.append(
            [
                f"{process}, {publishers:,} × {seconds} s, {rate:g} msg/s each",
                f"{np.mean(shares):.2%}",
                f"{max(shares):.2%}",
                f"{np.median(taken):.1f} s",
            ]
        )
    show(f"Independent publishers that are grouped, {SEEDS} seeds", ["", "mean", "most", "time"], rows)


def placement(seed: int) -> None:
    """p99 end to end under policy srtm when groups are declared, found, and not known; 10,000 periodic publishers.

    Where messages start to wait, the p99 depends much on which publishers a broker is given by lot: it is averaged.
    """
    rows = []
    for spread_ms in SPREADS_MS[1:]:
        for k in (2, 4):
            p99s: dict[str, list[float]] = defaultdict(list)
            for number in range(seed, seed + 2):
                workload = grouped("periodic", 10_000, spread_ms, 60, number, batch=10)
                topic = SimulatedTopic.of(workload)
                groups, _ = found_in(workload)
                group_of = {name: group.name for group in groups for name in group.publishers}
                brokers = [
                    SimulatedBroker(f"b{n}", workload.total_mps / k * 1.02, broker_model("paper-testbed").service)
                    for n in range(k)
                ]
                for name, publishers in (
                    ("declared", list(topic.publishers)),
                    ("found", with_groups(topic.publishers, group_of)),
                    ("none", with_groups(topic.publishers, {})),
                ):
                    its_topic = replace(topic, publishers=publishers)
                    runs = [simulate(its_topic, brokers, "srtm", SLO(NS_PER_S), seed=lot) for lot in range(LOTS)]
                    p99s[name] += [run.latency.total.p99 / NS_PER_MS for run in runs]
            rows.append(
                [
                    f"{spread_ms} ms, k = {k}",
                    *(f"{np.mean(p99s[name]):.2f} ± {np.std(p99s[name]):.2f}" for name in p99s),
                    f"{np.mean(p99s['found']) / np.mean(p99s['declared']) - 1:+.0%}",
                ]
            )
    show(
        f"p99 end to end (ms), 10,000 periodic publishers placed evenly on k brokers: mean ± deviation of 2 × {LOTS}",
        ["spread", "groups declared", "found in 60 s", "not known", "found against declared"],
        rows,
    )


def job(seed: int) -> None:
    """The Spark job on a trace file of 10,000 publishers and ten minutes: 6e7 messages, on two cores."""
    from srtm.pipeline.groups import _ONSET_FIELDS, COLUMNS, _scanning, groups
    from srtm.pipeline.session import spark_session
    from srtm.pipeline.traces import reading

    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-groups-") as folder:
        path = Path(folder, "trace.parquet")
        workload = grouped("poisson", 10_000, 4, 600, seed, batch=10)
        with writing(path, ARRIVAL_SCHEMA, {}) as writer:
            arrivals = ArrivalWriter(writer, "topic", workload.publishers())
            for window in workload.windows():
                arrivals.write(window)
            arrivals.flush()
        with Memory() as memory:
            began = time.perf_counter()
            with spark_session(master="local[2]") as spark:
                spark.range(1).count()
                started = time.perf_counter()
                rows.append(["start of Spark", f"{started - began:.1f} s", ""])
                for turn in ("first", "second"):
                    began = time.perf_counter()
                    (line,) = groups(path, spark)
                    took = time.perf_counter() - began
                    told = f"{line.messages:,} messages, agreement {line.drift.agreement:.4f}" if line.drift else ""
                    rows.append([f"whole job, {turn} in the session", f"{took:.1f} s", told])
                columns = (*COLUMNS, "group")
                with reading.opened(path, spark, columns) as source:
                    topics, _ = source.topics()
                    began = time.perf_counter()
                    work = _scanning(topics, correlation.Options(), source.at_once)
                    source.map(work, _ONSET_FIELDS, columns).write.format("noop").mode("overwrite").save()
                    rows.append(["  of which reading and onsets", f"{time.perf_counter() - began:.1f} s", ""])
        rows.append(["peak memory", f"{memory.peak / 1e9:.1f} GB", "driver, JVM and workers together (RSS)"])
    show("The job on 10,000 publishers × 10 minutes, local[2]", ["", "", ""], rows)


def parts(seed: int) -> None:
    """Where the model's time goes: 10,000 Poisson publishers, ten minutes, spread 4 ms."""
    workload = grouped("poisson", 10_000, 4, 600, seed)
    found_in(grouped("poisson", 100, 4, 60, seed))  # so that everything is compiled
    profiler = cProfile.Profile()
    groups, took = profiler.runcall(found_in, workload)
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    wanted = {
        "onsets_of": "onsets from messages",
        "_signatures": "signatures, of publishers and surrogates",
        "_candidates": "  and candidates from them",
        "_compared": "comparison of pairs",
        "_reached_by_surrogates": "all that is done with surrogates",
    }
    rows = [
        [text, f"{sum(entry[3] for (_, _, name), entry in stats.items() if name == function):.1f} s"]
        for function, text in wanted.items()
    ]
    show("Where the model's time goes", [f"{len(groups)} groups", f"{took:.1f} s"], rows)


class Memory:
    """The largest memory of this process and all its children, looked at four times a second.

    `peak` is the sum of what is resident in each, `pss` counts pages that several share once. `parts` says of the
    latter how much is this process's, Java's and that of Python workers.
    """

    def __enter__(self) -> Memory:
        self.peak = self.pss = 0
        self.parts: dict[str, int] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        while not self._done.wait(0.25):
            parents, sizes = {}, {}
            for entry in Path("/proc").glob("[0-9]*/stat"):
                try:
                    fields = entry.read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                parents[int(entry.parent.name)], sizes[int(entry.parent.name)] = int(fields[1]), int(fields[21])
            mine, size = {os.getpid()}, len(parents)
            while size:
                more = {child for child, parent in parents.items() if parent in mine} - mine
                mine, size = mine | more, len(more)
            self.peak = max(self.peak, page * sum(sizes.get(process, 0) for process in mine))
            parts = {"driver": 0, "Java": 0, "workers": 0}
            for process in mine:
                with suppress(OSError, StopIteration):
                    kind = (
                        "driver" if process == os.getpid() else _kind(Path("/proc", str(process), "comm").read_text())
                    )
                    lines = Path("/proc", str(process), "smaps_rollup").read_text().splitlines()
                    parts[kind] += 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
            if sum(parts.values()) > self.pss:
                self.pss, self.parts = sum(parts.values()), parts


def _kind(command: str) -> str:
    return "Java" if command.startswith("java") else "workers"


ALL = {"quality": quality, "independence": independence, "placement": placement, "parts": parts, "job": job}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.groups", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which: {', '.join(ALL)} (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in ALL]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}: choose from {', '.join(ALL)}")
    print(host.describe(options.seed))
    for name in options.names or ALL:
        ALL[name](options.seed)


if __name__ == "__main__":
    main()
