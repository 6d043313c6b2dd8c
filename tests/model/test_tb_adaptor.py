from __future__ import annotations

from fractions import Fraction
from functools import partial
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import InputError
from srtm.model.apportion import apportion
from srtm.model.bucket import TokenBucket
from srtm.model.latency import Sketch
from srtm.model.split import least_b, split, within
from srtm.model.tb_adaptor import EXPECTED_STEPS, LEAST_STEPS, SURE, Expected, History, Step
from srtm.model.tb_adaptor import adapt as adapt_to

TOKEN = 10**9


NOW = 100
WINDOW = 10

adapt = partial(adapt_to, quantile="0.99", window=WINDOW)


def history(*steps: tuple[int, ...], newest: int = NOW) -> History:
    """Steps one after the other, the last of them at `newest`: (messages, largest backlog, largest batch)."""
    result = History()
    for number, step in enumerate(steps, newest + 1 - len(steps)):
        messages, backlog_ntok, *batch = step
        result.add(Step(number, messages, backlog_ntok, batch[0] if batch else 1), WINDOW)
    return result


def steady(*step: int) -> History:
    """The same for just as long as it takes to be believed."""
    return history(*[step] * LEAST_STEPS)


@st.composite
def situations(draw: st.DrawFn) -> tuple[TokenBucket, dict[str, TokenBucket], dict[str, History]]:
    names = [f"b{i}" for i in range(draw(st.integers(1, 6)))]
    whole = TokenBucket(draw(st.integers(10_000, 10**8)), draw(st.integers(len(names) * TOKEN, 10**13)))
    weights = [draw(st.integers(1, 50)) for _ in names]
    shares = dict(zip(names, split(whole, weights), strict=True))
    step = st.tuples(st.integers(0, 100_000), st.integers(0, 5_000 * TOKEN), st.integers(0, 50))
    reporting = draw(st.sets(st.sampled_from(names)))
    newest = st.sampled_from([NOW, NOW, NOW - 1, NOW - 2, NOW - 50])
    return whole, shares, {name: history(*draw(st.lists(step, max_size=12)), newest=draw(newest)) for name in reporting}


@given(situations())
def test_shares_add_up_keep_their_floors_and_leave_the_silent_alone(
    situation: tuple[TokenBucket, dict[str, TokenBucket], dict[str, History]],
) -> None:
    whole, shares, histories = situation
    wanted = adapt(whole, shares, histories, NOW)
    assert wanted.keys() == shares.keys()
    assert within(whole, wanted.values())
    known = [name for name in shares if name in histories and histories[name].is_current(NOW)]
    for name, share in wanted.items():
        if name not in known:
            assert share == shares[name]
    if wanted != shares:
        assert sum(share.r_mtps for share in wanted.values()) == whole.r_mtps
        assert sum(share.b_ntok for share in wanted.values()) == whole.b_ntok


@given(situations())
def test_once_adapted_it_rests(situation: tuple[TokenBucket, dict[str, TokenBucket], dict[str, History]]) -> None:
    whole, shares, histories = situation
    wanted = adapt(whole, shares, histories, NOW)
    assert adapt(whole, wanted, histories, NOW) == wanted


def test_a_worked_adaptation() -> None:
    """Share r by mean rates 300 : 100, b by largest backlogs 10 : 30, whatever they were before."""
    whole = TokenBucket.of(1_000, 80)
    shares = {"a": TokenBucket.of(500, 40), "b": TokenBucket.of(500, 40)}
    seen = {
        "a": history((400, 10 * TOKEN), (200, 10 * TOKEN), (300, 4 * TOKEN)),
        "b": history((100, 30 * TOKEN), (100, 30 * TOKEN), (100, 2 * TOKEN)),
    }
    assert adapt(whole, shares, seen, NOW) == {"a": TokenBucket.of(750, 20), "b": TokenBucket.of(250, 60)}


def test_a_total_shift_leaves_99_percent_of_r_usable_and_the_idle_broker_alive() -> None:
    whole = TokenBucket.of(1_000, 100)
    shares = {"a": TokenBucket.of(500, 50), "b": TokenBucket.of(500, 50)}
    wanted = adapt(whole, shares, {"a": steady(0, 0, 0), "b": steady(900, 50 * TOKEN, 10)}, NOW)
    assert wanted["b"].r >= 0.99 * whole.r
    assert wanted["a"] == TokenBucket.of(5, 1)


def test_b_is_no_smaller_than_the_largest_batch() -> None:
    whole = TokenBucket.of(1_000, 50)
    shares = {"a": TokenBucket.of(500, 25), "b": TokenBucket.of(500, 25)}
    wanted = adapt(whole, shares, {"a": steady(10, TOKEN, 20), "b": steady(900, 900 * TOKEN, 10)}, NOW)
    assert wanted["a"].b == 20
    # Batches larger than b can never all be allowed for: then backlogs alone decide.
    wanted = adapt(whole, shares, {"a": steady(10, TOKEN, 40), "b": steady(900, 49 * TOKEN, 40)}, NOW)
    assert wanted["a"].b == 1


def test_small_changes_are_left_alone() -> None:
    whole = TokenBucket.of(1_000, 100)
    shares = {"a": TokenBucket.of(500, 50), "b": TokenBucket.of(500, 50)}
    nearly = {"a": steady(510, 51 * TOKEN), "b": steady(490, 49 * TOKEN)}
    assert adapt(whole, shares, nearly, NOW) == shares
    assert adapt(whole, shares, nearly, NOW, hysteresis=Fraction(1, 100)) != shares


def worked_doubt(parts: list[float]) -> float:
    """SURE standard errors of a part that was estimated without each second in turn: the jackknife, by its formula."""
    mean = sum(parts) / len(parts)
    return SURE * sqrt((len(parts) - 1) / len(parts) * sum((part - mean) ** 2 for part in parts))


def test_what_one_second_shows_moves_no_tokens() -> None:
    """A largest backlog of 30 in one second of three, as in the paper's rule, would have given b three quarters."""
    whole, half = TokenBucket.of(1_000, 80), TokenBucket.of(500, 40)
    seen = {
        "a": history((400, 10 * TOKEN), (200, 4 * TOKEN), (300, 0)),
        "b": history((100, 2 * TOKEN), (100, 30 * TOKEN), (100, 0)),
    }
    assert adapt(whole, {"a": half, "b": half}, seen, NOW) == {
        "a": TokenBucket.of(750, 40),
        "b": TokenBucket.of(250, 40),
    }


def test_shares_of_b_move_as_far_as_the_window_proves() -> None:
    """The second broker bursts three to four times as much as the first, and once a little more than usual."""
    whole, half = TokenBucket.of(1_000, 1_000), TokenBucket.of(500, 500)
    bursts = [30 + number % 2 for number in range(WINDOW - 1)] + [32]
    seen = {
        "a": history(*[(500, 10 * TOKEN)] * WINDOW),
        "b": history(*[(500, tokens * TOKEN) for tokens in bursts]),
    }
    wanted = adapt(whole, {"a": half, "b": half}, seen, NOW)
    of_a, of_b = ([part] * (WINDOW - 1) + [last] for part, last in ((10 / 42, 10 / 41), (32 / 42, 31 / 41)))
    one, other = worked_doubt(of_a), worked_doubt(of_b)  # equal, but a's part is smaller, and its relative error larger
    means = [sum(parts) / WINDOW for parts in (of_a, of_b)]
    common = (((one / means[0]) ** 2 + (other / means[1]) ** 2) / 2) ** 0.5
    assert common * means[1] > other
    assert wanted["a"].b / whole.b == pytest.approx(10 / 42 + one)
    assert wanted["b"].b + wanted["a"].b == whole.b
    assert adapt(whole, wanted, seen, NOW) == wanted


def test_bursts_that_hit_all_brokers_together_cancel_out() -> None:
    """In every second a has three quarters of the burst, but seconds differ by a factor of ten."""
    whole, half = TokenBucket.of(1_000, 100), TokenBucket.of(500, 50)
    sizes = [1, 3, 10, 2, 5, 1, 7, 9, 4, 6]
    seen = {
        "a": history(*[(500, 3 * size * TOKEN) for size in sizes]),
        "b": history(*[(500, size * TOKEN) for size in sizes]),
    }
    assert {name: share.b for name, share in adapt(whole, {"a": half, "b": half}, seen, NOW).items()} == {
        "a": 75,
        "b": 25,
    }


def test_brokers_that_are_alike_keep_their_shares() -> None:
    """Backlogs of independent, equal bursts at four brokers: ten seconds of them hardly ever prove a difference."""
    rng = np.random.default_rng(18)
    whole, names = TokenBucket.of(4_000, 4_000), "abcd"
    shares = dict.fromkeys(names, TokenBucket.of(1_000, 1_000))
    moved = 0
    for _ in range(60):
        seen = {name: History() for name in names}
        for number in range(NOW + 1 - WINDOW, NOW + 1):
            for name in names:
                found = np.repeat(rng.exponential(300, 10).astype(np.int64), 100)
                seen[name].add(Step(number, 1_000, int(found.max()) * TOKEN, 1, Sketch.of(found)), WINDOW)
        moved += adapt(whole, shares, seen, NOW) != shares
    assert moved <= 6


def test_bins_of_backlogs_are_a_doubt() -> None:
    """Backlogs of 1,023 and 1,024 tokens are in different bins, which hold up to 1,023 and up to 1,055."""
    whole, half = TokenBucket.of(1_000, 3_000), TokenBucket.of(500, 1_500)
    seen = {"a": History(), "b": History()}
    for number in range(NOW + 1 - WINDOW, NOW + 1):
        for name, tokens in (("a", 1_023), ("b", 1_024)):
            found = Sketch.of(np.full(100, tokens))
            seen[name].add(Step(number, 500, tokens * TOKEN, 1, found), WINDOW)
    assert adapt(whole, {"a": half, "b": half}, seen, NOW, hysteresis=Fraction(0)) == {"a": half, "b": half}


@given(situations())
def test_shares_of_b_move_towards_what_was_seen_and_not_beyond(
    situation: tuple[TokenBucket, dict[str, TokenBucket], dict[str, History]],
) -> None:
    """Between the present share and the one that the paper's rule gives, if all brokers report and floors allow it."""
    whole, shares, histories = situation
    known = [name for name in shares if name in histories and histories[name].is_current(NOW)]
    if set(known) != shares.keys() or any(len(histories[name]) < LEAST_STEPS for name in known):
        return
    wanted = adapt(whole, shares, histories, NOW)
    least = least_b(whole.b_ntok, [histories[name].largest_batch for name in shares])
    needs = [min(histories[name].burst_ntok("0.99"), whole.b_ntok) for name in shares]
    target = apportion(whole.b_ntok, needs, [tokens * TOKEN for tokens in least])
    gained = [wanted[name].b_ntok - shares[name].b_ntok for name in shares]
    wanting = [want - shares[name].b_ntok for name, want in zip(shares, target, strict=True)]
    assert sum(abs(gain) for gain in gained) <= sum(abs(want) for want in wanting)


def test_the_window_is_a_stretch_of_time_not_a_number_of_reports() -> None:
    seen = History()
    for number, messages in ((1, 900), (2, 1), (3, 2), (4, 3)):
        seen.add(Step(number, messages, messages * TOKEN), 3)
    assert seen.mean_messages == 2
    assert seen.burst_ntok("0.99") == 3 * TOKEN  # of a broker that reports no other
    seen.add(Step(4, 77, 0), 3)  # told again
    seen.add(Step(2, 77, 0), 3)  # told late
    assert seen.mean_messages == 2
    seen.add(Step(9, 5, 0), 3)  # after a silence
    assert seen.mean_messages == 5
    anew = History(after=9)
    anew.add(Step(9, 77, 0), 3)
    assert len(anew) == 0
    anew.add(Step(10, 4, 0), 3)
    assert anew.mean_messages == 4


def test_one_outlier_does_not_decide() -> None:
    """Two brokers see backlogs of 10 tokens; one of them, a single message that found 5,000."""
    whole, half = TokenBucket.of(1_000, 100), TokenBucket.of(500, 50)
    seen = {"a": History(), "b": History()}
    for number in range(NOW - 9, NOW + 1):
        found = np.array([10] * 100 + [5_000] * (number == NOW))
        seen["a"].add(Step(number, 100, int(found.max()) * TOKEN, 1, Sketch.of(found)), WINDOW)
        seen["b"].add(Step(number, 100, 10 * TOKEN, 1, Sketch({10: 100})), WINDOW)
    assert adapt(whole, {"a": half, "b": half}, seen, NOW) == {"a": half, "b": half}


def test_backlogs_leave_the_window_with_their_seconds() -> None:
    seen = History()
    for number, tokens in enumerate((50, 40, 30, 20), 1):
        seen.add(Step(number, 10, 0, 1, Sketch({tokens: 10})), 2)
    assert seen.burst_ntok("0.99") == 30 * TOKEN
    assert seen.burst_ntok("0.5") == 20 * TOKEN


def test_a_history_that_stopped_is_a_silent_broker() -> None:
    whole, half = TokenBucket.of(1_000, 100), TokenBucket.of(500, 50)
    stale = history(*[(990, 90 * TOKEN)] * 10, newest=NOW - 5)
    wanted = adapt(whole, {"mute": half, "b": half}, {"mute": stale, "b": steady(10, TOKEN)}, NOW)
    assert wanted["mute"] == half


def test_a_share_is_not_judged_by_the_first_seconds() -> None:
    """Publishers of one broker began a second later than those of the other."""
    whole, half = TokenBucket.of(1_000, 100), TokenBucket.of(500, 50)
    began = {"a": history((400, 40 * TOKEN)), "b": history((0, 0))}
    assert adapt(whole, {"a": half, "b": half}, began, NOW) == {"a": half, "b": half}
    # Who has traffic and no share at all is not made to wait for one.
    assert adapt(whole, {"a": None}, {"a": began["a"]}, NOW) == {"a": whole}


def test_a_long_queue_takes_no_more_from_the_bursts_of_others_than_a_full_bucket() -> None:
    whole, half = TokenBucket.of(1_000, 100), TokenBucket.of(500, 50)
    seen = {"queue": steady(500, 9_000 * TOKEN), "bursts": steady(500, 25 * TOKEN)}
    wanted = adapt(whole, {"queue": half, "bursts": half}, seen, NOW)
    assert {name: share.b for name, share in wanted.items()} == {"queue": 80, "bursts": 20}


@pytest.mark.parametrize("step", [(-1, 0, 0), (0, -1, 0), (0, 0, -1), (0, 1.5, 0), (0, float("nan"), 0)])
def test_nonsense_from_a_broker_is_refused(step: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match="whole number and not negative"):
        Step(*step)


def test_shares_beyond_the_whole_are_refused() -> None:
    with pytest.raises(InputError, match="exceed the whole bucket"):
        adapt(TokenBucket.of(10, 10), {"a": TokenBucket.of(11, 5)}, {}, NOW)


def test_messages_that_wait_count_as_traffic_of_the_next_window() -> None:
    """600 wait at one of two brokers with 50 messages a second each: it gets 110 parts of 160."""
    whole = TokenBucket.of(160, 20)
    shares: dict[str, TokenBucket | None] = {"a": TokenBucket.of(80, 10), "b": TokenBucket.of(80, 10)}
    histories = {name: history(*[(50, 0)] * 10) for name in shares}
    wanted = adapt(whole, shares, histories, NOW, waiting={"a": 600})
    assert {name: share.r for name, share in wanted.items()} == {"a": 110, "b": 50}


def test_the_first_seconds_count_for_no_more_than_their_part_of_ten() -> None:
    whole = TokenBucket(2_000_000, 500 * TOKEN)
    shares = dict(zip("ab", split(whole, [1, 1]), strict=True))
    # Publishers of b connected first, so it saw all of the first burst.
    histories = {"a": steady(600, 20 * TOKEN), "b": steady(1_400, 180 * TOKEN)}
    alike = dict.fromkeys("ab", Expected(Fraction(1_000), 100 * TOKEN))
    wanted = adapt(whole, shares, histories, NOW, expected=alike)
    part = Fraction(LEAST_STEPS, EXPECTED_STEPS)
    assert Fraction(wanted["b"].r_mtps, whole.r_mtps) == (1_000 + part * 400) / 2_000
    assert Fraction(wanted["b"].b_ntok, whole.b_ntok) == (100 + part * 80) / 200
    full = {"a": history(*[(600, 20 * TOKEN)] * WINDOW), "b": history(*[(1_400, 180 * TOKEN)] * WINDOW)}
    assert adapt(whole, shares, full, NOW, expected=alike) == adapt(whole, shares, full, NOW)


def test_a_wrong_declaration_is_forgotten_after_ten_seconds_of_a_long_window() -> None:
    whole = TokenBucket(2_000_000, 500 * TOKEN)
    shares = dict(zip("ab", split(whole, [1, 1]), strict=True))
    histories = {"a": history(*[(100, TOKEN)] * EXPECTED_STEPS), "b": history(*[(1_900, 99 * TOKEN)] * EXPECTED_STEPS)}
    alike = dict.fromkeys("ab", Expected(Fraction(1_000), 100 * TOKEN))
    wanted = adapt_to(whole, shares, histories, NOW, quantile="0.99", window=3_600, expected=alike)
    assert wanted["b"].r_mtps == whole.r_mtps * 19 // 20


def test_known_bursts_count_instead_of_backlogs() -> None:
    whole = TokenBucket(400_000, 40 * TOKEN)
    shares = {"a": TokenBucket(200_000, 20 * TOKEN), "b": TokenBucket(200_000, 20 * TOKEN)}
    histories = {"a": steady(100, 19 * TOKEN), "b": steady(300, TOKEN)}
    found = adapt(whole, shares, histories, NOW, needs_ntok={"a": 10 * TOKEN, "b": 30 * TOKEN})
    assert found == {"a": TokenBucket(100_000, 10 * TOKEN), "b": TokenBucket(300_000, 30 * TOKEN)}
