"""Many topics at once: what `scan` and `burst` do for one topic, over arrays and without a step of Python per topic.

Topics are numbered from 0. Arrivals come batch by batch; `dealt` sorts a batch by topic, and a topic's rows in it are a
*segment*. Rules, rates and states are rows of arrays, by topic. The result for each topic is that of the functions
for one topic, to the last unit, however its arrivals are cut into batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from srtm.errors import ArrivalsError
from srtm.model import law as plain
from srtm.model._compiled import callable_from_compiled, compiled
from srtm.units import MILLI_PER_TOKEN, PICO_PER_TOKEN

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Indices = NDArray[np.int32]

callable_from_compiled(plain.scan_histogram, plain.step)
_scan_histograms = compiled(plain.scan_histograms)

NEVER = -(2**63)
BACKLOG, LAST, PEAK, SIGN = range(4)  # columns of a table of states


class Segments(NamedTuple):
    """Rows sorted by topic: segment s is those of topic `topics[s]`, from `begins[s]` to `ends[s]`.

    From `adds[s]` on they are the batch's, and from `news[s]` on the stretch's. The sender of row i is `senders[i −
    behind]`; old rows have none.
    """

    times: Ints
    senders: Indices
    behind: int
    topics: Ints
    begins: Ints
    adds: Ints
    news: Ints
    ends: Ints


def laws_of(r_mtps: Ints) -> Ints:
    """A row (rate, token, horizon) for each rate, as `TokenBucket.law` has them."""
    scale = np.gcd(r_mtps, MILLI_PER_TOKEN)
    rates = r_mtps // scale
    return np.column_stack([rates, PICO_PER_TOKEN // scale, (2**63 - 1) // rates])


def no_states(topics: int) -> Ints:
    """The states of topics of which nothing has arrived yet."""
    states = np.zeros((topics, 4), np.int64)
    states[:, LAST] = NEVER
    return states


def dealt(
    old_topics: Indices,
    old_times: Ints,
    topics: Indices,
    times: Ints,
    senders: Indices,
    early: int,
    count: int,
    room: Ints | None = None,
) -> Segments:
    """Rows sorted by topic and, within a topic, as they come: old ones, then a batch's, of which `early` are not new.

    `count` is the number of topics. Rows of one topic alone are not copied if they need not be; otherwise into `room`,
    if it is given and long enough.
    """
    old, rows = len(old_times), len(old_times) + len(times)
    if not rows:
        nothing = np.empty(0, np.int64)
        return Segments(nothing, np.empty(0, np.int32), 0, *[nothing] * 5)
    lone = int(topics[0]) if len(topics) else int(old_topics[0])
    if count == 1 or (not (old_topics != lone).any() and not (topics != lone).any()):
        bounds = np.array([lone, 0, old, old + early, rows])
        if old:
            whole = np.empty(rows, np.int64) if room is None or len(room) < rows else room[:rows]
            whole[:old], whole[old:] = old_times, times
            times = whole
        return Segments(times, senders, old, *bounds[:, None])
    counts = np.zeros(count, np.int64)
    _count_rows(old_topics, counts)
    before = counts.copy()
    _count_rows(topics[:early], counts)
    until_new = counts.copy()
    _count_rows(topics[early:], counts)
    ends = np.cumsum(counts)
    begins = ends - counts
    places, all_times, all_senders = begins.copy(), np.empty(rows, np.int64), np.empty(rows, np.int32)
    _deal_rows(old_topics, old_times, places, all_times)
    _deal_rows(topics, senders, places.copy(), all_senders)
    _deal_rows(topics, times, places, all_times)
    present = np.flatnonzero(counts)
    columns = np.stack([begins, begins + before, begins + until_new, ends])
    return Segments(all_times, all_senders, 0, present, *columns[:, present])


def dealt_alone(topics: Indices, times: Ints, count: int) -> Segments:
    """A batch sorted by topic, all of it new and without senders; rows of topic −1 are left out."""
    if topics.min(initial=0) < 0:
        topics, times = topics[topics >= 0], times[topics >= 0]
    return dealt(topics[:0], times[:0], topics, times, topics, 0, count)


def _count(topics: Indices, counts: Ints) -> None:
    for i in range(len(topics)):
        counts[topics[i]] += 1


def _deal(topics: Indices, values: NDArray[Any], places: Ints, out: NDArray[Any]) -> None:
    for i in range(len(topics)):
        out[places[topics[i]]] = values[i]
        places[topics[i]] += 1


_count_rows = compiled(_count)
_deal_rows = compiled(_deal)


def histograms(times: Ints, segments: Ints, laws: Ints, states: Ints) -> Ints:
    """Rows (topic, whole tokens, messages that need so many not to wait): `scan.backlog_histogram` of many topics.

    Rows of `segments` are (topic, begin, end). `states` is carried on. A topic whose peak passes the law's LIMIT has no
    valid numbers from then on.
    """
    segments = segments[segments[:, 1] < segments[:, 2]]
    fresh = segments[states[segments[:, 0], LAST] == NEVER]
    states[fresh[:, 0], LAST] = times[fresh[:, 1]]
    out = np.empty((int((segments[:, 2] - segments[:, 1]).sum()), 3), np.int64)
    counts = np.zeros(1024, np.int64)
    number = filled = 0
    while True:
        number, filled = _scan_histograms(times, segments, number, laws, states, counts, out, filled)
        if number == len(segments):
            break
        topic = segments[number, 0]
        longer = np.zeros(max(2 * len(counts), int(states[topic, PEAK] // laws[topic, 1]) + 2), np.int64)
        longer[: len(counts)] = counts
        counts = longer
    if (states[segments[:, 0], SIGN] < 0).any():
        raise ArrivalsError("arrivals are not sorted by topic and time")
    return out[:filled]


def _enter(topics: Ints, rows: Ints, laws: Ints, out: Ints) -> int:
    """`Summary.leave` along the stretches of each topic: the state before stretch i into `out[i]`.

    64 bits hold the difference of two products as long as it fits itself; in floats it shows whether it does. What is
    far below zero does not matter, and what is above LIMIT only has to stay there. Returns a stretch that begins before
    the one before it ends, or −1.
    """
    for i in range(len(rows)):
        if i == 0 or topics[i] != topics[i - 1]:
            out[i, 0], out[i, 1] = 0, -(2**63)
            continue
        messages, first, last, backlog = rows[i - 1]
        if rows[i, 1] < last:
            return i
        rate, token, horizon = laws[topics[i]]
        if out[i - 1, 1] != -(2**63):
            found = max(0, out[i - 1, 0] - rate * min(first - out[i - 1, 1], horizon))
            about = float(found) + float(messages) * float(token) - float(rate) * float(last - first)
            if about > 1.5 * 2.0**62:
                backlog = 2**62 + 1
            elif about > -1.5 * 2.0**62:
                backlog = max(backlog, found + messages * token - rate * (last - first))
        out[i, 0], out[i, 1] = backlog, last
    return -1


_enter_all = compiled(_enter)


def entering(topics: Ints, summaries: Ints, laws: Ints) -> Ints:
    """The state (backlog, last) before each stretch; `last` is NEVER for the first of a topic.

    Summaries are rows (messages, first, last, backlog), by topic and time.
    """
    out = np.empty((len(topics), 2), np.int64)
    wrong = _enter_all(topics, summaries, laws, out)
    if wrong >= 0:
        before, after = summaries[wrong - 1, 2], summaries[wrong, 1]
        raise ArrivalsError(f"stretches overlap: one ends at {before} ns and the next starts at {after} ns")
    return out


def _first_of_each(values: Indices, ends: Ints, marks: Ints, topics_out: Indices, values_out: Indices) -> int:
    found = begin = 0
    for topic in range(len(ends)):
        for i in range(begin, ends[topic]):
            if marks[values[i]] != topic:
                marks[values[i]] = topic
                topics_out[found], values_out[found] = topic, values[i]
                found += 1
        begin = ends[topic]
    return found


_keep_first_of_each = compiled(_first_of_each)


def sorted_by_topic(topics: Indices, values: NDArray[Any], count: int) -> tuple[NDArray[Any], Ints]:
    """The values in order of topic and, within one, as they come; and where those of each topic end."""
    counts = np.zeros(count, np.int64)
    _count_rows(topics, counts)
    ends, by_topic = np.cumsum(counts), np.empty_like(values)
    _deal_rows(topics, values, ends - counts, by_topic)
    return by_topic, ends


def distinct_pairs(topics: Indices, values: Indices, count: int) -> tuple[Indices, Indices]:
    """Each pair of a topic and a value once, in order of topic; `count` topics, and values numbered from 0."""
    by_topic, ends = sorted_by_topic(topics, values, count)
    marks = np.full(int(values.max(initial=-1)) + 1, -1, np.int64)
    topics_out, values_out = np.empty(len(values), np.int32), np.empty(len(values), np.int32)
    found = _keep_first_of_each(by_topic, ends, marks, topics_out, values_out)
    return topics_out[:found], values_out[:found]


def _find(table: Ints, topics: Ints, values: Ints, out: Ints) -> None:
    for i in range(len(topics)):
        low, high = 0, len(table)
        while low < high:
            middle = (low + high) // 2
            topic, value = table[middle, 0], table[middle, 1]
            if topic < topics[i] or (topic == topics[i] and value < values[i]):
                low = middle + 1
            else:
                high = middle
        if low < len(table) and table[low, 0] == topics[i] and table[low, 1] == values[i]:
            out[i] = low
        else:
            out[i] = -1


_find_all = compiled(_find)


def find_rows(table: Ints, topics: Ints, values: Ints) -> Ints:
    """The row of a table sorted by its first two columns that has each topic and value there; −1 if there is none."""
    out = np.empty(len(topics), np.int64)
    _find_all(table, topics, values, out)
    return out


class PairNumbers:
    """Numbers from 0 for pairs of topic and publisher, in the order in which they come."""

    def __init__(self) -> None:
        self._slots = np.full(2**10, -1, np.int32)
        self._topics, self._values = np.empty(2**9, np.int32), np.empty(2**9, np.int32)
        self._count = 0

    def __len__(self) -> int:
        """How many pairs there are."""
        return self._count

    @property
    def topics(self) -> Indices:
        """The topic of each pair."""
        return self._topics[: self._count]

    @property
    def values(self) -> Indices:
        """The publisher of each pair."""
        return self._values[: self._count]

    def numbered(self, topics: Indices, values: Indices) -> Indices:
        """The number of each pair."""
        out, at = np.empty(len(topics), np.int32), 0
        while True:
            at, self._count = _number_pairs(
                topics, values, at, self._slots, self._topics, self._values, self._count, out
            )
            if at == len(topics):
                return out
            room = 2 * len(self._slots)
            self._slots = np.full(room, -1, np.int32)
            old = self._topics[: self._count], self._values[: self._count]
            self._topics, self._values = np.empty(room // 2, np.int32), np.empty(room // 2, np.int32)
            _number_pairs(*old, 0, self._slots, self._topics, self._values, 0, np.empty(self._count, np.int32))


def _number(
    topics: Indices,
    values: Indices,
    at: int,
    slots: Indices,
    known_topics: Indices,
    known_values: Indices,
    count: int,
    out: Indices,
) -> tuple[int, int]:
    """A hash table with open addressing, at most half full; returns the first pair without room, and the count."""
    mask = len(slots) - 1
    for i in range(at, len(topics)):
        mixed = (topics[i] * 2654435761 + values[i]) * 0x9E3779B97F4A7C1
        slot = (mixed ^ (mixed >> 29)) & mask
        while True:
            number = slots[slot]
            if number < 0:
                if count == len(known_topics):
                    return i, count
                known_topics[count], known_values[count] = topics[i], values[i]
                slots[slot] = number = count
                count += 1
                break
            if known_topics[number] == topics[i] and known_values[number] == values[i]:
                break
            slot = (slot + 1) & mask
        out[i] = number
    return len(topics), count


_number_pairs = compiled(_number)
