"""What tasks do for `profile`: scan a stretch for all its topics at once, as if nothing came before it.

A task numbers topics as the driver does, and sends tables (`traces.parts`) of numbers: a row per topic, a row per topic
and whole number of tokens that its messages need, per topic and size of batches, per topic and publisher. The first
arrivals of a stretch go along, so that the driver can mostly correct it for what came before (`traces.joining`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from srtm.model import burst, fleet, scan
from srtm.model.bucket import TokenBucket
from srtm.pipeline.traces.parts import packed, table_of
from srtm.units import NANO_PER_TOKEN
from srtm.workload.gathered import Names

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa
    from numpy.typing import NDArray

    from srtm.pipeline.traces.batches import Batches, Ints, Work
    from srtm.pipeline.traces.topics import Indices, Topics

REACH_NS = burst.WINDOWS_NS[-1]
_MOST_PAIRS = 2**21  # pairs of topic and publisher that a task keeps before it looks for equal ones
_NO_TIMES, _NO_NUMBERS = np.empty(0, np.int64), np.empty(0, np.int32)


def scanned_at(r_mtps: int) -> TokenBucket:
    """The bucket that a topic is scanned with; only its rate matters, as U does not depend on b."""
    return TokenBucket(r_mtps, NANO_PER_TOKEN)


def scanning(topics: Topics, laws: Ints, kept: int) -> Work:
    """Work over batches of (topic, publisher, arrival_ns); the stretch's first `kept` messages go to the driver."""

    def work(begin_ns: int, batches: Batches) -> Batches:
        found, names = _Scan(len(topics), laws, kept), Names()
        for batch in batches:
            numbers, times = topics.numbered(batch.column("topic")), batch.column("arrival_ns").to_numpy()
            senders, meaning = names.coded(batch.column("publisher"))
            if numbers.min(initial=0) < 0:
                known = numbers >= 0
                numbers, times, senders = numbers[known], times[known], senders[known]
            early = int(np.searchsorted(times, begin_ns)) if begin_ns > -(2**63) else 0
            found.add(numbers, times, senders, meaning, early)
        yield from packed({"names": table_of(name=names.all), **found.parts()})

    return work


class _Recent:
    """Arrivals with which windows of the envelope may still begin."""

    def __init__(self) -> None:
        self.numbers, self.times = _NO_NUMBERS, _NO_TIMES

    def advance(self, numbers: Indices, times: Ints, *, lone: bool = False) -> None:
        """Add the rows of a batch, of a `lone` topic or several; forget what no later row can be in a window with."""
        until = times[-1] - REACH_NS
        if lone or scan.is_sorted(times):  # no later row comes before this time
            late, early = int(np.searchsorted(times, until, side="right")), self.times > until
            new_numbers, new_times = numbers[late:], times[late:]
        else:  # rows come topic by topic: only the last one may go on
            early = (self.numbers == numbers[-1]) & (self.times > until)
            near = (numbers == numbers[-1]) & (times > until)
            new_numbers, new_times = numbers[near], times[near]
        if early.any():
            new_numbers = np.concatenate([self.numbers[early], new_numbers])
            new_times = np.concatenate([self.times[early], new_times])
        self.numbers, self.times = new_numbers, new_times


class _Scan:
    """All topics, as far as a task has read them."""

    def __init__(self, topics: int, laws: Ints, kept: int) -> None:
        self._laws, self._states = laws, fleet.no_states(topics)
        self._messages, self._first_ns = np.zeros(topics, np.int64), np.zeros(topics, np.int64)
        self._most = np.zeros((topics, len(burst.WINDOWS_NS)), np.int64)
        self._recent, self._room = _Recent(), _NO_TIMES
        self._left = kept
        self._beginning: list[tuple[Indices, Ints]] = [(_NO_NUMBERS, _NO_TIMES)]
        self._needs: list[Ints] = []
        self._sizes: list[Ints] = []
        self._pairs: list[tuple[Indices, Indices]] = []  # the first of them merged already

    def add(self, numbers: Indices, times: Ints, senders: Indices, meaning: Indices, early: int) -> None:
        """Take the next arrivals, those of a topic in order; `meaning[sender]` is the number of a publisher.

        The first `early` of them belong to the stretch before and only fill its last windows.
        """
        if not len(times):
            return
        recent, count = self._recent, len(self._messages)
        if count == 1 and len(self._room) < len(recent.times) + len(times):  # kept: new memory costs as much as a scan
            self._room = np.empty((len(recent.times) + len(times)) * 5 // 4, np.int64)
        rows = fleet.dealt(recent.numbers, recent.times, numbers, times, senders, early, count, self._room)
        recent.advance(numbers, times, lone=len(rows.topics) == 1)
        if self._left:
            kept = slice(early, early + self._left)
            self._beginning.append((numbers[kept], times[kept]))
            self._left -= len(times[kept])
        added = rows.adds < rows.ends
        widened = (rows.topics, rows.begins, rows.adds, rows.ends)
        burst.widen_topics(rows.times, np.column_stack([column[added] for column in widened]), self._most)
        new = rows.news < rows.ends
        topics, news, ends = rows.topics[new], rows.news[new], rows.ends[new]
        fresh = self._messages[topics] == 0
        self._first_ns[topics[fresh]] = rows.times[news[fresh]]
        self._messages[topics] += ends - news
        segments = np.column_stack([topics, news, ends])
        self._needs.append(fleet.histograms(rows.times, segments, self._laws, self._states))
        of_batch = np.column_stack([topics, news - rows.behind, ends - rows.behind])
        sizes, pairs = burst.topics_batches(rows.times[rows.behind :], rows.senders, of_batch, len(meaning))
        self._sizes.append(sizes.copy())
        self._pairs.append((pairs[0].copy(), meaning[pairs[1]]))
        if sum(len(some) for some, _ in self._pairs[1:]) > max(_MOST_PAIRS, len(self._pairs[0][0])):
            self._pairs = [self._distinct_pairs()]

    def _distinct_pairs(self) -> tuple[Indices, Indices]:
        if len(self._pairs) == 1:
            return self._pairs[0]
        numbers, senders = (np.concatenate([_NO_NUMBERS, *some]) for some in _transposed(self._pairs))
        return fleet.distinct_pairs(numbers, senders, len(self._messages))

    def parts(self) -> dict[str, pa.Table]:
        """What goes to the driver."""
        here = np.flatnonzero(self._messages)
        numbers, times = (np.concatenate(some) for some in _transposed(self._beginning))
        beginnings, ends = fleet.sorted_by_topic(numbers, times, len(self._messages))
        publishers = self._distinct_pairs()
        return {
            "topics": table_of(
                topic=here,
                messages=self._messages[here],
                first_ns=self._first_ns[here],
                last_ns=self._states[here, fleet.LAST],
                backlog=self._states[here, fleet.BACKLOG],
                peak=self._states[here, fleet.PEAK],
                kept=np.diff(ends, prepend=0)[here],
                envelope=self._most[here],
            ),
            "beginning": table_of(arrival_ns=beginnings),
            "needs": _tallies(self._needs),
            "sizes": _tallies(self._sizes),
            "publishers": table_of(topic=publishers[0], sender=publishers[1]),
        }


def _transposed(pairs: list[tuple[Indices, NDArray[Any]]]) -> tuple[list[Indices], list[NDArray[Any]]]:
    return [one for one, _ in pairs], [other for _, other in pairs]


def _tallies(found: list[Ints]) -> pa.Table:
    """Rows (topic, value, count)."""
    rows = np.concatenate([np.empty((0, 3), np.int64), *found])
    return table_of(topic=rows[:, 0].copy(), value=rows[:, 1].copy(), count=rows[:, 2].copy())


def summarised(topics: Topics, key: str, batches: Batches, carry_on: Callable[[Ints, Ints, Ints], None]) -> pa.Table:
    """A row for each topic of a stretch, as if nothing came before it: its messages, and the state behind them.

    `carry_on` takes times, rows (topic, begin, end) that tell them apart, and the states before these.
    """
    states = fleet.no_states(len(topics))
    messages, first_ns = np.zeros(len(topics), np.int64), np.zeros(len(topics), np.int64)
    for batch in batches:
        numbers, times = topics.numbered(batch.column("topic")), batch.column(key).to_numpy()
        rows = fleet.dealt_alone(numbers, times, len(topics))
        fresh = messages[rows.topics] == 0
        first_ns[rows.topics[fresh]] = rows.times[rows.begins[fresh]]
        messages[rows.topics] += rows.ends - rows.begins
        carry_on(rows.times, np.column_stack([rows.topics, rows.begins, rows.ends]), states)
    here = np.flatnonzero(messages)
    return table_of(
        topic=here,
        messages=messages[here],
        first_ns=first_ns[here],
        last_ns=states[here, fleet.LAST],
        backlog=states[here, fleet.BACKLOG],
        peak=states[here, fleet.PEAK],
    )


class Followed:
    """Topics that are followed both from the state before a stretch and from none, while that makes a difference.

    Rows of `entering` are (topic, first time of the stretch, state before it), in order. States begin with two numbers
    that decide everything after them.
    """

    def __init__(self, topics: Topics, key: str, entering: Ints) -> None:
        self._topics, self._key, self._entering = topics, key, entering
        self.after, self.alone = fleet.no_states(len(topics)), fleet.no_states(len(topics))
        self._seen, self._follows = np.zeros(len(topics), np.bool_), np.zeros(len(topics), np.bool_)
        self._awaited = np.zeros(len(topics), np.bool_)
        self._awaited[entering[:, 0]] = True

    def segments(self, batch: pa.RecordBatch) -> tuple[Ints, Ints]:
        """Times of followed topics in a batch, and rows (topic, begin, end) of them."""
        numbers, times = self._topics.numbered(batch.column("topic")), batch.column(self._key).to_numpy()
        mine = (numbers >= 0) & self._awaited[numbers] & (self._follows | ~self._seen)[numbers]
        rows = fleet.dealt_alone(numbers[mine], times[mine], len(self._topics))
        new = ~self._seen[rows.topics]
        starting = rows.topics[new]
        place = fleet.find_rows(self._entering, starting, rows.times[rows.begins[new]])
        self._seen[starting], self._follows[starting] = True, place >= 0
        self.after[starting[place >= 0], :2] = self._entering[place[place >= 0], 2:]
        going = self._follows[rows.topics]
        return rows.times, np.column_stack([rows.topics, rows.begins, rows.ends])[going]

    def done(self) -> bool:
        """Whether nothing that follows can differ."""
        differ = (self.after[:, :2] != self.alone[:, :2]).any(axis=1)
        self._follows &= differ & (self.after[:, fleet.PEAK] <= scan.HIGHEST)
        return not self._follows.any() and bool(self._seen[self._awaited].all())

    def overflows(self) -> Ints:
        """The topics whose numbers left the range in which 64 bits are exact."""
        return np.flatnonzero(self.after[:, fleet.PEAK] > scan.HIGHEST)


def correcting(topics: Topics, laws: Ints, entering: Ints) -> Work:
    """Work over batches of (topic, arrival_ns): what the states before a stretch change in its histograms."""

    def work(_: int, batches: Batches) -> Batches:
        followed, changes = Followed(topics, "arrival_ns", entering), []
        for batch in batches:
            times, segments = followed.segments(batch)
            more = fleet.histograms(times, segments, laws, followed.after)
            less = fleet.histograms(times, segments, laws, followed.alone)
            changes += [more, less * np.array([1, 1, -1])]
            if followed.done():
                break
        yield from packed({"needs": _tallies(changes), "overflows": table_of(topic=followed.overflows())})

    return work


def widening(topics: Topics) -> Work:
    """Work over batches of (topic, arrival_ns): only the envelopes."""

    def work(_: int, batches: Batches) -> Batches:
        most, recent = np.zeros((len(topics), len(burst.WINDOWS_NS)), np.int64), _Recent()
        for batch in batches:
            numbers, times = topics.numbered(batch.column("topic")), batch.column("arrival_ns").to_numpy()
            rows = fleet.dealt(recent.numbers, recent.times, numbers, times, numbers, 0, len(topics))
            widened = (rows.topics, rows.begins, rows.adds, rows.ends)
            burst.widen_topics(rows.times, np.column_stack(widened), most)
            recent.advance(numbers, times)
        here = np.flatnonzero(most[:, -1])
        yield from packed({"envelopes": table_of(topic=here, envelope=most[here])})

    return work
