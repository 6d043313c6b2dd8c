from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import ArrivalsError, InputError
from srtm.model.burst import WINDOWS_NS, Envelope, batch_sizes, envelope


def fullest(times: list[int], window_ns: int) -> int:
    """By counting: for every message as the first of a window."""
    return max(sum(first <= time < first + window_ns for time in times) for first in times)


gaps = st.lists(st.sampled_from([0, 0, 1, 2, 3, 10, 10**3, 10**6, 10**9, 10**10, 10**15]), min_size=1, max_size=60)
windows = st.lists(st.sampled_from([1, 2, 3, 4, 11, 1_001, 10**6, 2 * 10**9]), min_size=1, unique=True).map(sorted)


@given(gaps, windows)
def test_envelope_is_what_counting_says(steps: list[int], lengths: list[int]) -> None:
    times = np.cumsum(steps)
    assert envelope(times, lengths).tolist() == [fullest(times.tolist(), length) for length in lengths]


@given(gaps, windows, st.sets(st.integers(0, 60)))
def test_envelope_does_not_depend_on_the_pieces(steps: list[int], lengths: list[int], cuts: set[int]) -> None:
    times = np.cumsum(steps)
    pieces = Envelope(lengths)
    for piece in np.split(times, sorted(cuts)):
        pieces.add(piece)
    assert pieces.most.tolist() == envelope(times, lengths).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_envelope_of_many_messages(seed: int) -> None:
    """Long enough for blocks to be skipped, with bursts of very different sizes."""
    rng = np.random.default_rng(seed)
    bursts = np.repeat(rng.integers(0, 20 * 10**9, 300), rng.integers(1, 400, 300))
    times = np.sort(bursts + rng.integers(0, 10**6, len(bursts)))
    most = envelope(times)
    for length, found in zip(WINDOWS_NS, most.tolist(), strict=True):
        assert found == (np.searchsorted(times, times + length) - np.arange(len(times))).max()
    assert (np.diff(most) >= 0).all()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=60))
def test_batches_are_messages_of_a_sender_at_an_instant(rows: list[tuple[int, int]]) -> None:
    rows.sort(key=lambda row: row[0])
    times, senders = np.array(rows).T
    sizes = Counter(Counter(rows).values())
    assert {n: c for n, c in enumerate(batch_sizes(times, senders.astype(np.int32)).tolist()) if c} == sizes


def test_bad_input_is_named() -> None:
    with pytest.raises(InputError, match="must be positive and rise"):
        Envelope([5, 5])
    with pytest.raises(ArrivalsError, match="not sorted"):
        envelope([2, 1])
    pieces = Envelope([5])
    pieces.add(np.array([7]))
    with pytest.raises(InputError, match="arrivals at 6 ns come after those at 7 ns"):
        pieces.add(np.array([6]))
    with pytest.raises(InputError, match="2 arrivals but 1 senders"):
        batch_sizes(np.array([1, 2]), np.array([0], np.int32))
