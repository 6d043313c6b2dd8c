"""How long read events wait in front of a broker that others use as well, in closed form.

Poisson streams of events with fixed costs are an M/G/1 queue. The tail of its wait falls as C·e^(−ηx), where η solves
Σ λ(e^(ηc) − 1) = η and C = (1 − ρ) / (Σ λ c e^(ηc) − 1). With one stream that is the last exponential of `md1`. On
several cores η is that of one core which is as many times faster. Two stages in a row add their waits up.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

_STEPS = 100
_STEEPEST = 40.0  # e^-40 is less than a double can add to 1


class Stream(NamedTuple):
    """Events in Poisson order: their rate, and the processor time that each takes."""

    per_ns: float
    cost_ns: float

    @property
    def load(self) -> float:
        """The part of one core that it takes."""
        return self.per_ns * self.cost_ns


class Wait(NamedTuple):
    """A wait with P(W > x) = `odds` · e^(−`decay`·x), x in ns, and never more than `load`."""

    load: float
    odds: float
    decay: float


def wait(streams: Iterable[Stream]) -> Wait:
    """How long events of these streams wait for one server."""
    busy = [stream for stream in streams if stream.load > 0]
    load = sum(stream.load for stream in busy)
    if not busy:
        return Wait(0.0, 0.0, math.inf)
    if load >= 1:
        return Wait(1.0, 1.0, 0.0)
    unit = max(stream.cost_ns for stream in busy)
    sizes = [(stream.per_ns * unit, stream.cost_ns / unit) for stream in busy]
    eta = min(_STEEPEST, 2 * (1 - load) / sum(rate * cost**2 for rate, cost in sizes))  # right of the root, or there
    for _ in range(_STEPS):
        grown = [(rate * math.exp(eta * cost), rate, cost) for rate, cost in sizes]
        step = (sum(up - rate for up, rate, _ in grown) - eta) / (sum(up * cost for up, _, cost in grown) - 1)
        if not step > eta * 1e-9:
            break
        eta -= step
    slope = sum(rate * cost * math.exp(eta * cost) for rate, cost in sizes) - 1
    return Wait(load, min(1.0, (1 - load) / slope) if slope > 0 else 1.0, eta / unit)


def exceeds(room_ns: float, first: Wait, second: Wait) -> float:
    """The part of events that wait longer than this for both stages together."""
    if room_ns < 0 or 0.0 in (first.decay, second.decay):
        return 1.0
    (c1, d1), (c2, d2) = sorted(((each.odds, each.decay) for each in (first, second)), key=lambda each: each[1])
    slow, fast = math.exp(-d1 * room_ns), 0.0 if d2 == math.inf else math.exp(-d2 * room_ns)
    if d2 == math.inf:
        both = slow
    elif d2 - d1 > 1e-9 * d1:
        both = (d2 * slow - d1 * fast) / (d2 - d1)
    else:
        both = (1 + d1 * room_ns) * slow
    found = c1 * (1 - c2) * slow + c2 * (1 - c1) * fast + c1 * c2 * both
    return min(found, first.load + second.load, 1.0)


def busy_with_wakes(streams: Iterable[Stream], wake_ns: int) -> float:
    """The load of streams on a loop that also has to wake up for every read that finds it idle: B = ρ + λ(1 − B)u."""
    listed = list(streams)
    reads, load = sum(stream.per_ns for stream in listed), sum(stream.load for stream in listed)
    return min(1.0, (load + reads * wake_ns) / (1 + reads * wake_ns))
