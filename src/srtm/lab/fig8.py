"""Fig. 8: Conc against Max-Min on brokers that already carry 10, 40, 50, 60, 70 and 80 kmsg/s, in batches of 10.

Besides each policy's own fit, `how = "three"` is the split that the paper describes: 8,000 publishers on brokers 1, 2
and 3. Its access delay is that of broker 3, which the paper compares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.lab.fig7 import PANELS, PUBLISHERS, population
from srtm.lab.result import SLO_MS, Claim, Panel, Point, Result, Row, Rows, Series, points
from srtm.lab.world import INITIAL_KMPS, facts, variants
from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    from srtm.lab.world import World

TINY = (1_000, 4_000, 8_000, 10_000)
POLICIES = {"conc": "Conc", "max_min": "Max-Min"}


def run(world: World, point: Point, seed: int) -> list[Row]:
    """Both policies on the same traffic."""
    rows: list[Row] = []
    for variant, topic in variants(world, population(point), seed):
        for policy in POLICIES:
            found = world.fit(topic, policy, seed, loads_kmps=INITIAL_KMPS)
            rows.append({**point, **variant, "how": "fitted", **facts(found)})
            if point["publishers"] == 8_000:
                told = world.spread(topic, policy, 3, seed, loads_kmps=INITIAL_KMPS)
                third_ms = told.by_broker["broker-3"].access.p99 / NS_PER_MS
                rows.append({**point, **variant, "how": "three", **facts(told), "access_p99_ms": third_ms})
    return rows


def draw(rows: Rows) -> Panel:
    """Mean and standard deviation of p99, k beside each point."""
    process, batch = str(rows[0]["process"]), int(rows[0]["batch"])
    shown = [
        Series.of(name, rows.where(how="fitted", policy=policy), "publishers", "p99_ms", label="k")
        for policy, name in POLICIES.items()
    ]
    shown += [
        Series("Conc, paper", [8_000], [1.50], line=False),
        Series("Max-Min, paper", [8_000], [0.87], line=False),
    ]
    return Panel(f"{process.capitalize()}, batch = {batch}", "publishers", "p99 latency (ms)", shown, True, SLO_MS)


def _tail(rows: Rows, policy: str, publishers: int, column: str = "p99_ms", how: str = "fitted") -> float:
    return rows.where(policy=policy, publishers=publishers, how=how).mean(column)


def _same_when_low(rows: Rows) -> tuple[bool, str]:
    low = [n for n in PUBLISHERS if n <= 4_000 and rows.where(publishers=n)]
    apart = [abs(_tail(rows, "conc", n) - _tail(rows, "max_min", n)) for n in low]
    return max(apart) == 0, f"{max(apart):.2f} ms apart at most"


def _at_8k(rows: Rows) -> tuple[bool, str]:
    conc, max_min = _tail(rows, "conc", 8_000), _tail(rows, "max_min", 8_000)
    return max_min <= SLO_MS < conc, f"{max_min:.2f} against {conc:.2f} ms"


def _three_brokers(rows: Rows) -> tuple[bool, str]:
    conc, max_min = (_tail(rows, policy, 8_000, "access_p99_ms", "three") for policy in ("conc", "max_min"))
    return max_min < conc, f"access delay {max_min:.2f} against {conc:.2f} ms"


def _conc_improves(rows: Rows) -> tuple[bool, str]:
    before, after = _tail(rows, "conc", 8_000), _tail(rows, "conc", 10_000)
    return after < before, f"from {before:.2f} to {after:.2f} ms"


def _batches_no_worse(rows: Rows, single: Rows) -> tuple[bool, str]:
    found = [
        (rows.where(how="fitted", policy=policy, publishers=n).mean("p99_ms"), _tail(single, policy, n), n)
        for policy in POLICIES
        for n in PUBLISHERS
        if rows.where(publishers=n)
    ]
    ratio, n = max((ten / one, n) for ten, one, n in found)
    return ratio <= 1, f"up to {ratio:.1f} times longer ({n / 1_000:g}k)"


def _claims(panel: str) -> list[Claim]:
    claims = [
        Claim("up to 4k publishers Conc and Max-Min perform identically", "equal", _same_when_low),
        Claim("at 8k Max-Min meets the SLO where Conc does not", "0.87 against 1.50 ms", _at_8k),
        Claim("8k on brokers 1 to 3: Conc has the larger DRL penalty", "Conc's is larger", _three_brokers),
    ]
    if panel in "cd":
        claims.append(Claim("Conc improves from 8k to 10k publishers", "improves", _conc_improves))
    if panel in "bd":
        single = {"b": "fig8a", "d": "fig8c"}[panel]
        claims.append(Claim("batches of 10 do no worse than single messages", "≤ 1", _batches_no_worse, (single,)))
    return claims


RESULTS = [
    Result(
        f"fig8{panel}",
        f"Max-Min against Conc on loaded brokers, {process}, batch {batch}",
        "Small topics fit on one broker; larger ones do better with equal parts than with equal loads.",
        points(process=[process], batch=[batch], publishers=PUBLISHERS),
        points(process=[process], batch=[batch], publishers=TINY),
        run,
        _claims(panel),
        draw,
        weight=5,
        version=2,
    )
    for panel, (process, batch) in PANELS.items()
]
