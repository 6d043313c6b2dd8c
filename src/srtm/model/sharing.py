"""Brokers that topics share: which parts of topics fit onto one broker together, in closed form.

In: parts of topics, each with its work and its latency on a broker of its own. Out: a broker for each part, and the
latency that its neighbours add. Reads of all topics at a broker wait for its processor (`capacity.wait`). As in the
controller (`control.placing.neighbours`), a part beside others is as slow as alone, and slower by as much as that wait
grows; and all of that stays below the SLO by a margin, because it is a prediction. A part alone at a broker needs none.

Messages of one instant are one event, which takes as long as all of them: groups that send together collide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from srtm.model._compiled import callable_from_compiled, compiled
from srtm.model.capacity import Stream, Wait, wait
from srtm.model.room import MARGIN
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from srtm.model.broker_models import ServiceModel
    from srtm.model.latency import SLO
    from srtm.model.server import Background
    from srtm.units import Number

    Ints = NDArray[np.int64]
    Indices = NDArray[np.int32]
    Floats = NDArray[np.float64]

_PER_DOUBLING = 4  # bins of events' costs: few streams to solve for, and each bin keeps its mean
_BINS = 40 * _PER_DOUBLING  # up to 2^40 ns, a quarter of an hour
_LITTLE = 0.01  # of a broker: if so little finds no room there, nothing will


@dataclass(frozen=True, slots=True)
class Work:
    """Events at a broker by bins of their cost: how many there are per ns, and how much of a processor they take."""

    bins: Ints
    per_ns: Floats
    loads: Floats

    @classmethod
    def of(cls, times: Ints, senders: Indices, service: ServiceModel) -> Work:
        """The work of sorted arrivals, over at least a second."""
        one, two = (service.stream(1.0, batch).cost_ns for batch in (1, 2))
        found = np.zeros((2, _BINS))
        _tally(times, senders, 2 * one - two, two - one, found)
        found /= max(int(times[-1] - times[0]), NS_PER_S)
        bins = np.flatnonzero(found[0])
        return cls(bins, *found[:, bins])

    @classmethod
    def of_background(cls, background: Background | None, service: ServiceModel) -> Work:
        """The work of load that a broker already carries."""
        streams = [service.stream(background.rate_mps, background.batch)] if background else []
        bins = np.array([_bin(stream.cost_ns, _BINS) for stream in streams], np.int64)
        return cls(bins, np.array([each.per_ns for each in streams]), np.array([each.load for each in streams]))

    @property
    def load(self) -> float:
        """The part of all cores that it takes."""
        return float(self.loads.sum())


def _together(found: Floats, work: Work) -> Floats:
    """Events per ns and loads by bin, with more work."""
    both = found.copy()
    both[:, work.bins] += work.per_ns, work.loads
    return both


def _wait(found: Floats, service: ServiceModel) -> Wait:
    """How long these events wait for a broker."""
    streams = [Stream(per_ns, load / per_ns) for per_ns, load in found[:, found[0] > 0].T.tolist()]
    return wait(streams, service.wake_ns + service.rest_ns)


@dataclass(frozen=True, slots=True)
class Host:
    """A broker that topics may share: its costs, the highest rate that it may carry, and load of its own."""

    name: str
    service: ServiceModel
    limit_mps: float | None = None
    background: Background | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """What was simulated on one broker holds for all of this kind."""
        return self.service, self.limit_mps, self.background


@dataclass(frozen=True, slots=True)
class Part:
    """Publishers of a topic at one broker: which one, their rate and work, and the topic's latency there alone."""

    host: str
    rate_mps: float
    work: Work
    alone_ns: int


class _Crowd:
    """The parts of topics at a broker."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.parts = 0
        self.rate_mps = host.background.rate_mps if host.background else 0.0
        own = Work.of_background(host.background, host.service)
        self.own = self.work = _together(np.zeros((2, _BINS)), own)
        self.load = own.load
        self.patience_ns = math.inf  # the longest wait that breaks no promise
        self.full = False
        self._wait: Wait | None = None

    def alone(self, part: Part) -> Wait:
        """How long a part's events wait at this broker if nobody else is there."""
        return _wait(_together(self.own, part.work), self.host.service)

    def wait(self) -> Wait:
        """How long events of all parts wait."""
        if self._wait is None:
            self._wait = _wait(self.work, self.host.service)
        return self._wait

    def takes(self, part: Part, patience_ns: float, quantile: Number) -> bool:
        """Whether a part that can bear this wait fits, and breaks no promise."""
        limit_mps = math.inf if self.host.limit_mps is None else self.host.limit_mps
        if self.full or self.rate_mps + part.rate_mps > limit_mps or self.load + part.work.load >= 1:
            return False
        wait_ns = _wait(_together(self.work, part.work), self.host.service).quantile_ns(quantile)
        self.full = wait_ns > self.patience_ns and part.work.load < _LITTLE
        return wait_ns <= min(self.patience_ns, patience_ns) and wait_ns < math.inf

    def add(self, part: Part, patience_ns: float) -> None:
        self._wait = None
        self.parts += 1
        self.rate_mps += part.rate_mps
        self.work = _together(self.work, part.work)
        self.load += part.work.load
        self.patience_ns = min(self.patience_ns, patience_ns)


class Shared:
    """Brokers, and the parts of topics that were placed on them, one topic after the other."""

    def __init__(self, hosts: Sequence[Host], slo: SLO) -> None:
        self._crowds = {host.name: _Crowd(host) for host in hosts}
        self._slo = slo
        kinds: dict[tuple[object, ...], list[_Crowd]] = {}
        for crowd in self._crowds.values():
            kinds.setdefault(crowd.host.kind, []).append(crowd)
        self._alike = {name: kinds[crowd.host.kind] for name, crowd in self._crowds.items()}

    def place(self, parts: Sequence[Part], *, holds: bool) -> list[str] | None:
        """Brokers for the parts of a topic, one each; None if there is no room.

        `holds` says whether the topic keeps its SLO alone. If not, others cannot break it. A part goes to the busiest
        broker that takes it, of those like the one on which it was simulated; and to an empty one if none does.
        """
        chosen: dict[int, tuple[_Crowd, float]] = {}
        for number in sorted(range(len(parts)), key=lambda number: -parts[number].work.load):
            part = parts[number]
            alike = self._alike[part.host]
            alone_ns = alike[0].alone(part).quantile_ns(self._slo.quantile)
            patience_ns = MARGIN * self._slo.limit_ns - part.alone_ns + alone_ns if holds else math.inf
            taken = [crowd for crowd, _ in chosen.values()]
            free = [crowd for crowd in alike if crowd not in taken]
            found = self._busiest(part, free, patience_ns) or self._empty(part, free)
            if found is None:
                return None
            chosen[number] = found, patience_ns
        for number, (crowd, patience_ns) in chosen.items():
            crowd.add(parts[number], patience_ns)
        return [chosen[number][0].host.name for number in range(len(parts))]

    def _busiest(self, part: Part, among: list[_Crowd], patience_ns: float) -> _Crowd | None:
        in_use = sorted((crowd for crowd in among if crowd.parts), key=lambda crowd: -crowd.load)
        return next((crowd for crowd in in_use if crowd.takes(part, patience_ns, self._slo.quantile)), None)

    def _empty(self, part: Part, among: list[_Crowd]) -> _Crowd | None:
        empty = [crowd for crowd in among if not crowd.parts]
        return next((crowd for crowd in empty if crowd.host.name == part.host), empty[0] if empty else None)

    def added_ns(self, host: str, part: Part, quantiles: Sequence[Number]) -> list[int]:
        """How much longer the neighbours of a part that was placed there make it take, at each quantile."""
        crowd = self._crowds[host]
        if crowd.parts < 2:
            return [0] * len(quantiles)
        alone, beside = crowd.alone(part), crowd.wait()
        return [round(max(0.0, beside.quantile_ns(each) - alone.quantile_ns(each))) for each in quantiles]

    def loads(self) -> dict[str, tuple[int, float, float]]:
        """Of each broker that is used: how many parts it has, their rate, and how much of it is busy."""
        return {name: (crowd.parts, crowd.rate_mps, crowd.load) for name, crowd in self._crowds.items() if crowd.parts}


def _bin(cost_ns: float, bins: int) -> int:
    return min(bins - 1, int(_PER_DOUBLING * math.log2(max(1.0, cost_ns)) + 0.5))


callable_from_compiled(_bin)


@compiled
def _tally(times: Ints, senders: Indices, read_ns: float, message_ns: float, found: Floats) -> None:
    """Count events and their costs, by bins of cost."""
    begin = 0
    while begin < len(times):
        end = begin + 1
        reads = 1
        while end < len(times) and times[end] == times[begin]:
            reads += senders[end] != senders[end - 1]
            end += 1
        cost = reads * read_ns + (end - begin) * message_ns
        place = _bin(cost, found.shape[1])
        found[0, place] += 1
        found[1, place] += cost
        begin = end
