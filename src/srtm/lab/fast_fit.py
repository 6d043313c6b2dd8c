"""Beyond the paper: model-first fitting, predicted from another minute of traffic, against measured fitting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.lab.fig9 import GROUP_SIZES, TINY, population
from srtm.lab.result import Claim, Panel, Point, Result, Row, Rows, Series, listed, points
from srtm.lab.world import WITH_MARGIN, facts

if TYPE_CHECKING:
    from srtm.lab.world import World

EARLIER = 500  # added to a seed: the topic at another time
FITS = {"measure": "measured", "model": "model first"}


def run(world: World, point: Point, seed: int) -> list[Row]:
    """Fit SRTM both ways; the history has the same bucket."""
    topic = world.topic(population(point), seed, WITH_MARGIN)
    earlier = world.topic(population(point), seed + EARLIER, WITH_MARGIN)
    history = type(earlier)(earlier.publishers, earlier.arrivals, topic.bucket)
    runs = {"measure": world.fit(topic, "srtm", seed), "model": world.fit(topic, "srtm", seed, history=history)}
    return [{**point, "fit": fit, **facts(found)} for fit, found in runs.items()]


def draw(rows: Rows) -> Panel:
    """Rounds by group size, k beside each point."""
    shown = [Series.of(name, rows.where(fit=fit), "group_size", "rounds", label="k") for fit, name in FITS.items()]
    return Panel("Rounds to a fit, Poisson", "publishers in a correlation group", "rounds", shown, log_y=True)


def _fewer_rounds(rows: Rows) -> tuple[bool, str]:
    measured, modelled = (rows.where(fit=fit).means("rounds", "group_size") for fit in FITS)
    fewer = all(a >= b for a, b in zip(measured, modelled, strict=True))
    return fewer, f"{listed(modelled, '.3g')} instead of {listed(measured, '.3g')}"


def _as_good(rows: Rows) -> tuple[bool, str]:
    measured, modelled = (rows.where(fit=fit) for fit in FITS)
    met = [sum(found.column("meets_slo")) / len(found) for found in (measured, modelled)]
    ours = f"k {modelled.mean('k'):.2f} against {measured.mean('k'):.2f}, SLO met in {met[1]:.0%} against {met[0]:.0%}"
    return modelled.mean("k") <= measured.mean("k") + 0.1 and met[1] >= met[0], ours


RESULTS = [
    Result(
        "fast_fit",
        "Model-first fitting against measured fitting",
        "The paper suggests models as an extension. Ours predicts a placement, and one round confirms it.",
        points(group_size=GROUP_SIZES),
        points(group_size=TINY),
        run,
        [
            Claim("better models reduce the number of rounds", "fewer", _fewer_rounds, where="6.5, ¶ 7"),
            Claim("on as many brokers (within 0.1 on average), within the SLO as often", "—", _as_good, kind="ours"),
        ],
        draw,
        weight=5,
    )
]
