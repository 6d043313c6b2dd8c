"""Fig. 7: LB against Conc on idle brokers, by the number of publishers; Poisson or periodic, batches of 1 or 10.

The paper's text does not give the numbers of publishers; Fig. 8, which "reuses the scenarios", names 4k, 8k and 10k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from srtm.lab.result import SLO_MS, Claim, Kind, Panel, Point, Result, Row, Rows, Series, falls, listed, points
from srtm.lab.world import BROKERS, best_split, facts, variants
from srtm.workload.publishers import Population

if TYPE_CHECKING:
    from srtm.lab.world import World

PUBLISHERS = (1_000, 2_000, 4_000, 6_000, 8_000, 10_000)
TINY = (1_000, 4_000, 10_000)
POLICIES = {"lb": "LB", "conc": "Conc"}


def population(point: Point) -> Population:
    """The publishers of a point."""
    process: Literal["poisson", "periodic"] = "poisson" if point["process"] == "poisson" else "periodic"
    return Population(int(point["publishers"]), batch=int(point["batch"]), process=process)


def run(world: World, point: Point, seed: int) -> list[Row]:
    """LB on all brokers, and Conc on as few as will do, with the same traffic."""
    rows: list[Row] = []
    for variant, topic in variants(world, population(point), seed):
        runs = (world.spread(topic, "lb", BROKERS, seed), best_split(world, topic, "conc", seed))
        rows += [{**point, **variant, **facts(found)} for found in runs]
    return rows


def draw(rows: Rows) -> Panel:
    """Mean and standard deviation of p99, k beside each point."""
    process, batch = str(rows[0]["process"]), int(rows[0]["batch"])
    shown = [
        Series.of(name, rows.where(policy=policy), "publishers", "p99_ms", label="k")
        for policy, name in POLICIES.items()
    ]
    return Panel(f"{process.capitalize()}, batch = {batch}", "publishers", "p99 latency (ms)", shown, True, SLO_MS)


def _conc_meets(rows: Rows) -> tuple[bool, str]:
    tails = {x: at.mean("p99_ms") for x, at in rows.where(policy="conc").along("publishers").items()}
    missed = [f"{x / 1_000:g}k: {tail:.2f}" for x, tail in tails.items() if tail > SLO_MS]
    return not missed, f"missed at {', '.join(missed)} ms" if missed else f"at most {max(tails.values()):.2f} ms"


def _lb_fails(rows: Rows) -> tuple[bool, str]:
    tails = rows.where(policy="lb").means("p99_ms", "publishers")
    return min(tails) > SLO_MS, f"at least {min(tails):.2f} ms"


def _penalty_falls(rows: Rows) -> tuple[bool, str]:
    tails = rows.where(policy="lb").means("p99_ms", "publishers")
    return falls(rows.where(policy="lb"), "p99_ms", "publishers"), listed(tails)


def _batch_amplifies(rows: Rows, single: Rows) -> tuple[bool, str]:
    ten, one = (found.where(policy="lb").means("p99_ms", "publishers") for found in (rows, single))
    ratios = [a / b for a, b in zip(ten, one, strict=True)]
    return min(ratios) > 1, f"{min(ratios):.1f} to {max(ratios):.1f} times"


def claims(panel: str, batch: int) -> list[Claim]:
    """The claims on a panel."""
    # 100 kmsg/s in batches of 10 on one broker is a statement of the fit.
    kind: Kind = "calibration" if panel == "b" else "paper"
    found = [
        Claim(
            "Conc meets the SLO for every number of publishers",
            "all",
            _conc_meets,
            where="6.2, ¶ 3",
            kind=kind,
        ),
        Claim("LB meets it for none", "none", _lb_fails, where="6.2, ¶ 3"),
        Claim("the penalty of LB falls with the number of publishers", "falls", _penalty_falls, where="6.2, ¶ 4"),
    ]
    if batch > 1:
        single = {"b": "fig7a", "d": "fig7c"}[panel]
        found.append(
            Claim(
                "LB is worse for batches than for single messages",
                "worse",
                _batch_amplifies,
                (single,),
                where="6.2, ¶ 5",
            )
        )
    return found


PANELS = {"a": ("poisson", 1), "b": ("poisson", 10), "c": ("periodic", 1), "d": ("periodic", 10)}
RESULTS = [
    Result(
        f"fig7{panel}",
        f"Concentration: LB against Conc, {process}, batch {batch}",
        "Conc meets the SLO on few brokers, LB pays the penalty of six.",
        points(process=[process], batch=[batch], publishers=PUBLISHERS),
        points(process=[process], batch=[batch], publishers=TINY),
        run,
        claims(panel, batch),
        draw,
        weight=2,
    )
    for panel, (process, batch) in PANELS.items()
]
