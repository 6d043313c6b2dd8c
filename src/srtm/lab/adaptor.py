"""Section 5.4: traffic shifts from one broker to another, with shares that stay and shares that follow.

8,000 Poisson publishers are split evenly over two brokers. After 15 s, three quarters of the messages arrive at the
first of them, while the topic as a whole sends what it sent. The rule is `model.tb_adaptor.adapt`, once a second, over
a window of 10 s, as in SRTM's controller; the delays are those of buckets whose (r, b) changes in time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from srtm.lab.result import SLO_MS, Claim, Panel, Point, Result, Row, Rows, Series, points
from srtm.model import scan, timeline
from srtm.model.bucket import TokenBucket
from srtm.model.latency import Sketch
from srtm.model.split import split, within
from srtm.model.tb_adaptor import History, Step, adapt
from srtm.model.timeline import Timeline
from srtm.units import NANO_PER_TOKEN, NS_PER_MS, NS_PER_S, PICO_PER_TOKEN, percentile
from srtm.workload.publishers import Population, Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from srtm.lab.world import World

    Ints = NDArray[np.int64]

SHARES = {"fixed": "shares stay", "adapted": "shares follow"}
BROKERS = ("first", "second")
SECONDS, SHIFT_S, WINDOW_S = 75, 15, 10
SETTLED_S = SECONDS - WINDOW_S  # what waited meanwhile is gone: r is only a tenth above the rate
QUANTILE = "0.99"
_PICO_PER_NANO = PICO_PER_TOKEN // NANO_PER_TOKEN


def run(world: World, point: Point, seed: int) -> list[Row]:
    """p99 access delay at the worst broker in every second, under both kinds of shares."""
    population = Population(8_000)
    whole = world.topic(population, seed).bucket
    times = Workload((population,), SECONDS * NS_PER_S, seed + 1).arrivals().times_ns
    first = np.random.default_rng([seed, 54]).random(len(times)) < np.where(times < SHIFT_S * NS_PER_S, 0.5, 0.75)
    parts = {"first": times[first], "second": times[~first]}
    start = dict(zip(BROKERS, split(whole, [1, 1]), strict=True))
    changes = _adapted(parts, whole, start)
    rows: list[Row] = []
    for kind in SHARES:
        delays = {
            name: timeline.access_delays(part, Timeline(start[name], changes[name] if kind == "adapted" else ()))
            for name, part in parts.items()
        }

        def tail_ms(begin: int, end: int, delays: dict[str, Ints] = delays) -> float:
            tails = [percentile(delays[name][_within(part, begin, end)], "0.99") for name, part in parts.items()]
            return max(tails) / NS_PER_MS

        whole_ms = {"before_ms": tail_ms(0, SHIFT_S), "after_ms": tail_ms(SETTLED_S, SECONDS)}
        rows += [
            {**point, "shares": kind, "second": second, "access_p99_ms": tail_ms(second, second + 1), **whole_ms}
            for second in range(SECONDS)
        ]
    return rows


def _within(times: Ints, begin: int, end: int) -> slice:
    """The messages between two seconds."""
    first, last = np.searchsorted(times, [begin * NS_PER_S, end * NS_PER_S])
    return slice(int(first), int(last))


def _adapted(
    parts: dict[str, Ints], whole: TokenBucket, start: dict[str, TokenBucket]
) -> dict[str, tuple[tuple[int, TokenBucket], ...]]:
    """What the TB Adaptor makes of the shares, second by second."""
    histories = {name: History() for name in BROKERS}
    states: dict[str, scan.State | None] = dict.fromkeys(BROKERS)
    changes: dict[str, list[tuple[int, TokenBucket]]] = {name: [] for name in BROKERS}
    shares = start
    for second in range(SECONDS):
        waiting = {}
        for name, share in shares.items():
            times = parts[name][_within(parts[name], second, second + 1)]
            found, state = scan.run(times, share.pico_law, states[name])
            tokens = -(-found // PICO_PER_TOKEN)
            step = Step(second, len(times), int(found.max()) // _PICO_PER_NANO, backlogs=Sketch.of(tokens))
            histories[name].add(step, WINDOW_S)
            waiting[name] = max(0, state.backlog // PICO_PER_TOKEN - int(share.b))
            states[name] = state
        wanted = adapt(whole, shares, histories, second, quantile=QUANTILE, window=WINDOW_S, waiting=waiting)
        assert within(whole, wanted.values())
        for name, share in wanted.items():
            if share != shares[name]:
                changes[name].append(((second + 1) * NS_PER_S, share))
                left = states[name]
                assert left
                kept = left.backlog + (share.b_ntok - shares[name].b_ntok) * _PICO_PER_NANO
                states[name] = scan.State(max(0, kept), left.last_ns)
        shares = wanted
    return {name: tuple(listed_) for name, listed_ in changes.items()}


def draw(rows: Rows) -> Panel:
    """p99 access delay, second by second."""
    shown = [Series.of(name, rows.where(shares=kind), "second", "access_p99_ms") for kind, name in SHARES.items()]
    return Panel(
        f"8,000 publishers, two brokers; a shift after {SHIFT_S} s",
        "time (s)",
        "p99 access delay (ms)",
        shown,
        slo_ms=SLO_MS,
    )


def _fixed_pays(rows: Rows) -> tuple[bool, str]:
    fixed = rows.where(shares="fixed")
    before, after = fixed.mean("before_ms"), fixed.mean("after_ms")
    return before <= SLO_MS < after, f"p99 {before:.2f} ms before, {after:,.0f} ms a minute after"


def _adapted_avoids(rows: Rows) -> tuple[bool, str]:
    after = rows.where(shares="adapted").mean("after_ms")
    return after <= SLO_MS, f"p99 {after:.2f} ms a minute after"


def _meanwhile(rows: Rows) -> tuple[bool, str]:
    fixed, found = (rows.where(shares=kind).means("access_p99_ms", "second")[SHIFT_S:] for kind in SHARES)
    over = next(
        (second for second in range(len(found)) if max(found[second : second + WINDOW_S]) <= SLO_MS), len(found)
    )
    shorter = all(a <= b for a, b in zip(found, fixed, strict=True))
    return shorter, f"{max(found):,.0f} ms at most, within the SLO after {over} s"


RESULTS = [
    Result(
        "adaptor",
        "TB Adaptor: traffic that shifts between brokers",
        "Shares that stay become a bottleneck; shares that follow do not.",
        points(publishers=[8_000]),
        points(publishers=[8_000]),
        run,
        [
            Claim(
                "if traffic shifts and shares stay, the DRL penalty is significant",
                "significant",
                _fixed_pays,
                where="5.4, ¶ 1",
            ),
            Claim("shares that follow avoid it", "avoided", _adapted_avoids, where="5.4, ¶ 1"),
            Claim(
                "until they have followed, delays are no longer than with fixed shares", "—", _meanwhile, kind="ours"
            ),
        ],
        draw,
        weight=4,
    )
]
