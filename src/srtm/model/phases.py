"""Groups by phase, of publishers that send by the clock.

In: onsets of periodic publishers of nearly one period. Out: groups whose phases lie closer together than those of
publishers whose onset sequences are shifted by random amounts.

All share one period, fitted to all of their onsets at once: separate errors in each publisher's period would move the
phases apart. A publisher's phase is its mean lateness against that clock, or the middle or the beginning of
the interval that it falls into: whichever repeats best between every other onset and the rest. How well it repeats
is its error σ. Sorted phases are cut into runs by classification likelihood with that σ, which tells groups apart from
2.4 σ on, and the runs are compared with those of surrogates: a run counts if surrogates hardly ever reach its
likelihood, or if so many publishers reach it that those of surrogates would be a tenth of them at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from srtm.model import coincidence as plain
from srtm.model._compiled import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

_fit_period = compiled(plain.fit_period)
_measure_lateness = compiled(plain.measure_lateness)
_cut_phases = compiled(plain.cut_phases)

FINEST_NS = 1_000.0  # two clock readings never agree better than this
SURROGATES = 40
_SURROGATE_PHASES = 400_000  # over all surrogates: many publishers need fewer of them
_BLURRED = 0.01  # σ, as a share of the period, from which on phases are meaningless
_TRIMMED = 0.98
_BY_CHANCE = 0.1  # share of the grouped publishers that may be grouped by chance if many are
_SAME_PERIOD = 0.01


class Run(NamedTuple):
    """Publishers with close phases, and the share of that which surrogates do not explain (0 to 1)."""

    members: Ints
    confidence: float
    period_ns: float


def classes(periods: Floats) -> list[Ints]:
    """Publishers by period: the numbers of those whose periods form a chain without a gap above one per cent."""
    regular = np.flatnonzero(periods > 0)
    order = regular[np.argsort(periods[regular], kind="stable")]
    ratios = periods[order[1:]] / periods[order[:-1]]
    found = np.split(order, np.flatnonzero(ratios > 1 + _SAME_PERIOD) + 1)
    return [members for members in found if len(members) > 1]


def group_by_phase(
    onsets: Ints, starts: Ints, members: Ints, periods: Floats, shifts: Floats, significance: float
) -> list[Run]:
    """Groups among publishers of about one period; `shifts` are each member's surrogate shifts, in turns."""
    period, members = _refine(onsets, starts, np.sort(members), float(np.median(periods[members])))
    if len(members) < 2:
        return []
    late = np.empty((len(members), 9))
    _measure_lateness(onsets, starts, members, period, late)
    lateness, sigma = _repeatable(late)
    if sigma > _BLURRED * period:
        return []
    firsts = onsets[starts[members]]
    phases = np.mod((firsts - firsts.min()).astype(np.float64) + lateness, period)
    chance = []
    surrogates = max(4, min(SURROGATES, _SURROGATE_PHASES // len(members)))
    for number in range(surrogates):
        shifted = np.mod(phases + shifts[members, number] * period, period)
        chance += [(score, len(run)) for score, run in _runs(shifted, sigma, period) if len(run) > 1]
    runs = [(score, run) for score, run in _runs(phases, sigma, period) if len(run) > 1]
    threshold = min(
        _threshold(chance, significance * surrogates * len(members)),
        _outnumbered([(score, len(run)) for score, run in runs], chance, surrogates),
    )
    found = []
    for score, run in runs:
        if score > threshold:
            width = _width(phases[run], period) + 2 * sigma
            by_chance = (len(members) - 1) * width / period
            found.append(Run(members[run], max(0.0, 1 - by_chance / len(run)), period))
    return found


def _refine(onsets: Ints, starts: Ints, members: Ints, period: float) -> tuple[float, Ints]:
    """The period that fits all members best, and the members that keep to it."""
    for _ in range(2):
        covariance, variance = _fit_period(onsets, starts, members, period)
        period += covariance / variance
    late = np.empty((len(members), 9))
    _measure_lateness(onsets, starts, members, period, late)
    return period, members[late[:, 2] - late[:, 1] < period / 2]


def _repeatable(late: Floats) -> tuple[Floats, float]:
    """Each publisher's lateness by the statistic that repeats best, and the error of that statistic."""
    best: tuple[float, Floats] | None = None
    # Weights of mean, least and largest, and how much the error shrinks from half the onsets to all. For extremes it
    # halves, but their tails are longer than those of the normal law that cuts runs, so less is assumed.
    for weights, gain in (((1.0, 0.0, 0.0), 2**0.5), ((0.0, 0.5, 0.5), 2**0.75), ((0.0, 1.0, 0.0), 2**0.75)):
        whole, even, odd = (late[:, k : k + 3] @ np.array(weights) for k in (0, 3, 6))
        differences = np.sort((even - odd) ** 2)
        kept = differences[: max(1, int(_TRIMMED * len(differences)))]
        sigma = float(np.sqrt(kept.mean() / 2)) / gain
        if best is None or sigma < best[0]:
            best = sigma, whole
    assert best is not None
    return best[1], max(best[0], FINEST_NS)


def _runs(phases: Floats, sigma: float, period: float) -> list[tuple[float, Ints]]:
    """The runs of phases on a circle, each with its likelihood against an even spread."""
    order = np.argsort(phases, kind="stable")
    ordered = phases[order]
    gaps = np.diff(ordered, append=ordered[0] + period)
    turn = int(np.argmax(gaps)) + 1  # cut the circle open at its widest gap
    order = np.roll(order, -turn)
    ordered = np.roll(ordered, -turn)
    ordered = np.where(ordered < ordered[0], ordered + period, ordered)
    count = len(ordered)
    cost, back = np.empty(count + 1), np.zeros(count + 1, np.int64)
    _cut_phases(ordered, sigma, float(np.log(count)), cost, back)
    runs = []
    end = count
    while end:
        begin = int(back[end])
        here = ordered[begin:end]
        squares = float(((here - here.mean()) ** 2).sum())
        size = end - begin
        score = size * np.log(size / count * period / (sigma * np.sqrt(2 * np.pi))) - squares / (2 * sigma * sigma)
        runs.append((float(score), np.sort(order[begin:end])))
        end = begin
    return runs


def _threshold(chance: list[tuple[float, int]], allowed: float) -> float:
    """The score above which surrogates group no more than `allowed` publishers."""
    for score, size in sorted(chance, reverse=True):
        allowed -= size
        if allowed < 0:
            return score
    return 0.0


def _outnumbered(found: list[tuple[float, int]], chance: list[tuple[float, int]], surrogates: int) -> float:
    """The score above which runs hold so many publishers that those of surrogates are only a small share."""
    by_chance = sorted(chance, reverse=True)
    threshold, mine, theirs, seen = np.inf, 0, 0, 0
    for score, size in sorted(found, reverse=True):
        mine += size
        while seen < len(by_chance) and by_chance[seen][0] >= score:
            theirs += by_chance[seen][1]
            seen += 1
        if theirs <= _BY_CHANCE * surrogates * mine:
            threshold = np.nextafter(score, -np.inf)
    return float(threshold)


def _width(phases: Floats, period: float) -> float:
    ordered = np.sort(phases)
    gaps = np.diff(ordered, append=ordered[0] + period)
    return float(period - gaps.max())
