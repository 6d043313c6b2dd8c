from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from srtm.workload.gathered import Names, Senders, arrivals_of

if TYPE_CHECKING:
    from srtm.workload.gathered import TopicArrivals

Message = tuple[str, str, str | None, int]

messages = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "tä"]),
        st.sampled_from(["p", "q", "p10", "p2"]),
        st.sampled_from([None, "g", "h"]),
        st.integers(0, 20),
    ),
    min_size=1,
    max_size=40,
)


def batch(rows: list[Message]) -> pa.RecordBatch:
    topics, publishers, groups, times = zip(*rows, strict=True)
    strings = [pa.array(column, pa.string()).dictionary_encode() for column in (topics, publishers, groups)]
    return pa.record_batch([*strings, pa.array(times, pa.int64())], ["topic", "publisher", "group", "arrival_ns"])


def gathered(parts: list[list[list[Message]]]) -> list[TopicArrivals]:
    """Topics of messages that tasks read, batch by batch."""
    found = []
    for batches in parts:
        senders = Senders()
        rows = [senders.numbered(batch(each)) for each in batches]
        found.append((senders.table(), rows))
    return arrivals_of(found)


def plain(found: list[TopicArrivals]) -> list[tuple[str, list[tuple[str, float]], list[tuple[int, int]]]]:
    return [
        (
            each.topic,
            [(publisher.id, publisher.rate_mps) for publisher in each.publishers],
            list(zip(each.arrivals.times_ns.tolist(), each.arrivals.publisher_of.tolist(), strict=True)),
        )
        for each in found
    ]


@given(messages, st.randoms(use_true_random=False), st.integers(1, 4))
def test_topics_do_not_depend_on_how_messages_are_cut_and_ordered(rows: list[Message], rng: object, cuts: int) -> None:
    whole = gathered([[rows]])
    shuffled = list(rows)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    size = -(-len(shuffled) // cuts)
    batches = [shuffled[begin : begin + size] for begin in range(0, len(shuffled), size)]
    assert plain(gathered([batches])) == plain(whole)
    assert plain(gathered([[each] for each in batches])) == plain(whole)


@given(messages)
def test_publishers_are_in_order_of_name_and_messages_in_order_of_time_and_publisher(rows: list[Message]) -> None:
    for topic in gathered([[rows]]):
        names = [publisher.id for publisher in topic.publishers]
        assert names == sorted({row[1] for row in rows if row[0] == topic.topic})
        sent = [
            (time, names[number])
            for time, number in zip(topic.arrivals.times_ns.tolist(), topic.arrivals.publisher_of.tolist(), strict=True)
        ]
        assert sent == sorted((row[3], row[1]) for row in rows if row[0] == topic.topic)


def test_a_publisher_has_the_group_of_its_first_message() -> None:
    early: list[Message] = [("t", "p", "first", 1)]
    late: list[Message] = [("t", "p", "later", 2), ("t", "q", None, 3)]
    cuts: list[list[list[list[Message]]]] = [[[late, early]], [[late], [early]], [[late + early]]]
    for parts in cuts:
        (topic,) = gathered(parts)
        assert [(each.id, each.group) for each in topic.publishers] == [("p", "first"), ("q", None)]


def test_batches_without_groups_have_none() -> None:
    senders = Senders()
    rows = batch([("t", "p", None, 1), ("t", "q", None, 2)]).drop_columns(["group"])
    numbered = senders.numbered(rows)
    (topic,) = arrivals_of([(senders.table(), [numbered])])
    assert [each.group for each in topic.publishers] == [None, None]


def test_names_keep_their_numbers() -> None:
    names = Names()
    first = names.numbered(pa.array(["x", "y", "x"]).dictionary_encode())
    second = names.numbered(pa.array(["z", "y", None]).dictionary_encode())
    assert (first.tolist(), second.tolist()) == ([0, 1, 0], [2, 1, 0])
    assert np.array(names.all).tolist() == ["x", "y", "z"]
