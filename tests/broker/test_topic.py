"""A topic in virtual time: when its bucket releases messages, whenever it is looked at and however (r, b) changes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from srtm.broker.message import Ids, Message
from srtm.broker.topic import Topic
from srtm.model.bucket import TokenBucket
from srtm.model.timeline import Timeline, access_delays, largest_excess

FOREVER_NS = 10**18
BUCKETS = st.builds(TokenBucket, st.integers(1, 3_000_000_000), st.integers(1_000_000_000, 5_000_000_000))
TIMES = st.integers(0, 20_000)  # ns; a token takes 1 ns to 1000 s


def made(arrivals: list[int]) -> list[Message]:
    new_id = Ids(0).take
    return [Message(new_id(), arrival_ns, b"x", "p") for arrival_ns in arrivals]


@given(
    st.lists(TIMES, min_size=1, max_size=30).map(sorted),
    BUCKETS,
    st.lists(st.tuples(TIMES, BUCKETS), max_size=5).map(lambda changes: sorted(changes, key=lambda change: change[0])),
    st.lists(TIMES, max_size=10),
)
def test_release_times_are_the_laws(
    arrivals: list[int], start: TokenBucket, changes: list[tuple[int, TokenBucket]], looks: list[int]
) -> None:
    """Messages come to the topic before a change or a look that follows them, as the loop would bring them."""
    topic = Topic("t", 1_000, 10**6)
    topic.gate.limit(start, 0)
    messages = made(arrivals)
    coming, released = iter([*messages, None]), []
    following = next(coming)
    happening = [(at_ns, 0, bucket) for at_ns, bucket in changes] + [(at_ns, 1, None) for at_ns in looks]
    for at_ns, _, bucket in [*sorted(happening, key=lambda each: each[:2]), (FOREVER_NS, 1, None)]:
        while following is not None and following.arrival_ns < at_ns:
            topic.gate.arrived.append(following)
            following = next(coming)
        if bucket is None:
            released += topic.gate.drain(at_ns)
        else:
            topic.gate.limit(bucket, at_ns)
    assert released == messages
    assert not topic.waiting
    assert topic.gate.bytes == 0
    expected = access_delays(np.array(arrivals), Timeline(start, tuple(changes)))
    assert [message.release_ns - message.arrival_ns for message in messages] == expected.tolist()


@given(st.lists(TIMES, min_size=1, max_size=30).map(sorted), BUCKETS, TIMES)
def test_without_a_bucket_those_that_wait_go_at_once(arrivals: list[int], bucket: TokenBucket, end_ns: int) -> None:
    topic = Topic("t", 1_000, 10**6)
    topic.gate.limit(bucket, 0)
    messages = made(arrivals)
    topic.gate.arrived += [message for message in messages if message.arrival_ns < end_ns]
    topic.gate.limit(None, end_ns)
    topic.gate.arrived += [message for message in messages if message.arrival_ns >= end_ns]
    assert topic.gate.drain(FOREVER_NS) == messages
    waits = access_delays(np.array(arrivals), Timeline(bucket))
    for message, wait in zip(messages, waits.tolist(), strict=True):
        if message.arrival_ns < end_ns:
            assert message.release_ns == min(message.arrival_ns + wait, end_ns)
        else:
            assert message.release_ns == message.arrival_ns


@given(
    st.lists(TIMES, min_size=1, max_size=30).map(sorted),
    BUCKETS,
    st.lists(
        st.tuples(TIMES, st.one_of(BUCKETS, st.sampled_from(["look", "stall", "resume", "leave", "recall"]))),
        max_size=12,
    ),
)
def test_a_topic_whose_engine_comes_and_goes_conforms_and_releases_nothing_meanwhile(
    arrivals: list[int], start: TokenBucket, happening: list[tuple[int, TokenBucket | str]]
) -> None:
    """Also where what comes from some time on is left to the log, and read from there later.

    What was released last when the engine went is sent again, with new tokens: both count as output.
    """
    topic = Topic("t", 1_000, 10**6)
    topic.gate.limit(start, 0)
    messages, output = made(arrivals), list[int]()
    coming, released = iter([*messages, None]), []
    following, changes, away = next(coming), [], list[tuple[int, int]]()
    since_ns: int | None = None
    log: list[Message] | None = None
    recalled: list[tuple[int, Message]] = []
    last = [(20_000, "recall"), (20_000, "resume"), (FOREVER_NS, "look")]
    for at_ns, what in [*sorted(happening, key=lambda each: each[0]), *last]:
        while following is not None and following.arrival_ns < at_ns:
            (topic.gate.arrived if log is None else log).append(following)
            following = next(coming)
        if isinstance(what, TokenBucket):
            topic.gate.limit(what, at_ns)
            changes.append((at_ns, what))
        elif what == "look":
            now = topic.gate.drain(at_ns)
            released += now
            output += [message.release_ns for message in now]
        elif what == "leave" and log is None:
            log = []
        elif what == "recall" and log is not None:
            topic.gate.recall(log, at_ns)
            recalled += [(at_ns, message) for message in log]
            log = None
        elif what == "stall" and since_ns is None:
            topic.gate.stall(at_ns, released[-2:])
            del released[-2:]
            since_ns = at_ns
        elif what == "resume" and since_ns is not None:
            topic.gate.resume(at_ns)
            away.append((since_ns, at_ns))
            since_ns = None
    assert released == messages
    assert not topic.waiting
    assert topic.gate.bytes == 0
    times = np.sort(np.array(output, np.int64))
    assert largest_excess(times, Timeline(start, tuple(changes))).conforms
    assert all(message.release_ns >= at_ns for at_ns, message in recalled)
    for left_ns, back_ns in away:
        assert not any(left_ns < time_ns < back_ns for time_ns in times.tolist())


def test_a_topic_that_drops_lets_what_waited_before_go_first_and_with_tokens() -> None:
    topic = Topic("t", 1_000, 10**6)
    topic.gate.limit(TokenBucket.of(1, 1), 0)
    topic.gate.drops = True
    old, new = made([0, 0, 0]), made([1, 2_500_000_000])
    topic.gate.recall(old, 0)
    topic.gate.arrived.append(new[0])
    assert topic.gate.drain(1) == old[:1]
    topic.gate.arrived.append(new[1])
    assert topic.gate.drain(2_500_000_000) == old[1:]  # who comes meanwhile finds no token
    assert [message.release_ns for message in old] == [0, 10**9, 2 * 10**9]
    assert topic.recent.dropped == 2
