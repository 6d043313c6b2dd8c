"""Many topics at once give, topic by topic, what the functions for one topic give."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import ArrivalsError
from srtm.model import burst, fleet, scan
from srtm.model.bucket import TokenBucket
from srtm.model.profile import mean_rate, token_rate, token_rates
from srtm.units import NANO_PER_TOKEN, rank, ranks

RATES = [1, 3, 7_500, 1_000_000, 999_999_999]
GAPS_NS = [0, 0, 1, 10**6, 10**9, 86_400 * 10**9]


def bucket(r_mtps: int) -> TokenBucket:
    return TokenBucket(r_mtps, NANO_PER_TOKEN)


@st.composite
def traffic(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Topics, times and senders of messages in order of time, and how many topics there are."""
    topics = draw(st.integers(1, 6))
    gaps = draw(st.lists(st.sampled_from(GAPS_NS), min_size=1, max_size=60))
    numbers = draw(st.lists(st.integers(0, topics - 1), min_size=len(gaps), max_size=len(gaps)))
    senders = draw(st.lists(st.integers(0, 3), min_size=len(gaps), max_size=len(gaps)))
    times = draw(st.integers(-(10**10), 10**10)) + np.cumsum(gaps)
    return np.array(numbers, np.int32), times, np.array(senders, np.int32), topics


def tallied(rows: np.ndarray, topic: int) -> dict[int, int]:
    found: dict[int, int] = {}
    for _, value, count in rows[rows[:, 0] == topic].tolist():
        found[value] = found.get(value, 0) + count
    return found


@given(traffic(), st.data())
def test_any_batches_of_many_topics_give_what_each_topic_gives_alone(
    case: tuple[np.ndarray, np.ndarray, np.ndarray, int], data: st.DataObject
) -> None:
    numbers, times, senders, topics = case
    rates = np.array(data.draw(st.lists(st.sampled_from(RATES), min_size=topics, max_size=topics)))
    laws, states = fleet.laws_of(rates), fleet.no_states(topics)
    needs, sizes, pairs = [], [], []
    cuts = sorted(data.draw(st.sets(st.integers(1, len(times)), max_size=3)))
    begin = 0
    for end in [*cuts, len(times)]:
        part = slice(begin, end)
        # A batch must not separate an instant, or its batches are counted apart.
        rows = fleet.dealt(numbers[:0], times[:0], numbers[part], times[part], senders[part], 0, topics)
        segments = np.column_stack([rows.topics, rows.news, rows.ends])
        needs.append(fleet.histograms(rows.times, segments, laws, states))
        if len(cuts) == 0:
            found, senders_of = burst.topics_batches(rows.times, rows.senders, segments, 4)
            sizes.append(found)
            pairs.append(senders_of)
        begin = end
    for topic in range(topics):
        mine = numbers == topic
        if not mine.any():
            assert states[topic, fleet.LAST] == fleet.NEVER
            continue
        counts, state = scan.backlog_histogram(times[mine], bucket(int(rates[topic])))
        known = {value: int(counts[value]) for value in np.flatnonzero(counts).tolist()}
        assert tallied(np.concatenate(needs), topic) == known
        assert (states[topic, fleet.BACKLOG], states[topic, fleet.LAST]) == state
        if sizes:
            alone = burst.batch_sizes(times[mine], senders[mine])
            assert tallied(sizes[0], topic) == {v: int(alone[v]) for v in np.flatnonzero(alone).tolist()}
            assert sorted(pairs[0][1][pairs[0][0] == topic].tolist()) == sorted(set(senders[mine].tolist()))


@given(traffic(), st.data())
def test_states_before_stretches_are_those_of_the_whole(
    case: tuple[np.ndarray, np.ndarray, np.ndarray, int], data: st.DataObject
) -> None:
    numbers, times, _, topics = case
    rates = np.array(data.draw(st.lists(st.sampled_from(RATES), min_size=topics, max_size=topics)))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(times)), max_size=3)))
    in_topic, summaries, known = [], [], []
    for topic in range(topics):
        state: scan.State | None = None
        for part in np.split(np.arange(len(times)), cuts):
            mine = times[part][numbers[part] == topic]
            if not len(mine):
                continue
            in_topic.append(topic)
            summaries.append(tuple(scan.summarise(mine, bucket(int(rates[topic])))))
            known.append(state or (0, fleet.NEVER))
            state = scan.run(mine, bucket(int(rates[topic])).law, state)[1]
    found = fleet.entering(np.array(in_topic), np.array(summaries), fleet.laws_of(rates))
    assert found.tolist() == [list(state) for state in known]


def test_a_backlog_beyond_64_bits_stays_beyond_the_limit() -> None:
    """A stretch with 2**40 messages at one instant, and one of a century: nothing wraps around."""
    crowded, century = (2**40, 0, 0, 5), (2, 1, 100 * 365 * 86_400 * 10**9, 10**9)
    laws = fleet.laws_of(np.array([1_000_000_000]))
    rows = np.array([(1, -1, -1, 10**9), crowded, century, (1, century[2] + 1, century[2] + 1, 10**9)])
    found = fleet.entering(np.zeros(4, np.int64), rows, laws)
    assert found[2, 0] > scan.HIGHEST
    assert found[3, 0] == century[3]


def test_stretches_that_overlap_are_refused() -> None:
    rows = np.array([(2, 0, 10, 10**9), (1, 9, 12, 10**9)])
    with pytest.raises(ArrivalsError, match="one ends at 10 ns and the next starts at 9 ns"):
        fleet.entering(np.zeros(2, np.int64), rows, fleet.laws_of(np.array([1_000])))


@given(
    st.lists(st.tuples(st.integers(1, 10**8), st.integers(0, 10**18), st.integers(0, 3 * 10**18)), min_size=1),
    st.sampled_from(["1", "1.1", "1.000000000001", "3"]),
)
def test_rates_of_many_topics_are_those_of_each(spans: list[tuple[int, int, int]], headroom: str) -> None:
    messages, first_ns, lengths = np.array(spans).T
    found = token_rates(messages, first_ns, first_ns + lengths, headroom)
    assert found.tolist() == [token_rate(mean_rate(n, a, a + d), headroom) for n, a, d in spans]


@given(st.lists(st.integers(1, 10**14), min_size=1), st.fractions(Fraction(1, 10**9), 1))
def test_ranks_of_many_counts_are_those_of_each(counts: list[int], quantile: Fraction) -> None:
    assert ranks(np.array(counts), quantile).tolist() == [rank(count, quantile) for count in counts]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2**30)), max_size=200), st.integers(1, 7))
def test_pairs_are_numbered_once_and_kept(pairs: list[tuple[int, int]], size: int) -> None:
    numbers = fleet.PairNumbers()
    known: dict[tuple[int, int], int] = {}
    for begin in range(0, len(pairs), size):
        some = pairs[begin : begin + size]
        topics, values = (np.array(column, np.int32) for column in zip(*some, strict=True))
        expected = [known.setdefault(pair, len(known)) for pair in some]
        assert numbers.numbered(topics, values).tolist() == expected
    assert list(zip(numbers.topics.tolist(), numbers.values.tolist(), strict=True)) == list(known)


def test_thousands_of_pairs_find_room() -> None:
    topics, values = (part.ravel().astype(np.int32) for part in np.meshgrid(np.arange(70), np.arange(90)))
    numbers = fleet.PairNumbers()
    assert numbers.numbered(topics, values).tolist() == list(range(6_300))
    assert numbers.numbered(topics[::-1], values[::-1]).tolist() == list(range(6_300))[::-1]
