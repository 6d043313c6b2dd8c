"""Many messages as one value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.broker.disk.batch import Record, check, cut, decode, encode
from srtm.errors import InputError

TEXT = st.text(max_size=5)
RECORDS = st.builds(
    Record,
    st.binary(min_size=16, max_size=16),
    st.integers(-(2**63), 2**63 - 1),
    TEXT,
    st.binary(max_size=30),
    st.none() | TEXT,
    st.integers(0, 2**16 - 1),
    st.just(0) | st.integers(0, 2**63 - 1),
)


@given(st.lists(RECORDS, min_size=1, max_size=20), st.integers(0, 20), st.integers(0, 20))
def test_what_was_encoded_comes_back_whole_and_in_parts(records: list[Record], begin: int, end: int) -> None:
    value = encode(records)
    assert decode(value) == records
    assert decode(value, begin, end) == records[begin:end]


@given(st.lists(RECORDS, min_size=1, max_size=20), st.integers(0, 60))
def test_pieces_are_bounded_and_complete(records: list[Record], max_bytes: int) -> None:
    pieces = [list(piece) for piece in cut(records, max_bytes)]
    assert [record for piece in pieces for record in piece] == records
    assert all(len(piece) == 1 or sum(len(record.body) for record in piece) <= max_bytes for piece in pieces)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="16 bytes, not 3"):
        check([Record(b"abc", 0, "p", b"")])
    with pytest.raises(InputError, match="does not fit"):
        encode([Record(b"i" * 16, 1 << 63, "p", b"")])
