"""Table 1, live: rounds and time of the load distribution by group size, with prediction and by measuring alone.

`expected` is the number of rounds of the same search in simulation, at the same scale. A round ends when its answer is
certain (docs/adr/0013-rounds.md), not after the paper's 60 s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.lab.fast_fit import FITS
from srtm.lab.live.fig9a import GROUP_SIZES, fit_facts
from srtm.lab.live.world import NOISE
from srtm.lab.result import Claim, Panel, Point, Result, Row, Rows, Series, listed, points
from srtm.lab.world import WITH_MARGIN
from srtm.model.broker_models import broker_model
from srtm.model.latency import SLO
from srtm.model.profile import profile
from srtm.sim.simulate import SimulatedBroker, SimulatedTopic, simulate
from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    from srtm.lab.live.world import Live
    from srtm.workload.publishers import Workload

PAPER_S = 60  # length of a round


def run(world: Live, point: Point, seed: int) -> list[Row]:
    """Run SRTM's search on live brokers."""
    workload = world.workload(seed, group_size=int(point["group_size"]), seconds=world.longest_s)
    seen = world.fitted(workload, "srtm", WITH_MARGIN, fit=str(point["fit"]), record=False)
    return [{**point, **fit_facts(seen), "expected": _expected(world, workload), "late_p99_ms": seen.late_p99_ms}]


def _expected(world: Live, workload: Workload) -> int:
    """Number of rounds of a measured search in simulation."""
    arrivals = workload.arrivals()
    topic = SimulatedTopic(workload.publishers(), arrivals, profile(arrivals.times_ns, quantile=WITH_MARGIN).bucket)
    service = broker_model("srtm-broker").service
    brokers = [SimulatedBroker(f"broker-{n}", world.mcap_mps, service) for n in range(1, world.brokers + 1)]
    return simulate(topic, brokers, "srtm", SLO(round(world.slo_ms * NS_PER_MS))).rounds


def draw(rows: Rows) -> Panel:
    """Time of the load distribution by group size, k beside each point."""
    shown = [Series.of(name, rows.where(fit=fit), "group_size", "elapsed_s", label="k") for fit, name in FITS.items()]
    return Panel("Live: load distribution", "publishers in a correlation group", "time (s)", shown)


def _met(rows: Rows) -> tuple[bool, str]:
    met = sum(rows.column("fit_met"))
    return met == len(rows), f"{met:.0f} of {len(rows)}"


def _as_expected(rows: Rows) -> tuple[bool, str]:
    own = rows.where(fit="measure")
    rounds, expected = own.means("rounds", "group_size"), own.means("expected", "group_size")
    near = all(b / 2 <= a <= b * 2 for a, b in zip(rounds, expected, strict=True))
    return near, f"{listed(rounds, '.3g')} against {listed(expected, '.3g')}"


def _no_more_rounds(rows: Rows) -> tuple[bool, str]:
    measured, modelled = (rows.where(fit=fit).means("rounds", "group_size") for fit in FITS)
    fewer = all(a >= b for a, b in zip(measured, modelled, strict=True))
    return fewer, f"{listed(modelled, '.3g')} against {listed(measured, '.3g')}"


def _shorter_rounds(rows: Rows) -> tuple[bool, str]:
    seconds = sum(rows.column("elapsed_s")) / max(1, sum(rows.column("rounds")))
    return seconds < PAPER_S, f"{seconds:.1f} s a round"


RESULTS = [
    Result(
        "table1-live",
        "Load distribution latency on live brokers",
        "From the beginning of the search to the placement that is kept.",
        points(group_size=GROUP_SIZES, fit=FITS),
        points(group_size=(20,), fit=FITS),
        run,
        [
            Claim("every search ends with the SLO met", "all", _met, kind="ours"),
            Claim("rounds of a measured search as in simulation, within a factor of 2", "—", _as_expected, kind="ours"),
            Claim("predicting first takes no more rounds", "fewer", _no_more_rounds, where="6.5, ¶ 7"),
            Claim("a round takes less than the paper's", "60 s", _shorter_rounds, kind="ours"),
        ],
        draw,
        columns={
            "group_size": "group size",
            "fit": "fit",
            "k": "k",
            "rounds": "rounds",
            "fit_over": "search over",
            "expected": "simulated",
            "elapsed_s": "seconds",
            "fit_met": "SLO met",
            **NOISE,
        },
    )
]
