"""Who may act and who may take over, by clocks that do not agree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from srtm.control.keeping.keeper import Leader
from srtm.control.keeping.lease import Claim, Held, Observed
from srtm.units import NS_PER_MS, NS_PER_S

LEASE_NS = 3 * NS_PER_S
CLAIM = Claim(Leader("a", "http://a"), "x", LEASE_NS)


def test_a_leader_stops_before_its_lease_ends() -> None:
    held = Held(LEASE_NS)
    assert not held.holds(0)
    held.written(NS_PER_S)
    assert held.holds(NS_PER_S)
    assert held.holds(3 * NS_PER_S + 900 * NS_PER_MS)
    assert not held.holds(NS_PER_S + LEASE_NS)
    held.written(0)  # an older revision changes nothing
    assert held.holds(3 * NS_PER_S + 900 * NS_PER_MS)


def test_others_wait_for_a_whole_lease_from_what_they_saw_first() -> None:
    observed = Observed(LEASE_NS)
    assert not observed.ended(10**15)  # it has not looked yet
    assert observed.leader(0) is None
    observed.see(7, CLAIM, 10 * NS_PER_S)
    observed.see(7, CLAIM, 12 * NS_PER_S)
    assert not observed.ended(13 * NS_PER_S)
    assert observed.leader(13 * NS_PER_S) == CLAIM.leader
    assert observed.ended(13 * NS_PER_S + 200 * NS_PER_MS)
    assert observed.leader(13 * NS_PER_S + 200 * NS_PER_MS) is None
    observed.see(8, CLAIM, 13 * NS_PER_S + 200 * NS_PER_MS)  # it is back
    assert not observed.ended(16 * NS_PER_S)


def test_a_store_that_nobody_led_or_that_was_released_is_free() -> None:
    observed = Observed(LEASE_NS)
    observed.see(0, None, 0)
    assert observed.ended(0)
    observed.see(1, CLAIM, 0)
    assert not observed.ended(0)
    observed.see(2, Claim(CLAIM.leader, "x", LEASE_NS, free=True), 0)
    assert observed.ended(0)


def test_the_longer_lease_counts() -> None:
    observed = Observed(NS_PER_S)
    observed.see(1, CLAIM, 0)
    assert not observed.ended(LEASE_NS)


@given(
    st.lists(st.tuples(st.integers(0, 800), st.integers(0, 400), st.integers(0, 400)), min_size=1, max_size=20),
    st.floats(0.98, 1.02),
    st.floats(0.98, 1.02),
    st.integers(-(10**15), 10**15),
    st.integers(-(10**15), 10**15),
)
def test_no_two_ever_act(
    beats: list[tuple[int, int, int]], fast: float, slow: float, offset: int, other_offset: int
) -> None:
    """Whatever the clocks show, and however late writes are stored and seen."""
    held, observed = Held(LEASE_NS), Observed(LEASE_NS)
    now = free_ns = 0

    def mine(at: int) -> int:
        return round(at * fast) + offset

    def theirs(at: int) -> int:
        return round(at * slow) + other_offset

    for revision, (pause_ms, store_ms, see_ms) in enumerate(beats, 1):
        sent = now + pause_ms * NS_PER_MS
        stored = sent + store_ms * NS_PER_MS
        now = stored
        held.written(mine(sent))
        observed.see(revision, CLAIM, theirs(stored + see_ms * NS_PER_MS))
        now = max(now, stored + see_ms * NS_PER_MS)
        free_ns = now
    step = 50 * NS_PER_MS
    for at in range(free_ns, free_ns + 2 * LEASE_NS, step):
        assert not (held.holds(mine(at)) and observed.ended(theirs(at)))
