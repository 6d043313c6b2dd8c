"""Which seconds of a broker are believed, and what the TB Adaptor makes of those of an older one."""

from __future__ import annotations

import msgspec
import pytest

from srtm.control.reports import MOST_MESSAGES, Seen, believable
from srtm.model.bucket import TokenBucket
from srtm.protocol.exchange import Second

TOKEN = 10**9
BUCKET = TokenBucket.of(1_000, 100)
OLD = b'{"number":%d,"messages":10,"max_backlog_ntok":%d,"largest_batch":1,"sent":0,"over":0,"access":[],"total":[]}'


def second(backlogs: list[int]) -> Second:
    return Second(1, 10, TOKEN, 1, 0, 0, [], [], [], backlogs)


@pytest.mark.parametrize(
    "backlogs", [[1], [1, 2, 3], [2**40, 1], [63 << 5, 1], [1, MOST_MESSAGES + 1], [-1, 1]], ids=str
)
def test_backlogs_that_no_broker_can_have_seen(backlogs: list[int]) -> None:
    assert not believable(second(backlogs), BUCKET)


def test_backlogs_as_brokers_see_them() -> None:
    assert believable(second([]), BUCKET)
    assert believable(second([1, 5, 20, 5]), BUCKET)


def test_an_older_broker_reports_the_largest_backlog_alone() -> None:
    seen = Seen()
    for number, tokens in enumerate((5, 40, 7), 1):
        told = msgspec.json.decode(OLD % (number, tokens * TOKEN), type=Second)
        assert believable(told, BUCKET)
        seen.hear(told, number, 10)
    assert seen.history.burst_ntok("0.99") == 40 * TOKEN
    seen.hear(Second(4, 100, 9 * TOKEN, 1, 0, 0, [], [], [], [8, 99, 9, 1]), 4, 10)  # the broker was upgraded
    assert seen.history.burst_ntok("0.99") == 8 * TOKEN
