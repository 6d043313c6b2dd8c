"""Figs. 9a, 10a and 11a and Table 1 on paced brokers: the controller's measured search against Max-Min.

SRTM's cells run the search that ships, round by round, and then a lap of traffic where it ended; shares are as
publishers declare. Max-Min is split as the simulator splits it, on its best number of brokers, and for Fig. 10a on as
many as SRTM took (`forced`). b is at 99.5 %: with b at 99 % a search that knows only declarations does not end
(docs/evaluation.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.lab import fig9, fig11, table1
from srtm.lab.live.rows import AS_RECORDED, COLUMNS, LOSSLESS, MARGIN, best_k, row
from srtm.lab.result import Claim, Panel, Point, Result, Row, Rows, Series, listed, points
from srtm.lab.world import WITH_MARGIN

if TYPE_CHECKING:
    from srtm.lab.live.paced import Paced

SPREADS_MS = (1, 8)


def run(world: Paced, point: Point, seed: int) -> list[Row]:
    """SRTM, with Max-Min on its number of brokers beside it, or Max-Min."""
    topic = world.topic(fig9.population(point), seed, WITH_MARGIN)
    if point["policy"] == "max_min":
        return [
            {**point, **row(world.split(topic, "max_min", best_k(topic, "max_min", seed), seed), MARGIN), **_NO_FIT}
        ]
    aware, blind = world.fit(topic, seed, force="spread_ms" not in point)
    found, searched = aware.found, aware.scheduled
    fit: Row = {
        "iterations": " ".join(f"{step.k}:{step.rounds}" for step in found.iterations),
        "fit_met": aware.met,
        "fit_over": aware.over,
        "sim_k": searched.k,
        "sim_rounds": searched.rounds,
    }
    rows: list[Row] = [{**point, **row(aware, MARGIN), **fit}]
    if blind is not None:
        rows.append({**point, **row(blind, MARGIN), **_NO_FIT, "policy": "forced"})
    return rows


_NO_FIT: Row = {"iterations": "", "fit_met": False, "fit_over": True, "sim_k": 0, "sim_rounds": 0}


def _draw_rounds(rows: Rows) -> Panel:
    own = table1.searches(rows)
    shown = [
        Series.of("SRTM, live", own, "group_size", "rounds", label="k"),
        Series.of("the same search, simulated", own, "group_size", "sim_rounds", label="sim_k"),
        table1.PAPER,
    ]
    return Panel("Live: load distribution", "publishers in a correlation group", "rounds", shown)


def _met(rows: Rows) -> tuple[bool, str]:
    own = table1.searches(rows)
    return all(own.column("fit_met")), f"{sum(own.column('fit_met')):.0f} of {len(own)} searches"


def _same_k(rows: Rows) -> tuple[bool, str]:
    own = table1.searches(rows)
    ours, theirs = own.means("k", "group_size"), own.means("sim_k", "group_size")
    near = all(abs(a - b) <= 1 for a, b in zip(ours, theirs, strict=True))
    return near, f"{listed(ours, '.2g')} against {listed(theirs, '.2g')}"


def _no_more_rounds(rows: Rows) -> tuple[bool, str]:
    found = {int(size): at.mean("rounds") for size, at in table1.searches(rows).along("group_size").items()}
    fewer = all(rounds <= table1.PAPER_ROUNDS[size] for size, rounds in found.items())
    return fewer, listed(found, ".3g")


def _apart(rows: Rows) -> tuple[bool, str]:
    """Whether every run of SRTM is faster than every run of Max-Min, where SRTM takes several brokers."""
    split = fig9.larger(rows)
    worst = {size: max(at.column("p99_ms")) for size, at in split.where(policy="srtm").along("group_size").items()}
    best = {size: min(at.column("p99_ms")) for size, at in split.where(policy="max_min").along("group_size").items()}
    ours = ", ".join(f"{size:g}: {worst[size]:.2f} < {best[size]:.2f}" for size in worst)
    return bool(worst) and all(worst[size] < best[size] for size in worst), f"{ours} ms"


_BESIDE = {"rounds": "rounds", "sim_k": "simulated k", "fit_over": "search over"}
_POINTS = points(process=["poisson"], group_size=fig9.GROUP_SIZES, policy=fig9.POLICIES)
_TINY = points(process=["poisson"], group_size=(5, 10, 30), policy=fig9.POLICIES)
_SPREAD = points(process=["poisson"], group_size=[25], spread_ms=SPREADS_MS, policy=fig9.POLICIES)
RESULTS = [
    Result(
        "fig9a-live",
        "Correlation-awareness on paced brokers: Max-Min against SRTM, poisson",
        "SRTM cuts the bursts that Max-Min leaves whole.",
        _POINTS,
        _TINY,
        run,
        [
            *fig9.claims(),
            Claim("every run of SRTM is faster than every run of Max-Min", "—", _apart, kind="ours"),
            AS_RECORDED,
            LOSSLESS,
        ],
        fig9.draw,
        columns={"group_size": "group size", **COLUMNS, **_BESIDE},
        paced=True,
    ),
    Result(
        "fig10a-live",
        "Max-Min on SRTM's number of paced brokers, poisson",
        "More brokers make a blind assignment worse.",
        _POINTS,
        _TINY,
        run,
        fig9.forced_claims(),
        fig9.draw_forced,
        rows_of="fig9a-live",
        paced=True,
    ),
    Result(
        "fig11a-live",
        "Noisy correlation on paced brokers: Max-Min against SRTM, poisson",
        "Knowing the groups still helps while they are nearly synchronous; then bursts dissolve by themselves.",
        _SPREAD,
        _SPREAD,
        run,
        [*fig11.claims("poisson"), AS_RECORDED, LOSSLESS],
        fig11.draw,
        columns={"spread_ms": "spread ms", **COLUMNS, **_BESIDE},
        paced=True,
    ),
    Result(
        "table1-live",
        "Load distribution latency of SRTM on paced brokers",
        "The controller's own search, by measuring.",
        _POINTS,
        _TINY,
        run,
        [
            Claim("the search starts on one broker", "k = 1", table1.starts_on_one, where="6.5, ¶ 4"),
            Claim("groups of 5 fit on one broker", "1", table1.few_on_one, where="6.5, ¶ 3", kind="calibration"),
            Claim("groups of 10 need more than one", "2", table1.not_ten, where="Table 1", kind="calibration"),
            Claim("larger groups take longer", "grows", table1.longer, where="6.5, ¶ 7"),
            Claim("every search ends with the SLO met", "all", _met, kind="ours"),
            Claim("k within one of the same search in simulation", "—", _same_k, kind="ours"),
            Claim("no more rounds than the paper's search", table1.ROUNDS, _no_more_rounds, kind="ours"),
        ],
        _draw_rounds,
        rows_of="fig9a-live",
        paced=True,
    ),
]
