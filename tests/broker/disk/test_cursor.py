"""What a channel has finished, against a set of all offsets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.broker.disk.cursor import Cursor
from srtm.errors import LogError


def left(cursor: Cursor, end: int) -> list[int]:
    return [offset for begin, stop in cursor.unfinished(end) for offset in range(begin, stop)]


@given(st.lists(st.integers(0, 30)), st.integers(0, 5), st.integers(0, 31))
def test_exactly_the_unfinished_is_left(finished: list[int], low: int, begin: int) -> None:
    changed: set[Cursor] = set()
    cursor = Cursor("t", "c", low, changed)
    for offset in finished:
        cursor.finish(offset)
    expected = [offset for offset in range(low, 31) if offset not in finished]
    assert left(cursor, 31) == expected
    assert cursor.low not in cursor.above
    assert not changed or changed == {cursor}
    again = Cursor("t", "c", cursor.low, set()).restore(cursor.encode())
    assert (again.low, again.above) == (cursor.low, cursor.above)
    assert cursor.skip_to(begin) == sum(offset < begin for offset in expected)
    assert left(cursor, 31) == [offset for offset in expected if offset >= begin]


def test_a_broken_value_is_refused() -> None:
    with pytest.raises(LogError, match="delete the channel"):
        Cursor("t", "c", 0, set()).restore(b"odd")
