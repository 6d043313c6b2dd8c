from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import InputError
from srtm.model.adaptation import History, Step, adapt
from srtm.model.bucket import TokenBucket
from srtm.model.split import split, within

TOKEN = 10**9


def history(*steps: Step) -> History:
    result = History()
    for step in steps:
        result.add(step)
    return result


@st.composite
def situations(draw: st.DrawFn) -> tuple[TokenBucket, dict[str, TokenBucket], dict[str, History]]:
    names = [f"b{i}" for i in range(draw(st.integers(1, 6)))]
    whole = TokenBucket(draw(st.integers(10_000, 10**8)), draw(st.integers(len(names) * TOKEN, 10**13)))
    weights = [draw(st.integers(1, 50)) for _ in names]
    shares = dict(zip(names, split(whole, weights), strict=True))
    step = st.builds(Step, st.integers(0, 100_000), st.integers(0, 5_000 * TOKEN), st.integers(0, 50))
    reporting = draw(st.sets(st.sampled_from(names)))
    return whole, shares, {name: history(*draw(st.lists(step, max_size=12))) for name in reporting}


@given(situations())
def test_shares_add_up_keep_their_floors_and_leave_the_silent_alone(
    situation: tuple[TokenBucket, dict[str, TokenBucket], dict[str, History]],
) -> None:
    whole, shares, histories = situation
    wanted = adapt(whole, shares, histories)
    assert wanted.keys() == shares.keys()
    assert within(whole, wanted.values())
    known = [name for name in shares if name in histories and len(histories[name])]
    for name, share in wanted.items():
        if name not in known:
            assert share == shares[name]
    if wanted != shares:
        assert sum(share.r_mtps for share in wanted.values()) == whole.r_mtps
        assert sum(share.b_ntok for share in wanted.values()) == whole.b_ntok


@given(situations())
def test_once_adapted_it_rests(situation: tuple[TokenBucket, dict[str, TokenBucket], dict[str, History]]) -> None:
    whole, shares, histories = situation
    wanted = adapt(whole, shares, histories)
    assert adapt(whole, wanted, histories) == wanted


def test_a_worked_adaptation() -> None:
    """Share r by mean rates 300 : 100, b by largest backlogs 10 : 30, whatever they were before."""
    whole = TokenBucket.of(1_000, 80)
    shares = {"a": TokenBucket.of(500, 40), "b": TokenBucket.of(500, 40)}
    seen = {
        "a": history(Step(400, 10 * TOKEN), Step(200, 4 * TOKEN)),
        "b": history(Step(100, 2 * TOKEN), Step(100, 30 * TOKEN)),
    }
    assert adapt(whole, shares, seen) == {"a": TokenBucket.of(750, 20), "b": TokenBucket.of(250, 60)}


def test_a_total_shift_leaves_99_percent_of_r_usable_and_the_idle_broker_alive() -> None:
    whole = TokenBucket.of(1_000, 100)
    shares = {"a": TokenBucket.of(500, 50), "b": TokenBucket.of(500, 50)}
    wanted = adapt(whole, shares, {"a": history(Step(0, 0, 0)), "b": history(Step(900, 50 * TOKEN, 10))})
    assert wanted["b"].r >= 0.99 * whole.r
    assert wanted["a"] == TokenBucket.of(5, 1)


def test_b_is_no_smaller_than_the_largest_batch() -> None:
    whole = TokenBucket.of(1_000, 50)
    shares = {"a": TokenBucket.of(500, 25), "b": TokenBucket.of(500, 25)}
    wanted = adapt(whole, shares, {"a": history(Step(10, TOKEN, 20)), "b": history(Step(900, 900 * TOKEN, 10))})
    assert wanted["a"].b == 20
    # Batches larger than b can never all be allowed for: then backlogs alone decide.
    wanted = adapt(whole, shares, {"a": history(Step(10, TOKEN, 40)), "b": history(Step(900, 49 * TOKEN, 40))})
    assert wanted["a"].b == 1


def test_small_changes_are_left_alone() -> None:
    whole = TokenBucket.of(1_000, 100)
    shares = {"a": TokenBucket.of(500, 50), "b": TokenBucket.of(500, 50)}
    nearly = {"a": history(Step(510, 51 * TOKEN)), "b": history(Step(490, 49 * TOKEN))}
    assert adapt(whole, shares, nearly) == shares
    assert adapt(whole, shares, nearly, hysteresis=Fraction(1, 100)) != shares


def test_the_window_forgets() -> None:
    seen = History(steps=3)
    for messages in (900, 1, 2, 3):
        seen.add(Step(messages, messages * TOKEN))
    assert seen.mean_messages == 2
    assert seen.max_backlog_ntok == 3 * TOKEN


@pytest.mark.parametrize("step", [(-1, 0, 1), (0, -1, 1), (0, 0, -1), (1.5, 0, 1), (float("nan"), 0, 1)])
def test_nonsense_from_a_broker_is_refused(step: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match="whole number and not negative"):
        Step(*step)


def test_shares_beyond_the_whole_are_refused() -> None:
    with pytest.raises(InputError, match="exceed the whole bucket"):
        adapt(TokenBucket.of(10, 10), {"a": TokenBucket.of(11, 5)}, {})
