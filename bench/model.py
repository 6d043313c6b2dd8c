"""The law, placement and the simulator."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.measure import interleaved, show
from srtm.model import law, md1, scan
from srtm.model.bucket import TokenBucket
from srtm.model.limiter import Limiter
from srtm.model.placement import POLICIES, Broker, Publisher, place
from srtm.sim import SimulatedBroker, SimulatedTopic, simulate
from srtm.units import NS_PER_S
from srtm.workload.publishers import Population, Workload
from srtm.workload.trace import ARRIVAL_SCHEMA, ArrivalWriter, writing

if TYPE_CHECKING:
    from numpy.typing import NDArray

BUCKET = TokenBucket.of(11_000, 26)


def arrays(seed: int) -> None:
    """Backlogs behind 10^7 arrivals, on one core, from memory to memory."""
    count, few = 10_000_000, 100_000
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.integers(0, 200_000, count))
    listed, out = times[:few].tolist(), [0] * few
    rate, token, _ = BUCKET.law

    def numpy_running_maximum() -> NDArray[np.int64]:
        drained = np.arange(count) * token - rate * (times - times[0])
        return np.asarray(drained + np.maximum(0, -np.minimum.accumulate(drained)) + token)

    def plain_loop() -> None:
        law.scan_backlogs(listed, rate, token, BUCKET.law.horizon, 0, listed[0], out)  # type: ignore[arg-type]

    assert (numpy_running_maximum() == scan.backlogs(times, BUCKET)).all()
    taken = interleaved(
        {
            "array form: backlogs": lambda: scan.backlogs(times, BUCKET),
            "array form: summary of a stretch": lambda: scan.summarise(times, BUCKET),
            "array form: access delays": lambda: scan.access_delays(times, BUCKET),
            "array form: histogram for every b": lambda: scan.backlog_histogram(times, BUCKET),
            "numpy's running maximum": numpy_running_maximum,
            "plain loop, interpreted": plain_loop,
        }
    )
    speed = {name: (few if name.startswith("plain") else count) / seconds / 1e6 for name, seconds in taken.items()}
    base = speed["numpy's running maximum"]
    show(
        "Arrivals through the law, one core",
        ["", "M arrivals/s", "against numpy"],
        [[name, f"{value:,.1f}", f"{value / base:.2f} ×"] for name, value in speed.items()],
    )


def scalar(seed: int) -> None:
    """One message through the broker's side of the law, interpreted."""
    count = 100_000
    listed = np.cumsum(np.random.default_rng(seed).integers(0, 200_000, count)).tolist()

    def admit() -> None:
        limiter = Limiter(BUCKET, listed[0])
        for at in listed:
            limiter.admit(at)

    def offer() -> None:
        limiter = Limiter(BUCKET, listed[0])
        for at in listed:
            limiter.offer(at)

    def step() -> None:
        backlog, last = 0, listed[0]
        for at in listed:
            backlog = law.step(backlog, at - last, 11_000, 10**9)
            last = at

    def due() -> None:
        limiter = Limiter(BUCKET, listed[0])
        for at in listed:
            limiter.due(at, 10)

    def nothing() -> None:
        for _ in listed:
            pass

    taken = interleaved({"step": step, "admit": admit, "offer": offer, "due": due, "empty loop": nothing})
    show(
        "One scalar step, interpreted",
        ["", "ns per message"],
        [[name, f"{seconds / count * 1e9:,.0f}"] for name, seconds in taken.items()],
    )


def placement(seed: int) -> None:
    """10,000 publishers in groups of 25 on 100 brokers."""
    publishers = [Publisher(f"p{i}", 10.0, f"g{i // 25}") for i in range(10_000)]
    brokers = [Broker(f"b{i}", 1_100, float(i)) for i in range(100)]
    taken = interleaved({name: partial(place, publishers, brokers, name, seed) for name in POLICIES}, turns=3)
    show(
        "A placement: 10,000 publishers on 100 brokers",
        ["policy", "ms", "brokers used"],
        [
            [name, f"{seconds * 1e3:,.0f}", str(place(publishers, brokers, name, seed).k)]
            for name, seconds in taken.items()
        ],
    )


def simulator(seed: int) -> None:
    """1,000 publishers of 10 msg/s for 60 s on 6 brokers of the paper."""
    six = [SimulatedBroker.like("paper-testbed", f"b{i}") for i in range(6)]
    cases = {
        "single messages": SimulatedTopic.of(Workload((Population(1_000),), 60 * NS_PER_S, seed)),
        "batches of 10, groups of 15": SimulatedTopic.of(
            Workload((Population(1_000, 10.0, 10, "poisson", 15),), 60 * NS_PER_S, seed)
        ),
    }
    runs = {(name, policy): case for name, case in cases.items() for policy in POLICIES}
    taken = interleaved(
        {f"{name}/{policy}": partial(simulate, case, six, policy) for (name, policy), case in runs.items()},
        turns=3,
    )
    show(
        "A simulation: 600,000 messages on 6 brokers, fitting included",
        ["workload", "policy", "rounds", "ms"],
        [
            [name, policy, str(simulate(case, six, policy).rounds), f"{taken[f'{name}/{policy}'] * 1e3:,.0f}"]
            for (name, policy), case in runs.items()
        ],
    )


def theory(seed: int) -> None:
    """Eq. (1), also where the textbook's sum has long lost all its digits."""
    del seed
    cases = {"b = 10": (9, 1 / 1.1), "b = 26": (25, 1 / 1.1), "b = 5,000": (4_999, 0.95), "b = 5,000 ": (4_999, 0.99)}
    taken = interleaved({name: partial(md1.exceeds, *at) for name, at in cases.items()}, turns=20)
    show(
        "P(U > b − 1) of an M/D/1 queue",
        ["", "λ/r", "value", "µs"],
        [
            [name, f"{cases[name][1]:.3f}", f"{md1.exceeds(*cases[name]):.6g}", f"{seconds * 1e6:.0f}"]
            for name, seconds in taken.items()
        ],
    )


def synthesis(seed: int) -> None:
    """Traces of 10^7 messages, generated and written."""
    kinds = {
        "Poisson, single": Population(1_000),
        "Poisson, batches of 10, groups of 25": Population(1_000, 10.0, 10, "poisson", 25),
        "Poisson, single, groups of 25 over 4 ms": Population(1_000, 10.0, 1, "poisson", 25, 4_000_000),
        "periodic, single": Population(1_000, 10.0, 1, "periodic"),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.parquet")
        sizes: dict[str, tuple[int, int]] = {}

        def write(name: str) -> None:
            workload = Workload((kinds[name],), 1_000 * NS_PER_S, seed)
            count = 0
            with writing(path, ARRIVAL_SCHEMA, {}) as writer:
                rows = ArrivalWriter(writer, "topic", workload.publishers())
                for window in workload.windows():
                    rows.write(window)
                    count += len(window.times_ns)
                rows.flush()
            sizes[name] = (count, path.stat().st_size)

        taken = interleaved({name: partial(write, name) for name in kinds}, turns=2)
    show(
        "srtm trace synth, 10^7 messages",
        ["", "M messages/s", "bytes per message"],
        [
            [name, f"{sizes[name][0] / seconds / 1e6:.1f}", f"{sizes[name][1] / sizes[name][0]:.2f}"]
            for name, seconds in taken.items()
        ],
    )
