"""How long read events wait in front of a broker that others use as well, in closed form.

Poisson streams of events with fixed costs are an M/G/1 queue. The tail of its wait falls as C·e^(−ηx), where η solves
Σ λ(e^(ηc) − 1) = η and C = (1 − ρ) / (Σ λ c e^(ηc) − 1). With one stream that is the last exponential of `md1`. On
several cores η is that of one core which is as many times faster. Two stages in a row add their waits up. If an idle
server takes u longer for its first event, it is idle π = (1 − ρ) / (1 + λu) of the time, and C becomes
π Σ λ(e^(η(c + u)) − 1) / (η (Σ λ c e^(ηc) − 1)).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from srtm.units import Number, exact

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
    """A wait with P(W > x) = e^(`log_odds` − `decay`·x), x in ns, and never more than `load`, the part of busy time."""

    load: float
    log_odds: float
    decay: float

    def quantile_ns(self, quantile: Number) -> float:
        """The wait that is exceeded with the rest of the probability; infinite if the server never catches up."""
        tail = float(1 - exact(quantile, "quantile"))
        if self.load <= tail:
            return 0.0
        if not tail or not self.decay:
            return math.inf
        return max(0.0, (self.log_odds - math.log(tail)) / self.decay)


def wait(streams: Iterable[Stream], wake_ns: int = 0) -> Wait:
    """How long events of these streams wait for one server, which takes `wake_ns` more for one that finds it idle."""
    busy = [stream for stream in streams if stream.load > 0]
    load = sum(stream.load for stream in busy)
    if not busy:
        return Wait(0.0, -math.inf, math.inf)
    if load >= 1:
        return Wait(1.0, 0.0, 0.0)
    unit = max(stream.cost_ns for stream in busy)
    sizes = [(stream.per_ns * unit, stream.cost_ns / unit) for stream in busy]
    eta = min(_STEEPEST, 2 * (1 - load) / sum(rate * cost**2 for rate, cost in sizes))  # right of the root, or there
    for _ in range(_STEPS):
        grown = [(rate * math.exp(eta * cost), rate, cost) for rate, cost in sizes]
        step = (sum(up - rate for up, rate, _ in grown) - eta) / (sum(up * cost for up, _, cost in grown) - 1)
        if not step > eta * 1e-9:
            break
        eta -= step
    events, woken = sum(rate for rate, _ in sizes), eta * wake_ns / unit
    idle = (1 - load) / (1 + events * wake_ns / unit)
    # Σ λ(e^(η(c + u)) − 1), without e^(ηu), which may be beyond a double.
    first = sum(rate * math.exp(eta * cost) for rate, cost in sizes) - events * math.exp(-woken)
    slope = sum(rate * cost * math.exp(eta * cost) for rate, cost in sizes) - 1
    log_odds = woken + math.log(idle * first / (eta * slope)) if slope > 0 and first > 0 else 0.0
    return Wait(1 - idle, log_odds, eta / unit)


def exceeds(room_ns: float, first: Wait, second: Wait) -> float:
    """The part of events that wait longer than this for both stages together."""
    if room_ns < 0 or 0.0 in (first.decay, second.decay):
        return 1.0
    if math.inf in (first.decay, second.decay):
        only = first if second.decay == math.inf else second
        return _alone(room_ns, only) if only.decay < math.inf else 0.0
    (c1, d1), (c2, d2) = sorted(
        ((math.exp(min(0.0, each.log_odds)), each.decay) for each in (first, second)), key=_decay
    )
    slow, fast = math.exp(-d1 * room_ns), math.exp(-d2 * room_ns)
    both = (d2 * slow - d1 * fast) / (d2 - d1) if d2 - d1 > 1e-9 * d1 else (1 + d1 * room_ns) * slow
    found = c1 * (1 - c2) * slow + c2 * (1 - c1) * fast + c1 * c2 * both
    return min(found, first.load + second.load, 1.0)


def _alone(room_ns: float, each: Wait) -> float:
    return min(each.load, math.exp(min(0.0, each.log_odds - each.decay * room_ns)))


def _decay(each: tuple[float, float]) -> float:
    return each[1]
