"""Fig. 9a, live: Max-Min against SRTM by group size, single messages, placed by the real Load Distributor.

A broker's declared capacity is below the topic's rate, so that every policy must split the topic: on one machine,
brokers share the processors, and a second broker adds no capacity that the SLO could show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.lab.fig9 import POLICIES
from srtm.lab.live.world import NOISE
from srtm.lab.result import Claim, Panel, Point, Result, Row, Rows, Series, listed, points
from srtm.lab.world import WITH_MARGIN
from srtm.units import NS_PER_MS, percentile

if TYPE_CHECKING:
    from srtm.lab.live.world import Live, Observed

GROUP_SIZES = (5, 10, 15, 20)


def run(world: Live, point: Point, seed: int) -> list[Row]:
    """Run one policy; tails are at the worst broker, because the SLO must hold at each."""
    workload = world.workload(seed, group_size=int(point["group_size"]), seconds=world.longest_s)
    seen = world.fitted(workload, str(point["policy"]), WITH_MARGIN)
    total_ms = max(percentile(part.total_ns, "0.99") for part in seen.parts.values()) / NS_PER_MS
    return [
        {
            **point,
            **fit_facts(seen),
            "access_p99_ms": max(percentile(part.access_ns, "0.99") for part in seen.parts.values()) / NS_PER_MS,
            "p99_ms": total_ms,
            "slo_ms": world.slo_ms,
            "meets_slo": total_ms <= world.slo_ms,
            "late_p99_ms": seen.late_p99_ms,
        }
    ]


def fit_facts(seen: Observed) -> Row:
    """Facts about the search of the Load Distributor."""
    fitted = seen.topic["fitted"] or {"rounds": [], "elapsed_s": 0.0, "met": False}
    under_way = seen.topic["fitting"] or {"rounds": 0}
    return {
        "k": int(seen.topic["k"]),
        "rounds": len(fitted["rounds"]) + int(under_way["rounds"]),
        "elapsed_s": float(fitted["elapsed_s"]),
        "fit_met": bool(fitted["met"]),
        "fit_over": not seen.topic["fitting"],
    }


def draw(rows: Rows) -> Panel:
    """p99 at the worst broker, k beside each point."""
    shown = [
        Series.of(name, rows.where(policy=policy), "group_size", "p99_ms", label="k")
        for policy, name in POLICIES.items()
    ]
    slo_ms = float(rows[0]["slo_ms"])
    return Panel("Live: Poisson topic", "publishers in a correlation group", "p99 latency (ms)", shown, True, slo_ms)


def _srtm_meets(rows: Rows) -> tuple[bool, str]:
    own = rows.where(policy="srtm")
    tails = {x: at.mean("p99_ms") for x, at in own.along("group_size").items()}
    missed = [f"{x:g}: {tail:.1f}" for x, tail in tails.items() if tail > own[0]["slo_ms"]]  # type: ignore[operator]
    return not missed, f"missed at {', '.join(missed)} ms" if missed else f"at most {max(tails.values()):.1f} ms"


def _max_min_fails(rows: Rows) -> tuple[bool, str]:
    own = rows.where(policy="max_min")
    tails = own.means("p99_ms", "group_size")
    return max(tails) > float(own[0]["slo_ms"]), f"{listed(tails, '.1f')} ms"


def _shorter_waits(rows: Rows) -> tuple[bool, str]:
    blind, aware = (rows.where(policy=policy).means("access_p99_ms", "group_size") for policy in POLICIES)
    return all(
        a >= b for a, b in zip(blind, aware, strict=True)
    ), f"{listed(aware, '.1f')} against {listed(blind, '.1f')}"


RESULTS = [
    Result(
        "fig9a-live",
        "Correlation-awareness on live brokers: Max-Min against SRTM",
        "SRTM cuts the bursts that Max-Min leaves whole.",
        points(group_size=GROUP_SIZES, policy=POLICIES),
        points(group_size=(20,), policy=POLICIES),
        run,
        [
            Claim(
                "SRTM meets the SLO, for all group sizes (SLO of this scale)", "all", _srtm_meets, where="6.4.1, ¶ 2"
            ),
            Claim("Max-Min does not (somewhere)", "above the SLO", _max_min_fails, where="6.4.1, ¶ 2"),
            Claim("messages wait less for tokens under SRTM, for all group sizes", "—", _shorter_waits, kind="ours"),
        ],
        draw,
        columns={
            "group_size": "group size",
            "policy": "policy",
            "k": "k",
            "rounds": "rounds",
            "fit_over": "search over",
            "access_p99_ms": "p99 access ms",
            "p99_ms": "p99 total ms",
            "meets_slo": "SLO met",
            **NOISE,
        },
    )
]
