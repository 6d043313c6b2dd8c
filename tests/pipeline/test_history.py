"""A store of profiles: any hours, added in any order and any number of times, give what all messages give at once."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srtm.errors import InputError, TraceError
from srtm.model import burst
from srtm.model.hours import GRID, HOUR_NS, NEAR
from srtm.pipeline.history import GroupDrift, Period, add, fold, group_drift
from srtm.pipeline.stored import Store
from srtm.units import NS_PER_S
from srtm.workload.publishers import Population, Workload
from tests.pipeline.local import LocalSpark
from tests.pipeline.traces.test_scanning import Message, table_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL = cast("SparkSession", LocalSpark(3))
GAPS_NS = [0, 0, 1, 10**6, 10**9, 60 * 10**9, 1_000 * 10**9, 5_000 * 10**9]


@st.composite
def messages(draw: st.DrawFn) -> list[Message]:
    """Messages of two topics over some hours, calm and in bursts."""
    rows, at = [], draw(st.integers(-(10**13), 10**15))
    for _ in range(draw(st.integers(1, 30))):
        at += draw(st.sampled_from(GAPS_NS))
        topic, publisher = draw(st.sampled_from("ab")), draw(st.sampled_from("xyz"))
        rows += [(topic, publisher, at)] * draw(st.sampled_from([1, 1, 5, 200]))
    return rows


def written(folder: Path, name: str, rows: list[Message]) -> Path:
    path = folder / f"{name}.parquet"
    pq.write_table(table_of(rows), path, row_group_size=50)
    return path


def covered_ns(line: Period, traces: list[list[Message]]) -> int:
    """How much of a period's hours these traces cover; no two of them overlap."""
    spans = [(max(rows[0][2], line.begin_ns), min(rows[-1][2], line.end_ns)) for rows in traces]
    return max(NS_PER_S, sum(max(0, end - begin) for begin, end in spans))


def check(line: Period, rows: list[Message], quantile: str, traces: list[list[Message]]) -> None:
    """A line against the model over all messages of its topic."""
    times = np.array([at for _, _, at in rows])
    at_once = Counter(Counter((publisher, at) for _, publisher, at in rows).values())
    assert (line.messages, line.publishers) == (len(rows), len({publisher for _, publisher, _ in rows}))
    assert line.batches == dict(at_once)
    assert (line.begin_ns, line.end_ns) == (times[0] // HOUR_NS * HOUR_NS, (times[-1] // HOUR_NS + 1) * HOUR_NS)
    assert line.observed_ns == covered_ns(line, traces)
    assert line.rate_mps == pytest.approx(len(rows) * NS_PER_S / line.observed_ns)
    needed = max(1, burst.needed_b(times, line.bucket.r_mtps, quantile))
    assert line.b_at_least <= needed <= line.bucket.b
    whole = burst.envelope(times)
    for (_, most), exact in zip(line.envelope.items(), whole.tolist(), strict=True):
        assert most <= exact <= 2 * most  # a window across two hours is in parts of both


@settings(max_examples=min(100, settings().max_examples))
@given(messages(), st.randoms(use_true_random=False), st.sampled_from(["0.5", "0.99", "0.995", "1"]))
def test_hours_in_any_order_give_what_the_model_gives_for_all(
    rows: list[Message], order: object, quantile: str
) -> None:
    by_hour: dict[int, list[Message]] = {}
    for row in rows:
        by_hour.setdefault(row[2] // HOUR_NS, []).append(row)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = Store(folder / "whole")
        assert add(whole, written(folder, "all", rows), LOCAL) == ([hour * HOUR_NS for hour in sorted(by_hour)], {})
        lines = fold(whole, quantile=quantile)
        for line in lines:
            check(line, [row for row in rows if row[0] == line.topic], quantile, [rows])
        parts, mixed, hours = Store(folder / "parts"), Store(folder / "mixed"), [*by_hour, *by_hour]
        for number, hour in enumerate(by_hour):
            add(parts, written(folder, f"part-{number}", by_hour[hour]), LOCAL)
        order.shuffle(hours)  # type: ignore[attr-defined]
        for number, hour in enumerate(hours):
            add(mixed, written(folder, f"part-{number}", by_hour[hour]), LOCAL)
        lines, traces = fold(parts, quantile=quantile), list(by_hour.values())
        assert fold(mixed, quantile=quantile) == lines
        for line in lines:
            check(line, [row for row in rows if row[0] == line.topic], quantile, traces)
        single = fold(parts, every_ns=HOUR_NS, quantile=quantile)
        assert sum(line.messages for line in single) == len(rows)
        for line in single:
            mine = [row for row in by_hour[line.begin_ns // HOUR_NS] if row[0] == line.topic]
            check(line, mine, quantile, traces)
        add(parts, folder / "all.parquet", LOCAL)  # covers the time between hours, too
        assert fold(parts, quantile=quantile) == fold(whole, quantile=quantile)
        add(whole, written(folder, "one", by_hour[hours[0]]), LOCAL)  # and that stays so
        assert fold(parts, quantile=quantile) == fold(whole, quantile=quantile)


def test_a_rate_is_over_the_time_that_was_observed(tmp_path: Path) -> None:
    """Twenty seconds of every hour, of a topic that sends a thousand messages a second and one that sends two."""
    store = Store(tmp_path / "store")
    for hour in (2, 0, 1, 1):
        begin = hour * HOUR_NS + 600 * NS_PER_S
        rows: list[Message] = [("busy", f"p{number % 9}", begin + number * 10**6) for number in range(20_001)]
        rows += [("calm", "p", begin + 5 * NS_PER_S), ("calm", "p", begin + 15 * NS_PER_S)]
        add(store, written(tmp_path, f"{hour}", sorted(rows, key=lambda row: row[2])), LOCAL)
    for every_ns, hours in ((None, 3), (HOUR_NS, 1)):
        for line in fold(store, every_ns=every_ns):
            sent = 20_001 if line.topic == "busy" else 2
            assert (line.messages, line.observed_ns) == (sent * hours, 20 * hours * NS_PER_S)
            assert line.rate_mps == pytest.approx(sent / 20)
            assert line.rate_mps * 1.1 <= line.bucket.r <= line.rate_mps * 1.1 * 1.19
            assert line.b_at_least == line.bucket.b


def test_a_busy_topic_of_hours_that_follow_each_other_is_known_well(tmp_path: Path) -> None:
    """A state before an hour reaches few of its messages, so both bounds of b are close together."""
    workload = Workload((Population(20, 1.0, 1, "poisson", 2),), 3 * HOUR_NS, seed=3)
    arrivals, names = workload.arrivals(), [publisher.id for publisher in workload.publishers()]
    rows = [
        ("t", names[sender], at)
        for sender, at in zip(arrivals.publisher_of.tolist(), arrivals.times_ns.tolist(), strict=True)
    ]
    store = Store(tmp_path / "store")
    add(store, written(tmp_path, "t", rows), LOCAL)
    (line,) = fold(store)
    check(line, rows, "0.995", [rows])
    assert line.b_at_least >= line.bucket.b * 0.9
    assert line.bucket.r_mtps in GRID
    assert line.rate_mps * 1.1 <= line.bucket.r <= line.rate_mps * 1.1 * 1.19
    spread = [each.bucket.r_mtps for each in fold(store, every_ns=HOUR_NS)]
    assert len(spread) == 3
    assert max(spread) < NEAR * min(spread)


def test_what_overlaps_in_part_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    rows: list[Message] = [("t", "p", second * NS_PER_S) for second in range(100)]
    first = written(tmp_path, "first", rows[:60])
    add(store, first, LOCAL)
    before = fold(store)
    with pytest.raises(InputError, match=r"'t' from 0 s to 59 s .* some from 50 s to 80 s .* from all brokers"):
        add(store, written(tmp_path, "middle", rows[50:81]), LOCAL)
    with pytest.raises(InputError, match="all messages of these hours"):
        add(store, written(tmp_path, "few", rows[:60:2] + rows[59:60]), LOCAL)
    assert fold(store) == before
    add(store, written(tmp_path, "rest", rows[60:]), LOCAL)  # the other half of the hour stands beside the first
    (line,) = fold(store)
    check(line, rows, "0.995", [rows[:60], rows[60:]])
    add(store, written(tmp_path, "whole", rows), LOCAL)  # and all of it replaces both
    assert [line.messages for line in fold(store)] == [100]
    assert len(store.read(0)) == 1


def test_a_store_says_what_it_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no hour of this time"):
        fold(Store(tmp_path / "nothing"))
    with pytest.raises(InputError, match="whole hours"):
        fold(Store(tmp_path), every_ns=HOUR_NS // 2)
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match="cannot write to the store"):
        add(Store(tmp_path / "file"), written(tmp_path, "t", [("t", "p", 1)]), LOCAL)


def test_spark_gives_what_tasks_give_without_it(spark: SparkSession, tmp_path: Path) -> None:
    rows: list[Message] = [(f"t{number % 3}", f"p{number % 7}", number * 7 * NS_PER_S) for number in range(3_000)]
    path = written(tmp_path, "t", rows)
    one, other = Store(tmp_path / "one"), Store(tmp_path / "other")
    assert add(one, path, spark) == add(other, path, LOCAL)
    assert fold(one) == fold(other)


def test_groups_of_hours_are_kept_and_their_drift_is_told(spark: SparkSession, tmp_path: Path) -> None:
    """Two groups of ten that send together; in the second hour, publishers have changed places."""
    rng, rows = np.random.default_rng(4), []
    for hour, shift in ((0, 0), (1, 0), (2, 5)):
        for at in np.sort(rng.integers(hour * HOUR_NS, (hour + 1) * HOUR_NS, 300)).tolist():
            group = int(rng.integers(2))
            rows += [("t", f"p{(10 * group + number + shift) % 20:02}", at + number * 1_000) for number in range(10)]
    rows = [row for row in rows if row[2] < 3 * HOUR_NS]
    store, path = Store(tmp_path / "store"), written(tmp_path, "t", sorted(rows, key=lambda row: row[2]))
    assert add(store, path, spark, with_groups=True) == ([0, HOUR_NS, 2 * HOUR_NS], {})
    lines = fold(store, every_ns=HOUR_NS)
    first, same, other = group_drift(store, lines)
    assert first == GroupDrift(2, None, 0)
    assert same == GroupDrift(2, 1.0, 0)
    assert other is not None
    assert (other.groups, other.moved) == (2, 10)
    assert other.agreement is not None
    assert other.agreement < 0.1
    (whole,) = group_drift(store, fold(store))
    assert whole == GroupDrift(2, None, 0)
    (without,) = group_drift(Store(tmp_path / "store"), fold(store, begin_ns=0, end_ns=1))
    assert without == first
