"""Shares on the move: cut, acknowledged, given. Whatever happens, the topic as a whole keeps to (r, b)."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import InputError
from srtm.model.bucket import TokenBucket
from srtm.model.limiter import Limiter
from srtm.model.split import split, within
from srtm.model.timeline import Timeline, largest_excess
from srtm.model.transfer import PendingGrant, Transfer

TOKEN = 10**9


@st.composite
def moves(draw: st.DrawFn) -> tuple[TokenBucket, dict[str, TokenBucket], list[dict[str, TokenBucket]]]:
    """A bucket, its shares, and a few ways to share it anew, over brokers that come and go."""
    names = [f"b{i}" for i in range(draw(st.integers(2, 5)))]
    whole = TokenBucket(draw(st.integers(10_000, 20_000_000)), draw(st.integers(len(names) * TOKEN, 40 * TOKEN)))
    ways = []
    for _ in range(draw(st.integers(2, 4))):
        members = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        weights = st.lists(st.integers(1, 20), min_size=len(members), max_size=len(members))
        ways.append(dict(zip(members, split(whole, draw(weights), draw(weights)), strict=True)))
    return whole, ways[0], ways[1:]


@given(moves(), st.randoms(use_true_random=False))
def test_never_more_is_out_than_there_is_in_any_order_of_acknowledgements(
    move: tuple[TokenBucket, dict[str, TokenBucket], list[dict[str, TokenBucket]]], random: object
) -> None:
    whole, held, ways = move
    transfer = Transfer(whole, held, ways[0])
    in_force = dict(held)
    flying: list[PendingGrant] = []
    for turn in range(80):
        if turn == 3:
            transfer.retarget(ways[-1])  # the wish changes while grants are on their way
        flying += transfer.orders()
        assert within(whole, transfer.possible.values())
        assert {grant.sequence for grant in flying} == {grant.sequence for grant in transfer.unanswered}
        if not flying and turn >= 3:
            break
        if not flying:
            continue
        random.shuffle(flying)  # type: ignore[attr-defined]
        grant = flying.pop()
        if grant.share:
            in_force[grant.broker] = grant.share
        else:
            del in_force[grant.broker]
        assert within(whole, in_force.values())
        transfer.acknowledged(grant)
        transfer.acknowledged(grant)  # heard twice: changes nothing
    assert transfer.done
    assert in_force == ways[-1]


@given(moves(), st.data())
def test_the_whole_topic_conforms_while_shares_move(
    move: tuple[TokenBucket, dict[str, TokenBucket], list[dict[str, TokenBucket]]], data: st.DataObject
) -> None:
    """Real limiters, bursts at any moment, grants that arrive late; every window of the sum of all outputs."""
    whole, held, ways = move
    limiters = {name: Limiter(share) for name, share in held.items()}
    token_ns = 10**12 // whole.r_mtps + 1
    now, out = 0, []
    waiting = dict.fromkeys(limiters, 0)

    def drain(until: int) -> None:
        for name, limiter in limiters.items():
            while waiting[name] and (at := limiter.next_release_ns(waiting[name])) <= until:
                due = limiter.due(at, waiting[name])
                out.extend([at] * due)
                waiting[name] -= due

    def put_in_force(grant: PendingGrant) -> int:
        """What a broker does with a grant; without a share it sends nothing any more and gives its tokens back."""
        limiter = limiters.get(grant.broker)
        if grant.share is None:
            waiting.pop(grant.broker)
            return limiters.pop(grant.broker).surrender(now)
        if limiter is None:
            limiters[grant.broker] = Limiter(grant.share, now, grant.gift_ntok)
            waiting[grant.broker] = 0
            return 0
        return limiter.reconfigure(now, grant.share, grant.gift_ntok)

    for wanted in ways:
        transfer = Transfer(whole, held, wanted)
        flying = transfer.orders()
        while flying:
            now += data.draw(st.integers(0, 3 * token_ns))
            drain(now)
            for name, burst in data.draw(
                st.fixed_dictionaries({name: st.integers(0, 15) for name in sorted(limiters)})
            ).items():
                for _ in range(burst):
                    limiters[name].admit(now)
                waiting[name] += burst
            drain(now)
            grant = flying.pop(data.draw(st.integers(0, len(flying) - 1)))
            surrendered = put_in_force(grant)
            drain(now)
            transfer.acknowledged(grant, surrendered)
            flying += transfer.orders()
        held = wanted
    drain(now + 100 * token_ns)
    if out:
        assert largest_excess(np.sort(np.array(out)), Timeline(whole)).conforms


def test_tokens_travel_with_the_share() -> None:
    """A full bucket gives up 6 of 10 tokens; the bucket that grows by 6 starts with them instead of filling up."""
    whole = TokenBucket.of(1_000, 20)
    a, b = Limiter(TokenBucket.of(500, 10)), Limiter(TokenBucket.of(500, 10))
    transfer = Transfer(
        whole, {"a": a.bucket, "b": b.bucket}, {"a": TokenBucket.of(500, 4), "b": TokenBucket.of(500, 16)}
    )
    (cut,) = transfer.orders()
    assert cut == PendingGrant("a", TokenBucket.of(500, 4), sequence=1)
    assert not transfer.orders()
    assert cut.share
    transfer.acknowledged(cut, a.reconfigure(0, cut.share))
    (give,) = transfer.orders()
    assert give == PendingGrant("b", TokenBucket.of(500, 16), sequence=2, gift_ntok=6 * TOKEN)
    assert give.share
    b.reconfigure(0, give.share, give.gift_ntok)
    assert b.tokens(0) == 16


def test_why_unfinished_work_must_not_be_kept() -> None:
    """The rule of ADR 3. Two buckets of (15 in all): one has just sent its 10. Then 5 of its b go to the other.

    Keeping unfinished work would fill the other up to 10 at once: 20 messages in an instant from a topic with b = 15.
    """
    whole = TokenBucket.of(1_000, 15)
    first, second = Limiter(TokenBucket.of(500, 10)), Limiter(TokenBucket.of(500, 5))
    sent = [first.admit(0) for _ in range(10)]
    first.reconfigure(0, TokenBucket.of(500, 5))
    second.reconfigure(0, TokenBucket.of(500, 10))
    sent += [second.admit(0) for _ in range(10)]
    assert sorted(sent)[:16].count(0) == 15
    assert largest_excess(sorted(sent), Timeline(whole)).conforms


def test_a_topic_moves_to_a_broker_that_had_no_share() -> None:
    """Everything is given up first, tokens included; the new bucket starts with them and not with a full b."""
    whole = TokenBucket.of(1_000, 20)
    old = Limiter(whole)
    for _ in range(15):
        old.admit(0)
    transfer = Transfer(whole, {"old": whole}, {"new": whole})
    (cut,) = transfer.orders()
    assert cut == PendingGrant("old", None, sequence=1)
    transfer.acknowledged(cut, old.surrender(0))
    (give,) = transfer.orders()
    assert give == PendingGrant("new", whole, sequence=2, gift_ntok=5 * TOKEN)
    assert Limiter(whole, 0, give.gift_ntok).tokens(0) == 5
    transfer.acknowledged(give)
    assert transfer.done


def test_one_silent_broker_holds_back_only_what_it_was_to_give() -> None:
    whole = TokenBucket.of(900, 90)
    third = TokenBucket.of(300, 30)
    transfer = Transfer(
        whole,
        {"mute": third, "a": third, "b": third},
        {"mute": TokenBucket.of(200, 20), "a": TokenBucket.of(100, 10), "b": TokenBucket.of(600, 60)},
    )
    cuts = {grant.broker: grant for grant in transfer.orders()}
    assert set(cuts) == {"mute", "a"}
    transfer.acknowledged(cuts["a"])
    (give,) = transfer.orders()
    assert give.broker == "b"
    assert give.share == TokenBucket.of(500, 50)
    transfer.acknowledged(give)
    assert not transfer.orders()
    assert not transfer.done


def test_bad_transfers_are_refused() -> None:
    whole, half = TokenBucket.of(10, 10), TokenBucket.of(5, 5)
    with pytest.raises(InputError, match="wanted shares exceed"):
        Transfer(whole, {"a": half, "b": half}, {"a": whole, "b": half})
    transfer = Transfer(whole, {"a": whole}, {"a": half})
    (cut,) = transfer.orders()
    with pytest.raises(InputError, match="gave up -1"):
        transfer.acknowledged(cut, -1)


def test_a_lapsed_lease_frees_all_but_the_safe_share_once() -> None:
    """What is said before the lease ended and heard after it does not make the share whole again."""
    whole, half = TokenBucket.of(100, 40), TokenBucket.of(50, 20)
    transfer = Transfer(whole, {"a": half, "b": half}, {"a": half, "b": half})
    transfer.found("a", half, safe=False, answered=6)
    transfer.lapsed("a", 50, last=7)
    assert transfer.held["a"] == TokenBucket.of(25, 10)
    transfer.found("a", half, safe=False, answered=7)
    transfer.lapsed("a", 50, last=8)
    assert transfer.held["a"] == TokenBucket.of(25, 10)
    assert not transfer.orders()
    transfer.retarget({"a": half, "b": half})
    (grant,) = transfer.orders()
    assert grant.share == half
    transfer.acknowledged(grant)
    transfer.found("a", half, safe=False)
    transfer.lapsed("a", 50)
    assert transfer.held["a"] == TokenBucket.of(25, 10)


def test_a_lapsed_lease_of_a_broker_that_was_never_heard_frees_nothing() -> None:
    """After a restart nobody knows whether the share that is in the books was cut already."""
    whole = TokenBucket.of(100, 40)
    transfer = Transfer(whole, {"a": whole}, {"a": whole})
    transfer.lapsed("a", 50)
    assert transfer.held == {"a": whole}


def test_a_grant_that_is_under_way_when_the_lease_ends_counts_with_its_safe_share() -> None:
    whole, half = TokenBucket.of(100, 40), TokenBucket.of(50, 20)
    transfer = Transfer(whole, {}, {"a": whole})
    (grant,) = transfer.orders()
    transfer.lapsed("a", 50)
    assert transfer.possible == {"a": half}
    transfer.acknowledged(grant)
    assert transfer.possible == {"a": half}


def test_the_share_of_the_dead_is_free_and_what_is_recalled_is_not() -> None:
    whole, half = TokenBucket.of(100, 40), TokenBucket.of(50, 20)
    transfer = Transfer(whole, {"a": half, "b": half}, {"a": half, "b": half})
    transfer.gone("a")
    assert transfer.possible == {"b": half}
    transfer.recalled("c", whole)
    assert transfer.possible == {"b": half, "c": whole}
    transfer.retarget({"a": half, "b": half})
    (cut,) = transfer.orders()
    assert (cut.broker, cut.share) == ("c", None)
    transfer.acknowledged(cut)
    (give,) = transfer.orders()
    assert (give.broker, give.share) == ("a", half)


@given(moves(), st.integers(10_000, 20_000_000), st.integers(1, 40), st.randoms(use_true_random=False))
def test_a_whole_that_changes_is_never_exceeded_once_its_cuts_are_acknowledged(
    move: tuple[TokenBucket, dict[str, TokenBucket], list[dict[str, TokenBucket]]], r: int, b: int, random: object
) -> None:
    whole, held, ways = move
    other = TokenBucket(r, b * TOKEN)
    ceiling = TokenBucket(max(whole.r_mtps, r), max(whole.b_ntok, other.b_ntok))
    transfer = Transfer(whole, held, ways[0], pool_ntok=0)
    in_force, flying = dict(held), transfer.orders()
    transfer.resize(other)
    settled = False
    for _ in range(80):
        flying += transfer.orders()
        settled = settled or within(other, transfer.possible.values())
        assert within(other if settled else ceiling, transfer.possible.values())
        assert transfer.pool_ntok <= max(0, other.b_ntok - sum(each.b_ntok for each in transfer.possible.values()))
        if not flying:
            break
        random.shuffle(flying)  # type: ignore[attr-defined]
        grant = flying.pop()
        in_force.pop(grant.broker, None)
        if grant.share:
            in_force[grant.broker] = grant.share
        assert within(other if settled else ceiling, in_force.values())
        transfer.acknowledged(grant, random.randrange(40 * TOKEN))  # type: ignore[attr-defined]
    assert transfer.done
    assert in_force == transfer.wanted
    assert sum(share.r_mtps for share in in_force.values()) == r
    assert sum(share.b_ntok for share in in_force.values()) == other.b_ntok


def test_what_a_broker_said_before_a_late_grant_reached_it_frees_nothing() -> None:
    """The grant was under way when the lease ended; it may be put in force yet, cut to the safe share."""
    whole, half = TokenBucket.of(100, 20), TokenBucket.of(50, 10)
    transfer = Transfer(whole, {}, {"slow": whole}, pool_ntok=whole.b_ntok)
    transfer.orders()
    transfer.lapsed("slow", 50, last=3)
    transfer.found("slow", None, safe=False, answered=2)
    assert transfer.possible == {"slow": half}
    transfer.retarget({"slow": half, "other": half})
    assert within(whole, transfer.possible.values())
    transfer.found("slow", half, safe=True, answered=4)
    assert transfer.possible == {"slow": half}
    transfer.found("slow", None, safe=False, answered=5)
    assert transfer.possible == {}


def test_what_is_reported_is_what_is_booked_less_or_more() -> None:
    whole, half = TokenBucket.of(100, 20), TokenBucket.of(50, 10)
    transfer = Transfer(whole, {"a": half}, {"a": half, "b": half})
    transfer.found("a", whole, safe=False, answered=1)
    (cut,) = transfer.orders()  # and nothing to b, while more is out than there should be
    assert (cut.broker, cut.share) == ("a", half)
    transfer.found("a", whole, safe=False, answered=2)  # said before the cut came
    assert not transfer.orders()
    transfer.acknowledged(cut)
    (give,) = transfer.orders()
    assert (give.broker, give.share) == ("b", half)
    transfer.acknowledged(give)
    transfer.found("b", None, safe=False, answered=3)
    (again,) = transfer.orders()
    assert (again.broker, again.share) == ("b", half)


def test_a_grant_that_an_answer_leaves_out_is_void_once_a_later_exchange_is_answered() -> None:
    whole, half = TokenBucket.of(100, 20), TokenBucket.of(50, 10)
    transfer = Transfer(whole, {}, {"a": half, "b": half})
    first, _ = transfer.orders()
    transfer.retire("a", last=5)
    assert first.broker == "a"
    assert transfer.possible["a"] == half  # it may be in an exchange that is under way
    assert not transfer.done or transfer.unanswered
    transfer.found("a", None, safe=False, answered=5)
    assert transfer.possible["a"] == half
    transfer.found("a", None, safe=False, answered=6)
    assert "a" not in transfer.possible
    (again,) = transfer.orders()
    assert (again.broker, again.share) == ("a", half)
    assert again.sequence > first.sequence


def test_a_new_contract_counts_what_brokers_may_hold_of_the_one_before() -> None:
    """(100, 40) was deleted and (60, 20) created at once; two brokers do not know yet."""
    half, whole = TokenBucket.of(50, 20), TokenBucket.of(60, 20)
    before = Transfer(TokenBucket.of(100, 40), {"a": half, "b": half}, {"a": half, "b": half})
    before.found("b", half, safe=False, answered=1)
    transfer = Transfer.begun(whole, count(9), before.remains)
    transfer.retarget({"a": whole})
    grants = {grant.broker: grant for grant in transfer.orders()}
    assert grants["a"].share == half  # as much as is booked already, not more
    assert grants["b"].share is None
    transfer.acknowledged(grants["a"])
    assert not transfer.orders()
    transfer.lapsed("b", 50, last=9)
    assert transfer.possible["b"] == TokenBucket.of(25, 10)
    assert [grant.broker for grant in transfer.orders()] == ["b"]  # a gets nothing: 50 and 25 are more than 60 already
    transfer.found("b", None, safe=False, answered=10)
    transfer.learned("b")
    (give,) = transfer.orders()
    assert (give.broker, give.share) == ("a", whole)


def test_a_broker_that_may_not_know_the_contract_before_the_last_is_heard_before_it_is_granted() -> None:
    """It may have less by now than it had under the first: what looks like a cut would give it more."""
    large, small = TokenBucket.of(100, 8), TokenBucket.of(100, 4)
    first = Transfer(large, {"a": TokenBucket.of(40, 3), "b": TokenBucket.of(60, 5)}, {})
    second = Transfer.begun(small, count(9), first.remains)
    second.retarget({"a": TokenBucket.of(40, 1), "b": TokenBucket.of(60, 3)})
    assert {grant.broker for grant in second.orders()} == {"a", "b"}
    third = Transfer.begun(small, count(19), second.remains)
    third.retarget({"a": small})
    assert third.orders() == []
    third.learned("a")
    assert third.orders() == []  # "b" may have more than all of it
    third.learned("b")
    assert [(grant.broker, grant.share) for grant in third.orders()] == [("a", small)]


def test_what_is_withheld_from_one_broker_is_neither_sent_nor_given_away() -> None:
    whole = TokenBucket.of(100, 8)
    transfer = Transfer.begun(whole, count(1), Transfer(whole, {}, {}).remains)
    half = TokenBucket.of(50, 4)
    transfer.retarget({"a": half, "b": half})
    assert [(grant.broker, grant.share) for grant in transfer.orders({"a"})] == [("b", half)]
    assert [(grant.broker, grant.share) for grant in transfer.orders()] == [("a", half)]
