"""Many messages as one value."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.broker.disk.batch import Piece, Record, check, cut, decode, encode, piece
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


def in_rows(pieces: list[Piece]) -> list[tuple[int, str, bytes]]:
    """Arrival, publisher and body of each message."""
    found = []
    for some in pieces:
        count, at = some.messages, 0
        arrivals = struct.unpack(f"<{count}q", some.arrivals)
        senders, lengths = (struct.unpack(f"<{count}I", column) for column in (some.senders, some.lengths))
        for arrival_ns, sender, length in zip(arrivals, senders, lengths, strict=True):
            found.append((arrival_ns, some.publishers[sender], some.bodies[at : at + length]))
            at += length
        assert at == len(some.bodies)
    return found


@given(st.lists(RECORDS, min_size=1, max_size=20), st.data())
def test_columns_of_any_part_hold_its_messages(records: list[Record], data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(records) - 1))
    end, most = data.draw(st.integers(begin + 1, 25)), data.draw(st.integers(-10, 300))
    rows = [(record.arrival_ns, record.publisher, record.body) for record in records]
    found = in_rows([piece(encode(records), begin, end, most, at_least=1)])
    assert found == rows[begin : begin + len(found)]
    assert len(found) == 1 or sum(len(body) for _, _, body in found) <= most
    rest = rows[begin + len(found) : end]
    assert not rest or sum(len(body) for _, _, body in [*found, rest[0]]) > most  # no more fit
    assert in_rows([piece(encode(records), begin, end, -1)]) == []


@given(st.lists(RECORDS, min_size=1, max_size=20), st.integers(0, 60))
def test_pieces_are_bounded_and_complete(records: list[Record], max_bytes: int) -> None:
    pieces = [list(some) for some in cut(records, max_bytes)]
    assert [record for some in pieces for record in some] == records
    assert all(len(some) == 1 or sum(len(record.body) for record in some) <= max_bytes for some in pieces)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="16 bytes, not 3"):
        check([Record(b"abc", 0, "p", b"")])
    with pytest.raises(InputError, match="does not fit"):
        encode([Record(b"i" * 16, 1 << 63, "p", b"")])
