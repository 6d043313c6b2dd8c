"""Beyond the paper: fixed splits of every figure, by the shipped code in virtual time (`virtual.py`) and the simulator.

Both get the same arrivals and places, and split b by what publishers declare. At the shares that brokers have in force,
every message must be released and sent at the simulator's nanosecond (`equal`); `sim_p99_ms` is the simulator alone,
with shares of its own. `hindsight_p99_ms` is what it says if it splits b by the traffic to come, as in the figures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from srtm.errors import PipelineError
from srtm.lab.result import SLO_MS, Claim, Panel, Point, Result, Row, Rows, Series
from srtm.lab.world import INITIAL_KMPS, Simulated, brokers, facts, worst_ns
from srtm.model import scan
from srtm.model.latency import SLO
from srtm.model.service import processing_latencies
from srtm.sim.simulate import assess
from srtm.testing.serving import Sent
from srtm.units import NS_PER_MS
from srtm.workload.publishers import Population

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

    from srtm.sim.simulate import SimulatedTopic, Simulation
    from srtm.testing.serving import Ints

NEAR = 0.05
_SECONDS, _MOST_MESSAGES = 10.0, 100_000  # of a split: it is exact, however short
_SLO = SLO(round(SLO_MS * NS_PER_MS))


def shipped_code() -> ModuleType:
    """The shipped code in virtual time; it takes parts that other results do not need."""
    try:
        from srtm.lab import virtual
    except ModuleNotFoundError as error:
        raise PipelineError(
            f"agreement and shipped run brokers and a controller, which need {error.name};"
            " pip install 'srtm[broker,control]'"
        ) from None
    return virtual


def like(figure: str, **kind: int | str) -> Point:
    """Publishers as in a figure."""
    usual: Point = {"publishers": 1_000, "process": "poisson", "batch": 1, "group_size": 1, "spread_ms": 0}
    return {"figure": figure, **usual, **kind}


def population(point: Point) -> Population:
    """The publishers of a point."""
    return Population(
        int(point["publishers"]),
        batch=int(point["batch"]),
        process="periodic" if point["process"] == "periodic" else "poisson",
        group_size=int(point["group_size"]),
        spread_ns=int(float(point["spread_ms"]) * NS_PER_MS),
    )


def loads_of(point: Point) -> Sequence[int]:
    """What brokers carry besides, in the figure of a point."""
    return INITIAL_KMPS if str(point["figure"]).startswith("fig8") else ()


def run(world: Simulated, point: Point, seed: int) -> list[Row]:
    """A fixed split by the shipped code, and by the simulator as declared and with hindsight."""
    shipped = shipped_code()
    length = min(world.seconds, _SECONDS), min(world.most_messages, _MOST_MESSAGES)
    virtual, policy, k = shipped.Virtual(*length, adapt=False), str(point["policy"]), int(point["k"])
    topic, loads_kmps = virtual.topic(population(point), seed), loads_of(point)
    testbed = virtual.split(topic, policy, k, seed, loads_kmps=loads_kmps)
    sent = testbed.last_lap()
    found = testbed.summed_up(sent)
    same = at_shares(topic, found, shipped.loads(topic, seed, loads_kmps))
    declared, hindsight = (
        assess(topic, brokers(loads_kmps), policy, k, _SLO, seed=seed, declared=known)
        for known in (topic.declared(), None)
    )
    return [
        {
            **point,
            **facts(found),
            "sim_p99_ms": worst_ns(declared) / NS_PER_MS,
            "hindsight_p99_ms": worst_ns(hindsight) / NS_PER_MS,
            "equal": equal(sent, same),
            "same_shares": dict(declared.shares) == dict(found.shares),
        }
    ]


def at_shares(
    topic: SimulatedTopic, run: Simulation, loads: Mapping[str, tuple[Ints, int]] | None = None
) -> dict[str, Sent]:
    """What becomes of every message by the law and the service model, at the places and shares of a run.

    `loads` are read events of other load at brokers, and their batch.
    """
    times, senders = topic.arrivals
    model, found = brokers()[0].model, {}
    for name, share in run.shares.items():
        here = run.broker_of[senders] == run.brokers.index(name)
        released = times[here] + scan.access_delays(times[here], share)
        reads, batch = (loads or {}).get(name, (None, 1))
        processing = processing_latencies(times[here], released, senders[here], model, reads, batch)
        found[name] = Sent(times[here], released, released + processing)
    return found


def equal(some: Mapping[str, Sent], others: Mapping[str, Sent]) -> bool:
    """Whether the same became of every message, in whatever order they are listed."""
    return some.keys() == others.keys() and all(
        np.array_equal(_listed(some[name]), _listed(others[name])) for name in some
    )


def _listed(sent: Sent) -> Any:
    times = np.stack(sent)
    return times[:, np.lexsort(times)]


def draw(rows: Rows) -> Panel:
    """p99 of every split by both."""
    cells = np.arange(1, len(rows) + 1).tolist()
    shown = [
        Series(name, cells, rows.column(column), line=False)
        for name, column in (
            ("shipped code", "p99_ms"),
            ("simulator", "sim_p99_ms"),
            ("simulator with hindsight", "hindsight_p99_ms"),
        )
    ]
    return Panel("Fixed splits", "split, in the order of the table", "p99 latency (ms)", shown, True, SLO_MS)


def _all(column: str) -> Any:
    def judge(rows: Rows) -> tuple[bool, str]:
        held = sum(bool(row[column]) for row in rows)
        return held == len(rows), f"{held} of {len(rows)} splits"

    return judge


def apart(rows: Rows, column: str) -> list[float]:
    """How far p99 is from that of another column, as a part of it."""
    return [abs(float(row["p99_ms"]) / float(row[column]) - 1) for row in rows]


def _near(rows: Rows) -> tuple[bool, str]:
    found = apart(rows, "sim_p99_ms")
    near = sum(each <= NEAR for each in found)
    return near == len(rows), f"{near} of {len(rows)} splits; up to {max(found):.1%}"


def _split(policy: str, k: int, figure: str, publishers: int = 1_000, **kind: int | str) -> Point:
    return {**like(figure, publishers=publishers, **kind), "policy": policy, "k": k}


_SINGLE = [
    *(_split("lb", k, "fig6a") for k in (1, 6)),
    _split("lb", 6, "fig6b", 6_000),
    _split("lb", 6, "fig7a"),
    _split("lb", 6, "fig7c", process="periodic"),
    _split("max_min", 3, "fig8a", 4_000),
    _split("max_min", 3, "fig8c", 4_000, process="periodic"),
]
_BATCHES = [
    _split("lb", 6, "fig7b", batch=10),
    _split("lb", 6, "fig7d", batch=10, process="periodic"),
    _split("max_min", 3, "fig8b", batch=10),
    _split("conc", 3, "fig8d", 4_000, batch=10, process="periodic"),
    _split("srtm", 3, "fig9a", batch=10, group_size=15),
    _split("srtm", 6, "fig9b", batch=10, group_size=30, process="periodic"),
    _split("max_min", 3, "fig10a", batch=10, group_size=15),
    _split("max_min", 4, "fig10b", batch=10, group_size=25, process="periodic"),
    _split("srtm", 5, "fig11a", batch=10, group_size=25, spread_ms=4),
    _split("srtm", 4, "fig11b", batch=10, group_size=25, spread_ms=1, process="periodic"),
]
_MORE = [
    *(_split("lb", k, "fig6a") for k in (2, 3, 4, 5)),
    *(_split("lb", k, "fig6b", 6_000) for k in (1, 2, 3)),
    _split("lb", 6, "fig7a", 4_000),
    _split("conc", 2, "fig7c", 10_000, process="periodic"),
    *(_split("conc", 2, "fig7b", publishers, batch=10) for publishers in (4_000, 10_000)),
    *(_split(policy, 3, "fig8b", 8_000, batch=10) for policy in ("conc", "max_min")),
    *(_split(policy, 3, "fig8a", 8_000) for policy in ("conc", "max_min")),
    _split("max_min", 3, "fig8c", 8_000, process="periodic"),
    _split("conc", 3, "fig8d", 8_000, batch=10, process="periodic"),
    *(_split(policy, 4, "fig8a", 10_000) for policy in ("conc", "max_min")),
    *(_split("srtm", k, "fig9a", batch=10, group_size=30) for k in (1, 2, 4, 6)),
    *(_split("max_min", k, "fig10a", batch=10, group_size=30) for k in (2, 6)),
    *(_split("srtm", 5, "fig11b", batch=10, group_size=25, spread_ms=each, process="periodic") for each in (4, 16)),
]

RESULTS = [
    Result(
        "agreement",
        "The shipped code in virtual time against the simulator, fixed splits",
        "On the same arrivals and declarations, both come to the same shares and the same latencies.",
        [*_SINGLE, *_BATCHES],
        _BATCHES[:6],
        run,
        [
            Claim(
                "at the same shares, every message is released and sent at the same nanosecond",
                "—",
                _all("equal"),
                kind="ours",
            ),
            Claim(
                "by declarations, the simulator comes to the shares that brokers have in force",
                "—",
                _all("same_shares"),
                kind="ours",
            ),
            Claim("p99 within 5 % of the simulator with shares of its own", "—", _near, kind="ours"),
        ],
        draw,
        weight=4,
        version=4,
        repetitions=1,
        more=_MORE,
        columns={
            "figure": "as in",
            "policy": "policy",
            "publishers": "publishers",
            "process": "process",
            "batch": "batch",
            "group_size": "group size",
            "spread_ms": "spread ms",
            "k": "k",
            "p99_ms": "p99 ms",
            "sim_p99_ms": "simulator",
            "hindsight_p99_ms": "with hindsight",
            "equal": "equal at the same shares",
            "same_shares": "same shares",
        },
    ),
]
