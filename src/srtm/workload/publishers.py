"""Synthetic publishers (paper, section 6): periodic or Poisson, in batches, in correlation groups.

A *source* is a correlation group, or a single publisher without one. Each source has events, periodic with a random
phase or Poisson; at an event every publisher of the group sends one batch, all at once or evenly spread over
`spread_ns` in an order drawn anew each time. Messages of a batch carry the same time.

The seed determines everything. Arrivals are generated window by window, already sorted, so a workload may be far
larger than memory, and a longer one starts with exactly the arrivals of a shorter one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from srtm.errors import WorkloadError
from srtm.model.placement import Publisher
from srtm.units import NS_PER_S, format_ns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

_WINDOW_MESSAGES = 100_000


class Arrivals(NamedTuple):
    """Sorted arrival times, and the number of each message's publisher."""

    times_ns: Ints
    publisher_of: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Population:
    """Publishers of one kind. `rate_mps` is each publisher's mean rate in messages, whatever the batch."""

    publishers: int
    rate_mps: float = 10.0
    batch: int = 1
    process: Literal["poisson", "periodic"] = "poisson"
    group_size: int = 1
    spread_ns: int = 0
    prefix: str = "p"

    def __post_init__(self) -> None:
        """Report all invalid values at once."""
        wrong = []
        if self.publishers < 1:
            wrong.append(f"publishers = {self.publishers}: it must be at least 1")
        if not 0.001 <= self.rate_mps <= 1e9:
            wrong.append(f"rate = {self.rate_mps} msg/s: it must lie between 0.001 and 1e9")
        if self.batch < 1:
            wrong.append(f"batch = {self.batch}: it must be at least 1 message")
        if self.process not in ("poisson", "periodic"):
            wrong.append(f"process = {self.process!r}: it must be poisson or periodic")
        if self.group_size < 1:
            wrong.append(f"group size = {self.group_size}: it must be at least 1 publisher")
        if self.spread_ns < 0:
            wrong.append(f"spread = {self.spread_ns} ns: it must not be negative")
        elif not wrong and self.spread_ns > self.period_ns:
            wrong.append(
                f"spread = {format_ns(self.spread_ns)}: it must not exceed the {format_ns(self.period_ns)}"
                " between the events of a publisher"
            )
        if wrong:
            raise WorkloadError("; ".join(wrong))

    @property
    def period_ns(self) -> int:
        """Mean time between the events of a source."""
        return round(NS_PER_S * self.batch / self.rate_mps)

    @property
    def sources(self) -> int:
        """The number of groups, of which the last may be smaller; publishers, if groups have one member."""
        return -(-self.publishers // self.group_size)

    @property
    def total_mps(self) -> float:
        """Rate of all publishers together."""
        return self.publishers * self.rate_mps


@dataclass(frozen=True)
class Workload:
    """Populations that send together for a duration, generated from a seed."""

    populations: tuple[Population, ...]
    duration_ns: int
    seed: int
    start_ns: int = 0
    _starts: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse a workload without publishers or without time."""
        if not self.populations:
            raise WorkloadError("a workload needs at least one population of publishers")
        if self.duration_ns <= 0:
            raise WorkloadError(f"duration = {self.duration_ns} ns: it must be positive")
        if self.start_ns < 0 or self.start_ns + self.duration_ns >= 2**62:
            raise WorkloadError(
                f"from {self.start_ns} ns for {self.duration_ns} ns: times must lie between 0 and 2**62 ns"
            )
        if self.seed < 0:
            raise WorkloadError(f"seed = {self.seed}: it must not be negative")
        names = [population.prefix for population in self.populations]
        if len(set(names)) != len(names):
            raise WorkloadError(f"populations must have different prefixes, not {names}")
        counts = [population.publishers for population in self.populations]
        object.__setattr__(self, "_starts", tuple(int(n) for n in np.cumsum([0, *counts[:-1]])))

    @property
    def total_mps(self) -> float:
        """Mean rate of the topic."""
        return sum(population.total_mps for population in self.populations)

    @property
    def window_ns(self) -> int:
        """The time generated at once: about a hundred thousand messages."""
        return max(1, round(_WINDOW_MESSAGES / self.total_mps * NS_PER_S))

    def publishers(self) -> list[Publisher]:
        """Every publisher, in the order of `publisher_of`."""
        listed = []
        for population in self.populations:
            digits = len(str(population.publishers - 1))
            for number in range(population.publishers):
                group = f"{population.prefix}-g{number // population.group_size}" if population.group_size > 1 else None
                listed.append(Publisher(f"{population.prefix}{number:0{digits}}", population.rate_mps, group))
        return listed

    def windows(self) -> Iterator[Arrivals]:
        """All arrivals in order of time, about a hundred thousand at a time.

        Windows are drawn whole and the last one is cut, so the length of a workload changes nothing before its end.
        """
        end = self.duration_ns
        late = [Arrivals(np.empty(0, np.int64), np.empty(0, np.int32))] * len(self.populations)
        for number, begin in enumerate(range(0, end, self.window_ns)):
            until = begin + self.window_ns
            sent = []
            for index, population in enumerate(self.populations):
                rng = np.random.default_rng([self.seed, index, number + 1])
                times, senders = _events(population, begin, until, rng, self._phases(index))
                times, senders = _send(population, times, senders, rng)
                if population.spread_ns:
                    times, senders = _merge([late[index], Arrivals(times, senders)])
                    cut = int(np.searchsorted(times, until))
                    late[index] = Arrivals(times[cut:], senders[cut:])
                    times, senders = times[:cut], senders[:cut]
                if until > end:
                    cut = int(np.searchsorted(times, end))
                    times, senders = times[:cut], senders[:cut]
                senders = senders + np.int32(self._starts[index])
                sent.append(Arrivals(np.repeat(times, population.batch), np.repeat(senders, population.batch)))
            times, senders = _merge(sent) if len(sent) > 1 else sent[0]
            yield Arrivals(times + self.start_ns, senders)

    def arrivals(self) -> Arrivals:
        """All arrivals at once."""
        windows = list(self.windows())
        return Arrivals(
            np.concatenate([window.times_ns for window in windows]),
            np.concatenate([window.publisher_of for window in windows]),
        )

    def _phases(self, index: int) -> tuple[Ints, NDArray[np.int32]]:
        """Phase of each source of a population, in order of phase, and the sources in that order."""
        population = self.populations[index]
        if population.process != "periodic":
            return np.empty(0, np.int64), np.empty(0, np.int32)
        rng = np.random.default_rng([self.seed, index, 0])
        phases = rng.integers(0, population.period_ns, population.sources)
        order = np.argsort(phases, kind="stable")
        return phases[order], order.astype(np.int32)


def _events(
    population: Population,
    begin: int,
    until: int,
    rng: np.random.Generator,
    phases: tuple[Ints, NDArray[np.int32]],
) -> Arrivals:
    """Events of all sources in [begin, until), sorted, and the source of each."""
    if population.process == "periodic":
        offsets, sources = phases
        period = population.period_ns
        turns = np.arange(begin // period, until // period + 1) * period
        times = (turns[:, None] + offsets[None, :]).ravel()
        low, high = np.searchsorted(times, [begin, until])
        return Arrivals(times[low:high], np.tile(sources, len(turns))[low:high])
    # Independent Poisson sources together are one Poisson process whose events go to sources at random; its
    # times come out sorted as partial sums of exponentials.
    count = int(rng.poisson(population.sources * (until - begin) / population.period_ns))
    steps = np.cumsum(rng.standard_exponential(count + 1))
    times = begin + (steps[:-1] / steps[-1] * (until - begin)).astype(np.int64)
    return Arrivals(times, rng.integers(0, population.sources, count, dtype=np.int32))


def _send(population: Population, times: Ints, sources: NDArray[np.int32], rng: np.random.Generator) -> Arrivals:
    """One batch of every publisher of the source, at or soon after each event (sorted unless spread)."""
    size = population.group_size
    if size == 1 and not population.spread_ns:
        return Arrivals(times, sources)
    senders = (sources[:, None] * np.int32(size) + np.arange(size, dtype=np.int32)[None, :]).ravel()
    times = np.repeat(times, size)
    if population.spread_ns:
        places = np.tile(np.arange(size) * population.spread_ns // size, (len(sources), 1))
        times = times + rng.permuted(places, axis=1).ravel()
    if population.publishers % size:  # the last group is smaller
        there = senders < population.publishers
        times, senders = times[there], senders[there]
    return Arrivals(times, senders)


def _merge(sent: list[Arrivals]) -> Arrivals:
    times = np.concatenate([each.times_ns for each in sent])
    senders = np.concatenate([each.publisher_of for each in sent])
    order = np.argsort(times, kind="stable")
    return Arrivals(times[order], senders[order])
