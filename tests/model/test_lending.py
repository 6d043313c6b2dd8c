"""Lending: never a token more than one bucket (r, b) has, never later than a share alone, and the same compiled."""

from __future__ import annotations

from itertools import groupby
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.model.bucket import TokenBucket
from srtm.model.lending import LEAST_PATIENCE_NS, Answer, Ask, Lending
from srtm.model.lending_scan import Tails, choose_rule, lending_delays, pick, worst
from srtm.model.limiter import Limiter
from srtm.model.scan import split_access_delays
from srtm.model.split import split
from srtm.model.timeline import Timeline, largest_excess
from srtm.workload.publishers import Population
from tests.model.lending_driver import ARRIVALS, TOKEN, Cluster

if TYPE_CHECKING:
    from srtm.model.lending import Rule

MS = 10**6


@st.composite
def topics(draw: st.DrawFn) -> tuple[list[TokenBucket], list[int], list[int], int, Rule]:
    """Shares, arrivals with their brokers, a round trip and a rule."""
    brokers = draw(st.integers(2, 4))
    whole = TokenBucket(draw(st.integers(10_000, 20_000_000)), draw(st.integers(brokers, 60)) * 10**9)
    weights = st.lists(st.integers(1, 9), min_size=brokers, max_size=brokers)
    shares = split(whole, draw(weights), draw(weights))
    token_ns = 10**12 // whole.r_mtps + 1
    gaps = st.one_of(st.just(0), st.integers(0, 2 * token_ns), st.integers(0, 20 * token_ns))
    turns = draw(st.lists(st.tuples(gaps, st.integers(0, brokers - 1), st.integers(1, 12)), min_size=1, max_size=40))
    now, times, brokers_of = 0, [], []
    for gap, broker, messages in turns:
        now += gap
        times += [now] * messages
        brokers_of += [broker] * messages
    round_trip = draw(st.one_of(st.integers(0, 3), st.integers(0, 8 * token_ns)))
    return shares, times, brokers_of, round_trip, draw(st.sampled_from(["when_waiting", "early"]))


def bring(cluster: Cluster, times: list[int], brokers_of: list[int]) -> None:
    """Put the arrivals before the brokers, in order of time and broker, as one turn each."""
    order = sorted(range(len(times)), key=lambda i: (times[i], brokers_of[i]))
    for (time_ns, broker), together in groupby(order, lambda i: (times[i], brokers_of[i])):
        messages = list(together)
        cluster.at(time_ns, ARRIVALS, broker, lambda b=broker, m=messages: cluster.arrive(cluster.brokers[b], m))


@given(topics())
def test_compiled_equals_the_state_machines_event_by_event(
    case: tuple[list[TokenBucket], list[int], list[int], int, Rule],
) -> None:
    shares, times, brokers_of, round_trip, rule = case
    ways = {Ask: round_trip // 2, Answer: round_trip - round_trip // 2}
    cluster = Cluster(shares, rule, round_trip, lambda message: [ways[type(message)]], times[0])
    bring(cluster, times, brokers_of)
    while cluster.step():
        pass
    for broker in cluster.brokers:
        cluster.now_ns = 2**62
        cluster.settle(broker)
    found = lending_delays(times, np.array(brokers_of, np.int32), shares, round_trip, rule)
    assert found.delays_ns.tolist() == [cluster.released[i] - at for i, at in enumerate(times)]
    counts = [broker.lending.counts for broker in cluster.brokers]
    assert found.asks == sum(each.asks for each in counts)
    assert found.lent * TOKEN == pytest.approx(sum(each.lent_ptok for each in counts))
    assert found.lost * TOKEN == pytest.approx(sum(each.lost_ptok for each in counts))


class Faults:
    """A network that loses, delays, doubles and reorders, drawn from a seed."""

    def __init__(self, random: Random, round_trip_ns: int) -> None:
        self.random = random
        self.round_trip_ns = round_trip_ns
        self.loss, self.doubled, self.slow = random.choice([0, 0.1, 0.5]), random.choice([0, 0.2]), random.random()

    def __call__(self, _: object) -> list[int]:
        copies = 0 if self.random.random() < self.loss else 2 if self.random.random() < self.doubled else 1
        most = 40 * self.round_trip_ns if self.random.random() < self.slow else self.round_trip_ns
        return [self.random.randint(0, most + 1) for _ in range(copies)]


class Watched(Cluster):
    """Beside the brokers, one bucket (r, b) through which everything that they release passes."""

    def __init__(self, whole: TokenBucket, *rest: Any) -> None:
        super().__init__(*rest)
        self.one = Limiter(whole, self.now_ns)
        self.seen = 0

    def check(self) -> None:
        """One bucket (r, b) that saw the same messages leave has no fewer tokens than there are."""
        held = self.tokens_ptok()
        gone = sorted(list(self.released.values())[self.seen :])
        self.seen += len(gone)
        for at_ns in gone:
            self.one.admit(at_ns)
        assert held <= self.one.bucket.pico_law.burst
        # A message has its token at an instant and leaves at the next whole nanosecond, when more have come.
        assert held <= self.one.level_ptok(self.now_ns) + self.one.bucket.pico_law.rate

    def reshare(self, shares: list[TokenBucket], epoch: int) -> None:
        """Cut first, and let brokers hear of the epoch one by one."""
        for broker, share in zip(self.brokers, shares, strict=True):
            self.settle(broker)
            held = broker.limiter.bucket
            less = TokenBucket(min(held.r_mtps, share.r_mtps), min(held.b_ntok, share.b_ntok))
            broker.limiter.reconfigure(self.now_ns, less)
            broker.lending.join(epoch, self.others(broker), self.now_ns)

    def grow(self, number: int, share: TokenBucket, epoch: int) -> None:
        """The new share of one broker, after all cuts."""
        broker = self.brokers[number]
        self.settle(broker)
        broker.limiter.reconfigure(self.now_ns, share)
        broker.lending.join(epoch, self.others(broker), self.now_ns)

    def restart(self, number: int) -> None:
        """A broker is killed, and starts again with no tokens, no messages and no memory."""
        broker = self.brokers[number]
        self.settle(broker)
        broker.waiting.clear()
        broker.limiter = Limiter(broker.limiter.bucket, self.now_ns, 0)
        lending = Lending("topic", broker.limiter, self.now_ns, rule="early", round_trip_ns=MS)
        lending.join(1, self.others(broker), self.now_ns)
        broker.lending = lending


def faulty(seed: int) -> tuple[int, int]:
    """One run with loss, delay, doubling, reordering, and half of them with restarts and shares that change.

    Returns the tokens lent and lost.
    """
    random = Random(seed)
    brokers = random.randint(2, 5)
    whole = TokenBucket(random.randint(100_000, 20_000_000), random.randint(brokers, 80) * 10**9)

    def shared() -> list[TokenBucket]:
        return split(whole, *([random.randint(1, 9) for _ in range(brokers)] for _ in "rb"))

    token_ns = 10**12 // whole.r_mtps
    round_trip = random.choice([1, 2, 5]) * token_ns
    rule: Rule = random.choice(["when_waiting", "early"])
    cluster = Watched(whole, shared(), rule, round_trip, Faults(random, round_trip), 0)
    now, times, brokers_of = 0, [], []
    for _ in range(60):
        now += random.choice([0, random.randint(0, 3 * token_ns), random.randint(0, 20 * token_ns)])
        messages = random.choice([1, 1, 3, 10])
        times += [now] * messages
        brokers_of += [random.randrange(brokers)] * messages
    bring(cluster, times, brokers_of)
    steady = random.random() < 0.5  # a share's promise ends with the share
    for epoch in () if steady else (2, 3, 4):
        at_ns, new = random.randint(0, now), shared()
        cluster.at(at_ns, ARRIVALS, 9, lambda new=new, epoch=epoch: cluster.reshare(new, epoch))
        cluster.at(random.randint(0, now), ARRIVALS, 9, lambda n=epoch % brokers: cluster.restart(n))
        for number, share in enumerate(new if epoch == 4 else ()):
            later = now + random.randint(0, 50 * token_ns)
            cluster.at(later, ARRIVALS, 9, lambda n=number, s=share: cluster.grow(n, s, 4))
    while cluster.step():
        cluster.check()
    assert largest_excess(np.sort(list(cluster.released.values())), Timeline(whole)).conforms
    assert not (steady and cluster.late)
    counts = [broker.lending.counts for broker in cluster.brokers]
    lent = sum(each.lent_ptok for each in counts)
    assert not steady or sum(each.borrowed_ptok for each in counts) <= lent
    return lent, sum(each.lost_ptok for each in counts)


@pytest.mark.parametrize("block", range(10))
def test_no_token_is_made_and_nothing_is_late_whatever_the_network_does(block: int) -> None:
    runs = [faulty(seed) for seed in range(60 * block, 60 * (block + 1))]
    assert 0 < sum(lost for _, lost in runs) < sum(lent for lent, _ in runs)


def two(level: int, b: int = 10, r: int = 1) -> tuple[Lending, Limiter]:
    """The side of broker m, whose bucket (r, b) holds `level` tokens, beside a peer of the same size."""
    limiter = Limiter(TokenBucket.of(r, b), 0, level * 10**9)
    lending = Lending("t", limiter, 0, rule="early", round_trip_ns=MS)
    lending.join(7, {"peer": TokenBucket.of(r, b)}, 0)
    return lending, limiter


def test_worked_number_of_an_exchange() -> None:
    """2 of 10 tokens here, 10 of 10 there: 4 make it 6 and 6."""
    asker, borrowed = two(2)
    lender, _ = two(10)
    asked = asker.turn(0, 0)
    assert asked is not None
    name, ask = asked
    assert (name, ask.epoch, ask.want_ptok, ask.level_ptok) == ("peer", 7, 4 * TOKEN, 2 * TOKEN)
    answer = lender.lend("peer", ask, 0, 0)
    assert answer == Answer("t", ask.id, 4 * TOKEN, 6 * TOKEN)
    assert asker.borrow("peer", answer, MS, 0) == 4 * TOKEN
    assert borrowed.level_ptok(MS) == 6 * TOKEN + MS * 1_000
    assert asker.borrow("peer", answer, MS, 0) == 0  # doubled
    assert lender.lend("peer", ask, MS, 0) is None  # doubled


def test_the_lender_evens_out_by_what_it_has_when_asked() -> None:
    lender, _ = two(4)
    answer = lender.lend("peer", Ask("t", 7, 5, 4 * TOKEN, 2 * TOKEN), 0, 0)
    assert answer is not None
    assert answer.lent_ptok == TOKEN
    answer = lender.lend("peer", Ask("t", 7, 6, 4 * TOKEN, 2 * TOKEN), 0, 1)
    assert answer is not None
    assert answer.lent_ptok == 0  # its own messages wait


def test_an_answer_finds_only_the_room_that_there_was_all_the_time() -> None:
    """Full in between and empty again: with the 4 tokens of the answer, 14 would leave a bucket of 10 at once."""
    asker, limiter = two(2)
    asked = asker.turn(0, 0)
    assert asked is not None
    full = 8 * 10**9
    limiter.admit(full, 10)
    assert asker.takes_ptok(full) == 0
    assert asker.borrow("peer", Answer("t", asked[1].id, 4 * TOKEN, 6 * TOKEN), full, 0) == 0
    assert asker.counts.lost_ptok == 4 * TOKEN


def test_old_epochs_strangers_and_silent_peers_change_nothing() -> None:
    lender, _ = two(10)
    assert lender.lend("peer", Ask("t", 6, 5, TOKEN, 0), 0, 0) is None
    assert lender.lend("stranger", Ask("t", 7, 5, TOKEN, 0), 0, 0) is None
    asker, _ = two(2)
    asked = asker.turn(0, 0)
    assert asked is not None
    late = LEAST_PATIENCE_NS + 3 * MS
    assert asker.wake_ns == 4 * MS
    assert asker.turn(1, 0) is None  # one ask at a time
    assert asker.turn(late, 0) is None  # the peer counts as empty now
    assert asker.counts.unanswered == 1
    assert asker.borrow("peer", Answer("t", asked[1].id, 4 * TOKEN, 6 * TOKEN), late, 0) == 0
    asker.join(8, {"peer": TokenBucket.of(1, 10)}, late)
    again = asker.turn(late, 0)
    assert again is not None
    asker.join(9, {"peer": TokenBucket.of(1, 10)}, late)
    assert asker.borrow("peer", Answer("t", again[1].id, 4 * TOKEN, 6 * TOKEN), late, 0) == 0


def test_the_round_trip_is_learned_from_late_answers_and_no_pause_makes_it_endless() -> None:
    """A peer 20 ms away, where 1 ms was assumed: its first answers are late, and later ones are not."""
    asker, limiter = two(0, b=100, r=1_000)
    taken = []
    for turn in range(1, 13):
        sent = turn * 10**9
        limiter.admit(sent, 90)
        asked = asker.turn(sent, 0)
        assert asked is not None
        later = sent + 20 * MS
        asker.turn(later, 0)  # gives up what took too long
        taken.append(asker.borrow("peer", Answer("t", asked[1].id, TOKEN, 50 * TOKEN), later, 0))
    assert taken[:2] == [0, 0]
    assert taken[-1] == TOKEN
    assert 5 * MS < asker.round_trip_ns <= 20 * MS
    limiter.admit(20 * 10**9, 90)
    asked = asker.turn(20 * 10**9, 0)
    assert asked is not None
    before = asker.round_trip_ns
    asker.turn(30 * 10**9, 0)
    asker.borrow("peer", Answer("t", asked[1].id, TOKEN, 50 * TOKEN), 30 * 10**9, 0)  # it slept
    assert asker.round_trip_ns < 2 * before


def load(group_size: int, brokers: int) -> tuple[list[TokenBucket], Any, Any]:
    """A topic whose publishers burst alone, or in groups at all brokers at once."""
    from srtm.lab.world import WITH_MARGIN, Simulated

    world = Simulated(seconds=10)
    topic = world.topic(Population(300, batch=10, group_size=group_size), 1, WITH_MARGIN)
    placed = world.spread(topic, "srtm", brokers, 1)
    times, senders = topic.arrivals
    return list(placed.shares.values()), times, placed.broker_of[senders].astype(np.int32)


def test_lending_takes_most_of_the_penalty_away() -> None:
    shares, times, broker_of = load(1, 6)
    static = worst(split_access_delays(times, broker_of, shares), broker_of)
    waiting, early = (
        worst(lending_delays(times, broker_of, shares, MS // 5, rule).delays_ns, broker_of)
        for rule in ("when_waiting", "early")
    )
    assert early <= waiting < static / 3
    assert choose_rule(times, broker_of, shares, MS // 5) != "off"


def test_auto_is_off_if_lending_would_harm() -> None:
    shares, times, broker_of = load(10, 5)
    rule = choose_rule(times, broker_of, shares, MS)
    static = worst(split_access_delays(times, broker_of, shares), broker_of)
    assert worst(lending_delays(times, broker_of, shares, MS, rule).delays_ns, broker_of) <= static


@pytest.mark.parametrize(
    ("off", "waiting", "early", "limit_ns", "rule"),
    [
        # Worst broker, all messages, mean; asks.
        (Tails(0, 0, 0, 0), Tails(0, 0, 0, 0), Tails(0, 0, 0, 0), MS, "off"),
        (Tails(9, 9, 9, 0), Tails(5, 5, 5, 0.1), Tails(1, 1, 1, 0.1), None, "early"),
        # Both bring the quantile to zero, and one of them is nearer to missing it.
        (Tails(9, 9, 9, 0), Tails(0, 0, 5, 0.1), Tails(0, 0, 1, 0.1), MS, "early"),
        (Tails(9, 9, 9, 0), Tails(0, 0, 5, 0.1), Tails(0, 0, 6, 0.1), MS, "when_waiting"),
        # What asks often must be needed: half of the SLO is for processing.
        (Tails(9 * MS, 9, 9, 0), Tails(MS // 2, 5, 5, 0.1), Tails(0, 0, 1, 0.11), MS, "when_waiting"),
        (Tails(9 * MS, 9, 9, 0), Tails(MS // 2 + 1, 5, 5, 0.1), Tails(0, 0, 1, 0.11), MS, "early"),
        (Tails(MS // 2, 9, 9, 0), Tails(5, 5, 5, 0.11), Tails(0, 0, 1, 0.5), MS, "off"),
        # Better for some, and worse for others.
        (Tails(9, 9, 9, 0), Tails(10, 5, 5, 0), Tails(9, 9, 10, 0), None, "off"),
    ],
)
def test_auto_weighs_delays_against_asks(
    off: Tails, waiting: Tails, early: Tails, limit_ns: int | None, rule: Rule
) -> None:
    assert pick({"off": off, "when_waiting": waiting, "early": early}, limit_ns) == rule
