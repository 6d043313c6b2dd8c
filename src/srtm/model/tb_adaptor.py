"""The TB Adaptor's rule (paper, section 5.4): shares follow the traffic, r by mean rates and b by bursts.

A burst is a quantile of the backlogs that messages found (`model.burst`), so a single outlier decides nothing. The
paper takes the largest backlog. That of brokers which report no other is taken, too.

Beyond the paper, waiting messages count as traffic of the next window. By rates alone, a queue that an outage left at
one broker would stay for good, while other brokers have tokens to spare.

In: the whole bucket, the present shares, and a history of each broker. Out: the new shares, which add up to no more
than the whole. A broker is silent if its history is out of date, or if it has a share and its history is too short. A
silent broker keeps its share and does not hold up the others. The first seconds of a topic say little: publishers are
still connecting, and one burst is all that a broker has seen. So what is expected of a broker counts as if it had been
seen in the seconds that are missing from its history, up to ten.

Ten seconds hold few large bursts, so brokers that are alike differ by chance. A share of b moves only as far as the
window proves: to the edge of SURE standard errors around what was seen, which the jackknife gives. It leaves out one
part of the window after the other, the same seconds at all brokers, so a burst that hits all of them cancels out, and a
difference that one second makes proves nothing. Clocks that differ cost certainty, not correctness. The bins in which
brokers report backlogs are a doubt of their own.

Hysteresis applies to taking. What no broker holds is given out at once. If b has fewer tokens than there are brokers
with traffic, the brokers take turns.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from fractions import Fraction
from math import sqrt
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from srtm.errors import InputError
from srtm.model.apportion import apportion
from srtm.model.bucket import TokenBucket
from srtm.model.latency import RESOLUTION, Sketch
from srtm.model.split import least_b, within
from srtm.units import NANO_PER_TOKEN, Number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LEAST_STEPS = 3  # publishers of one broker may start a second before those of another
EXPECTED_STEPS = 10  # so a long window does not believe a wrong declaration for long
HYSTERESIS = Fraction(5, 100)
SURE = 3  # standard errors: with two, shares of brokers that are alike move (docs/adr/0022)
_PARTS = 10  # of a window that are left out in turn; more would cost time, not change the answer
# The least r of an idle broker, as a part of an equal share: enough to start with, and little enough to leave 99 % of r
# to the others.
IDLE_R = Fraction(1, 100)


@dataclass(frozen=True, slots=True)
class Step:
    """What a broker saw of a topic in step `number` (of 1 s each, counted by the clock)."""

    number: int
    messages: int
    max_backlog_ntok: int
    largest_batch: int = 1
    backlogs: Sketch = field(default_factory=Sketch)  # that messages found, in whole tokens; empty if not reported

    def __post_init__(self) -> None:
        """Check that counts are whole and not negative; they come from a broker."""
        for name in ("number", "messages", "max_backlog_ntok", "largest_batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise InputError(f"{name} must be a whole number and not negative, but is {value!r}", value=value)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a broker is expected to see, by declarations: messages in a step, and its burst."""

    messages: Fraction
    burst_ntok: int


class History:
    """The last steps of one broker: a window of time, whether or not every step was reported."""

    def __init__(self, after: int = -1) -> None:
        """Begin with the step after that number."""
        self._after = after
        self._steps: deque[Step] = deque()
        self._backlogs = Sketch()  # of all steps

    def add(self, step: Step, window: int) -> None:
        """Add the newest step, and forget those before the window; ignore one that is not newer than the last."""
        if step.number <= (self._steps[-1].number if self._steps else self._after):
            return
        self._steps.append(step)
        self._backlogs.add(step.backlogs)
        while self._steps[0].number <= step.number - window:
            self._backlogs.remove(self._steps.popleft().backlogs)

    def is_current(self, number: int) -> bool:
        """Whether step `number`, or the one before it, was reported."""
        return bool(self._steps) and self._steps[-1].number >= number - 1

    def __len__(self) -> int:
        """The number of reported steps."""
        return len(self._steps)

    @property
    def mean_messages(self) -> Fraction:
        """Messages per reported step."""
        return Fraction(sum(step.messages for step in self._steps), max(1, len(self._steps)))

    @property
    def span(self) -> int:
        """Steps from the oldest to the newest, whether or not all were reported."""
        return self._steps[-1].number - self._steps[0].number + 1 if self._steps else 0

    @property
    def resolution(self) -> float:
        """How exactly a burst is known, as a part of it: backlogs come in bins, the largest one exactly."""
        return RESOLUTION if self._backlogs.counts else 0.0

    def burst_ntok(self, quantile: Number, without: range = range(0)) -> int:
        """The backlog of the window at this quantile; the largest one if the broker reports no other.

        `without` are the ages of steps to leave out; the newest has age 0.
        """
        newest = self._steps[-1].number if self._steps else 0
        if self._backlogs.counts:
            left_out = [step.backlogs for step in self._steps if newest - step.number in without]
            return self._backlogs.quantile_ns(quantile, left_out) * NANO_PER_TOKEN
        kept = (step.max_backlog_ntok for step in self._steps if newest - step.number not in without)
        return max(kept, default=0)

    @property
    def largest_batch(self) -> int:
        """The largest batch of the window."""
        return max((step.largest_batch for step in self._steps), default=1)


def adapt(
    whole: TokenBucket,
    shares: Mapping[str, TokenBucket | None],
    histories: Mapping[str, History],
    number: int,
    *,
    quantile: Number,
    window: int,
    waiting: Mapping[str, int] | None = None,
    expected: Mapping[str, Expected] | None = None,
    needs_ntok: Mapping[str, int] | None = None,
    hysteresis: Fraction = HYSTERESIS,
) -> dict[str, TokenBucket]:
    """The shares that fit the traffic at step `number`; if none would change by `hysteresis`, the present ones.

    In that case, the present shares grow by what no broker holds. A broker whose share is None has traffic but no share
    yet. `waiting` maps brokers to messages without tokens, which count as traffic of the next `window` of steps, and
    `expected` maps them to what stands in for the steps that their histories lack. `needs_ntok` maps them to bursts
    that count instead of the backlogs that they saw: those of brokers that lend each other tokens.
    """
    held = {name: share for name, share in shares.items() if share}
    known = [
        name
        for name, share in shares.items()
        if name in histories
        and histories[name].is_current(number)
        and (share is None or len(histories[name]) >= LEAST_STEPS)
    ]
    silent = [share for name, share in held.items() if name not in known]
    if not within(whole, silent if known else held.values()):
        raise InputError(f"the shares {[str(share) for share in held.values()]} exceed the whole bucket {whole}")
    if not known:
        return held
    r_left = whole.r_mtps - sum(share.r_mtps for share in silent)
    b_left = whole.b_ntok - sum(share.b_ntok for share in silent)
    queues = waiting or {}
    traffic = _Traffic({name: histories[name] for name in known}, expected or {}, quantile, min(window, EXPECTED_STEPS))
    demand = {name: traffic.messages(name) + Fraction(queues.get(name, 0), window) for name in known}
    served = _in_turn(known, shares, queues, demand, min(r_left, b_left // NANO_PER_TOKEN))
    if not served:
        return {name: share for name, share in held.items() if name not in known}
    demands = [demand[name] for name in served]
    # A broker cannot use more than the whole, so a long queue counts for no more than a full bucket.
    needs = [min(needs_ntok[name] if needs_ntok else traffic.burst_ntok(name), whole.b_ntok) for name in served]
    present = {name: share for name in served if (share := shares[name])}
    r_floor = min(r_left // len(served), max(1, int(Fraction(r_left, len(served)) * IDLE_R)))
    rates = apportion(r_left, demands, r_floor)
    least = least_b(b_left, [histories[name].largest_batch for name in served])
    floors = [tokens * NANO_PER_TOKEN for tokens in least]
    bursts = apportion(b_left, needs, floors)
    wanted = {name: TokenBucket(*pair) for name, *pair in zip(served, rates, bursts, strict=True)}
    if set(served) == set(known) == present.keys() and within(whole, held.values()):
        r_spare = r_left - sum(share.r_mtps for share in present.values())
        b_spare = b_left - sum(share.b_ntok for share in present.values())
        more = zip(served, apportion(r_spare, demands), apportion(b_spare, needs), strict=True)
        grown = {name: TokenBucket(present[name].r_mtps + r, present[name].b_ntok + b) for name, r, b in more}
        if needs_ntok is None and any(_differs(present[name], wanted[name], hysteresis) for name in served):
            doubts = [int(part * b_left) for part in traffic.doubts(served, whole.b_ntok)]
            bursts = _proven(bursts, doubts, floors, [grown[name].b_ntok for name in served])
            wanted = {name: TokenBucket(*pair) for name, *pair in zip(served, rates, bursts, strict=True)}
        if not any(_differs(present[name], wanted[name], hysteresis) for name in served):
            wanted = grown
    return {name: share for name, share in held.items() if name not in known} | wanted


@dataclass(frozen=True, slots=True)
class _Traffic:
    """What brokers have seen, with what was expected in place of the steps that are missing."""

    histories: Mapping[str, History]
    expected: Mapping[str, Expected]
    quantile: Number
    steps: int  # of a whole window, as far as missing ones count

    def messages(self, name: str) -> Fraction:
        """Messages of a broker per step."""
        part, expected = self._part(name)
        return part * self.histories[name].mean_messages + (1 - part) * expected.messages

    def burst_ntok(self, name: str, without: range = range(0)) -> int:
        """The burst of a broker, perhaps without some of the steps."""
        part, expected = self._part(name)
        return int(part * self.histories[name].burst_ntok(self.quantile, without) + (1 - part) * expected.burst_ntok)

    def doubts(self, names: Sequence[str], most_ntok: int) -> list[float]:
        """How far the burst of each broker, as a part of all bursts, may be off by chance, or by bins."""
        span = max(self.histories[name].span for name in names)
        size = -(-span // _PARTS)
        left_out = [range(age, age + size) for age in range(0, span, size)]
        parts = []
        for ages in left_out:
            bursts = [min(self.burst_ntok(name, ages), most_ntok) for name in names]
            total = sum(bursts)
            parts.append([burst / total if total else 1 / len(bursts) for burst in bursts])
        means = [fmean(seen) for seen in zip(*parts, strict=True)]
        errors = [sqrt(len(left_out) - 1) * pstdev(seen) for seen in zip(*parts, strict=True)]
        # Ten values say little about the error of one broker, so none is thought to be surer than brokers are together.
        typical = sqrt(fmean((error / mean) ** 2 if mean else 0.0 for error, mean in zip(errors, means, strict=True)))
        return [
            SURE * max(error, typical * mean) + self.histories[name].resolution * mean
            for name, error, mean in zip(names, errors, means, strict=True)
        ]

    def _part(self, name: str) -> tuple[Fraction, Expected]:
        """Which part of a window was seen, and what stands in for the rest."""
        expected, length = self.expected.get(name), len(self.histories[name])
        if expected is None or length >= self.steps:
            return Fraction(1), Expected(Fraction(0), 0)
        return Fraction(length, self.steps), expected


def _proven(target: list[int], doubts: list[int], floors: list[int], held: list[int]) -> list[int]:
    """The shares nearest to those held that are within the doubt of the target, and add up to the same.

    None is below its floor. Where there is no doubt, that is the target.
    """
    lows = [max(floor, want - doubt) for floor, want, doubt in zip(floors, target, doubts, strict=True)]
    highs = [want + doubt for want, doubt in zip(target, doubts, strict=True)]
    near = [min(max(have, low), high) for have, low, high in zip(held, lows, highs, strict=True)]
    over = sum(near) - sum(target)
    ends = lows if over > 0 else highs
    moves = apportion(abs(over), [abs(end - have) for end, have in zip(ends, near, strict=True)])
    return [have - move if over > 0 else have + move for have, move in zip(near, moves, strict=True)]


def _in_turn(
    known: list[str],
    shares: Mapping[str, TokenBucket | None],
    waiting: Mapping[str, int],
    demand: Mapping[str, Fraction],
    most: int,
) -> list[str]:
    """The brokers that get a share: all, or, if there are too few tokens, first those that wait without a share."""
    if len(known) <= most:
        return known
    turn = sorted(known, key=lambda name: (shares[name] is not None or not waiting.get(name), -demand[name], name))
    return turn[:most]


def _differs(old: TokenBucket, new: TokenBucket, hysteresis: Fraction) -> bool:
    return (
        abs(new.r_mtps - old.r_mtps) > hysteresis * old.r_mtps or abs(new.b_ntok - old.b_ntok) > hysteresis * old.b_ntok
    )
