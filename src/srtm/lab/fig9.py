"""Figs. 9 and 10: Max-Min against SRTM, 1,000 publishers in exactly correlated groups, batches of 10.

Fig. 10 adds Max-Min on as many brokers as SRTM takes (`forced`). Table 1 counts the rounds of the same searches.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from srtm.lab.result import SLO_MS, Claim, Panel, Point, Result, Row, Rows, Series, listed, points, risen
from srtm.lab.world import best_split, facts, variants
from srtm.units import NS_PER_MS
from srtm.workload.publishers import Population

if TYPE_CHECKING:
    from srtm.lab.world import World

GROUP_SIZES = (5, 10, 15, 20, 25, 30)
TINY = (5, 10, 30)
POLICIES = {"max_min": "Max-Min", "srtm": "SRTM"}
PANELS = {"a": "poisson", "b": "periodic"}


def population(point: Point) -> Population:
    """1,000 publishers in groups, each group within `spread_ms`."""
    process: Literal["poisson", "periodic"] = "periodic" if point.get("process") == "periodic" else "poisson"
    spread_ns = int(float(point.get("spread_ms", 0)) * NS_PER_MS)
    return Population(1_000, batch=10, process=process, group_size=int(point["group_size"]), spread_ns=spread_ns)


def run(world: World, point: Point, seed: int) -> list[Row]:
    """All three on the same traffic; `iterations` lists the brokers and rounds of each iteration of a search."""
    rows: list[Row] = []
    for variant, topic in variants(world, population(point), seed):
        aware = world.fit(topic, "srtm", seed)
        steps = " ".join(f"{step.k}:{step.rounds}" for step in aware.iterations if step.rounds)
        runs = {"max_min": best_split(world, topic, "max_min", seed), "srtm": aware}
        if "spread_ms" not in point:
            runs["forced"] = world.spread(topic, "max_min", aware.k, seed)
        rows += [
            {**point, **variant, **facts(found), "policy": policy, "iterations": steps if policy == "srtm" else ""}
            for policy, found in runs.items()
        ]
    return rows


def draw(rows: Rows) -> Panel:
    """Mean and standard deviation of p99, k beside each point."""
    return drawn(rows, POLICIES, "group_size", "publishers in a correlation group")


def drawn(rows: Rows, policies: dict[str, str], along: str, axis: str, column: str = "p99_ms") -> Panel:
    """A line for each policy."""
    shown = [Series.of(name, rows.where(policy=policy), along, column, label="k") for policy, name in policies.items()]
    title = f"{str(rows[0]['process']).capitalize()} topic"
    what = {"p99_ms": "p99 latency (ms)", "access_p99_ms": "p99 access delay at the worst broker (ms)"}[column]
    return Panel(title, axis, what, shown, column == "p99_ms", SLO_MS)


def _draw_access(rows: Rows) -> Panel:
    return drawn(rows, POLICIES, "group_size", "publishers in a correlation group", "access_p99_ms")


def draw_forced(rows: Rows) -> Panel:
    """The same, with Max-Min on as many brokers as SRTM takes."""
    return drawn(rows, {**POLICIES, "forced": "Max-Min, SRTM's k"}, "group_size", "publishers in a correlation group")


def _meets(rows: Rows) -> tuple[bool, str]:
    tails = {x: at.mean("p99_ms") for x, at in rows.where(policy="srtm").along("group_size").items()}
    missed = [f"{x:g}: {tail:.2f}" for x, tail in tails.items() if tail > SLO_MS]
    return not missed, f"missed at {', '.join(missed)} ms" if missed else f"at most {max(tails.values()):.2f} ms"


def _max_min_fails(rows: Rows) -> tuple[bool, str]:
    tail = rows.where(policy="max_min", group_size=30).mean("p99_ms")
    return tail > SLO_MS, f"{tail:.2f} ms at 30"


def larger(rows: Rows) -> Rows:
    """Groups for which SRTM takes more than one broker: on one, there is nothing to choose."""
    aware = rows.where(policy="srtm").along("group_size")
    split = [size for size, at in aware.items() if at.mean("k") > 1]
    return Rows(row for row in rows if row["group_size"] in split)


def _fewer_brokers(rows: Rows) -> tuple[bool, str]:
    blind, aware = (larger(rows).where(policy=policy).means("k", "group_size") for policy in POLICIES)
    fewer = bool(aware) and all(a < b for a, b in zip(blind, aware, strict=True))
    return fewer, f"{listed(blind, '.2g')} against {listed(aware, '.2g')}"


def _more_brokers(rows: Rows) -> tuple[bool, str]:
    aware = rows.where(policy="srtm")
    at, ks = list(aware.along("group_size").values()), aware.means("k", "group_size")
    fewer = any(risen(after, before, "k") for before, after in pairwise(at))
    return ks[-1] > ks[0] and not fewer, listed(ks, ".2g")


def _small_access(rows: Rows) -> tuple[bool, str]:
    """A penalty is significant if it alone misses the SLO."""
    waits = rows.where(policy="srtm").means("access_p99_ms", "group_size")
    return max(waits) < SLO_MS, f"{max(waits):.2f} ms at most"


def _forcing_hurts(rows: Rows) -> tuple[bool, str]:
    own, forced = (larger(rows).where(policy=policy).means("p99_ms", "group_size") for policy in ("max_min", "forced"))
    worse = bool(own) and all(a < b for a, b in zip(own, forced, strict=True))
    return worse, f"{listed(own, '.1f')} become {listed(forced, '.1f')} ms"


def claims() -> list[Claim]:
    """The claims on a panel of Fig. 9."""
    return [
        Claim("larger groups need more brokers", "more", _more_brokers, where="6.4.1, ¶ 1"),
        Claim(
            "SRTM uses them without a significant DRL penalty",
            "not significant",
            _small_access,
            where="6.4.1, ¶ 2",
            draw=_draw_access,
        ),
        Claim("SRTM meets the SLO, up to groups of 30", "all", _meets, where="6.4.1, ¶ 2"),
        Claim("Max-Min does not, for groups of 30", "above 1 ms", _max_min_fails, where="6.4.1, ¶ 2"),
        Claim("Max-Min uses fewer brokers wherever SRTM uses several", "fewer", _fewer_brokers, where="6.4.1, ¶ 2"),
    ]


def forced_claims() -> list[Claim]:
    """The claims on a panel of Fig. 10."""
    return [Claim("on as many brokers as SRTM, Max-Min is even worse", "worse", _forcing_hurts, where="6.4.1, ¶ 2")]


RESULTS = [
    *(
        Result(
            f"fig9{panel}",
            f"Correlation-awareness: Max-Min against SRTM, {process}",
            "SRTM cuts the bursts that Max-Min leaves whole.",
            points(process=[process], group_size=GROUP_SIZES),
            points(process=[process], group_size=TINY),
            run,
            claims(),
            draw,
            weight=8,
            version=2,
        )
        for panel, process in PANELS.items()
    ),
    *(
        Result(
            f"fig10{panel}",
            f"Max-Min on SRTM's number of brokers, {process}",
            "More brokers make a blind assignment worse.",
            points(process=[process], group_size=GROUP_SIZES),
            points(process=[process], group_size=TINY),
            run,
            forced_claims(),
            draw_forced,
            rows_of=f"fig9{panel}",
        )
        for panel, process in PANELS.items()
    ),
]
