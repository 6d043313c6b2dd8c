from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srtm.errors import TraceError
from srtm.model import correlation as model
from srtm.model.correlation import Options, find_groups
from srtm.model.onsets import onsets_of
from srtm.pipeline.groups import TopicGroups, document, groups
from srtm.pipeline.traces import reading, stretches
from srtm.pipeline.traces.topics import unnamed
from srtm.units import NS_PER_MS, NS_PER_S
from srtm.workload import trace
from srtm.workload.groups import read_groups, write_groups
from srtm.workload.publishers import Arrivals, Population, Workload
from srtm.workload.trace import ARRIVAL_SCHEMA, ArrivalWriter, load, writing
from tests.pipeline.local import LocalSpark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DECLARED = "topic string, publisher string, group string, arrival_ns long"
WORKLOADS = {
    "clock": Workload((Population(60, 10.0, 10, "periodic", 6, 2 * NS_PER_MS),), 40 * NS_PER_S, seed=2),
    "chance": Workload(
        (Population(80, 10.0, 10, "poisson", 8, 4 * NS_PER_MS), Population(40, 10.0, 10, "poisson", prefix="alone")),
        40 * NS_PER_S,
        seed=3,
        start_ns=1_800_000_000 * NS_PER_S,
    ),
}


def expected(arrivals: Arrivals, names: list[str]) -> tuple[model.Group, ...]:
    return tuple(find_groups(onsets_of(arrivals.times_ns, arrivals.publisher_of, names, Options().silence_ns)))


def write(path: Path, topic: str, workload: Workload) -> None:
    with writing(path, ARRIVAL_SCHEMA, {}) as writer:
        rows = ArrivalWriter(writer, topic, workload.publishers())
        for window in workload.windows():
            for part in np.array_split(np.arange(len(window.times_ns)), 7):
                rows.write(Arrivals(window.times_ns[part], window.publisher_of[part]))
        rows.flush()


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two topics with the same publishers' names, in row groups and stretches so small that bursts are cut."""
    monkeypatch.setattr(trace, "_ROW_GROUP", 2_000)
    monkeypatch.setattr(stretches, "_SMALL", 0)
    for name, workload in WORKLOADS.items():
        write(tmp_path / f"{name}.parquet", name, workload)
    return tmp_path


def test_files_and_frames_in_any_order_equal_the_model(
    spark: SparkSession, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = groups(files, spark)
    assert [line.topic for line in lines] == ["chance", "clock"]
    for line in lines:
        workload = WORKLOADS[line.topic]
        names = [publisher.id for publisher in workload.publishers()]
        arrivals = workload.arrivals()
        assert (line.messages, line.publishers) == (len(arrivals.times_ns), len(names))
        assert line.groups == expected(arrivals, names)
        assert line.drift is not None
        assert line.drift.agreement >= 0.98
    assert len(lines[0].groups) == len(lines[1].groups) == 10
    shuffled = spark.read.parquet(str(files)).orderBy("publisher", "group").repartition(5)
    assert groups(shuffled) == lines
    monkeypatch.setattr(reading, "on_one_machine", lambda _: False)
    assert groups(shuffled) == lines


def test_options_reach_the_model(spark: SparkSession, files: Path) -> None:
    options = Options(tolerance_ns=NS_PER_MS // 10)
    (line,) = groups(files / "chance.parquet", spark, options=options)
    arrivals = WORKLOADS["chance"].arrivals()
    names = [publisher.id for publisher in WORKLOADS["chance"].publishers()]
    onsets = onsets_of(arrivals.times_ns, arrivals.publisher_of, names, options.silence_ns)
    assert line.groups == tuple(find_groups(onsets, options))
    assert line.groups != groups(files / "chance.parquet", spark)[0].groups


def test_what_is_found_is_written_and_read_for_placement(spark: SparkSession, files: Path, tmp_path: Path) -> None:
    lines = groups(files, spark)
    write_groups(tmp_path / "g.json", document(lines))
    for line in lines:
        known = {name: group.name for group in line.groups for name in group.publishers}
        assert read_groups(tmp_path / "g.json", line.topic) == known


def burst_rows(topic: str, names: list[str], events: list[int], group: str | None = None) -> list[tuple[Any, ...]]:
    return [(topic, name, group, at) for name in names for at in events]


def test_a_bad_topic_does_not_take_the_others_with_it(spark: SparkSession) -> None:
    rng = np.random.default_rng(1)
    events = np.cumsum(rng.exponential(1.0, 40) * NS_PER_S).astype(int).tolist()
    rows = burst_rows("good", ["a", "b"], events)
    rows += [("untimed", "p", None, None), ("untimed", "p", None, 5), (None, "p", None, 3), ("unsent", None, None, 3)]
    rows += [("absurd", "p", None, 2**63 - 1)]
    lines = groups(spark.createDataFrame(rows, DECLARED))
    assert {line.topic: line.error for line in lines if line.topic != "absurd"} == {
        "": unnamed(1),
        "untimed": "1 of 2 messages have no arrival_ns",
        "unsent": "1 of 1 messages have no publisher",
        "good": None,
    }
    assert "check the unit" in next(str(line.error) for line in lines if line.topic == "absurd")
    (good,) = (line for line in lines if line.topic == "good")
    assert [group.publishers for group in good.groups] == [("a", "b")]
    assert good.drift is None


def test_drift_against_declared_groups_the_last_of_each_publisher(spark: SparkSession) -> None:
    rng = np.random.default_rng(2)
    one, other = (np.cumsum(rng.exponential(1.0, 60) * NS_PER_S).astype(int).tolist() for _ in range(2))
    rows = burst_rows("t", ["a1", "a2", "a3"], one, "north") + burst_rows("t", ["b1", "b2", "b3"], other, "south")
    rows += burst_rows("t", ["m"], other, "north") + burst_rows("t", ["n"], one)
    rows += [("t", "a1", "south", one[0]), ("t", "a2", None, one[-1])]  # earlier, and at the same time as another
    (line,) = groups(spark.createDataFrame(rows, DECLARED).repartition(3))
    assert [group.publishers for group in line.groups] == [("a1", "a2", "a3", "n"), ("b1", "b2", "b3", "m")]
    assert line.drift is not None
    assert line.drift.split == (("north", (("g-a1", 3), ("g-b1", 1))),)
    assert line.drift.merged == (("g-a1", (("north", 3), (None, 1))), ("g-b1", (("south", 3), ("north", 1))))
    assert line.drift.moved == (("m", "north", "g-b1"), ("n", None, "g-a1"))
    told = document([line])["drift"][0]
    assert told["moved"][0] == {"publisher": "m", "declared": "north", "found": "g-b1"}
    assert told["split"][0]["parts"][1] == {"group": "g-b1", "publishers": 1}


def test_traces_of_almost_nothing(spark: SparkSession, tmp_path: Path) -> None:
    plain = "topic string, publisher string, arrival_ns long"
    assert groups(spark.createDataFrame([("t", "p", 7)], plain)) == [TopicGroups("t", 1, 1)]
    same = spark.createDataFrame([("t", f"p{number}", 7) for number in range(50)], plain)
    assert groups(same) == [TopicGroups("t", 50, 50)]
    with pytest.raises(TraceError, match="holds no messages"):
        groups(spark.createDataFrame([], plain))
    with pytest.raises(TraceError, match="'publisher' must be string, but is missing"):
        groups(spark.createDataFrame([("t", 1)], "topic string, arrival_ns long"))
    with pytest.raises(TraceError, match="no trace at"):
        groups(tmp_path / "nowhere", spark)
    write(tmp_path / "t.parquet", "t", WORKLOADS["clock"])
    with pytest.raises(TraceError, match="needs a Spark session"):
        groups(tmp_path)


@st.composite
def parted(draw: st.DrawFn) -> tuple[list[tuple[str, str, int]], list[int], int]:
    """Messages of two topics that share publishers' names, who writes each of them, and how many tasks run at once."""
    rng = np.random.default_rng(draw(st.integers(0, 1_000)))
    rows = []
    for topic in ("t", "u"):
        for group in range(3):
            events = np.cumsum(rng.exponential(0.5, 25) * NS_PER_S).astype(int)
            for member in range(3):
                kept = events[rng.random(len(events)) < 0.9]
                rows += [(topic, f"p{group}{member}", int(at) + 3 * copy) for at in kept for copy in range(2)]
    writers = draw(st.integers(1, 3))
    return rows, rng.integers(0, writers, len(rows)).tolist(), draw(st.sampled_from([1, 2, 5]))


@settings(max_examples=25)
@given(parted())
def test_any_files_any_number_of_tasks_equal_the_model(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[list[tuple[str, str, int]], list[int], int]
) -> None:
    """Spark's part in one process: brokers' files that overlap in time, cut into stretches, give the model's groups."""
    rows, writers, at_once = case
    folder = tmp_path_factory.mktemp("trace")
    for writer in sorted(set(writers)):
        mine = sorted((row for row, by in zip(rows, writers, strict=True) if by == writer), key=lambda row: row[2])
        columns = dict(zip(("topic", "publisher", "arrival_ns"), map(list, zip(*mine, strict=True)), strict=True))
        pq.write_table(pa.table(columns), folder / f"{writer}.parquet", row_group_size=37)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stretches, "_SMALL", 0)
        lines = groups(folder, cast("SparkSession", LocalSpark(at_once)))
    for line in lines:
        mine = sorted((row for row in rows if row[0] == line.topic), key=lambda row: row[2])
        names = sorted({row[1] for row in mine})
        arrivals = Arrivals(
            np.array([row[2] for row in mine]), np.array([names.index(row[1]) for row in mine], np.int32)
        )
        assert line.groups == expected(arrivals, names)
        assert line.messages == len(mine)


def test_the_same_groups_from_the_trace_in_memory(spark: SparkSession, files: Path) -> None:
    known = {
        topic.topic: expected(topic.arrivals, [publisher.id for publisher in topic.publishers]) for topic in load(files)
    }
    assert {line.topic: line.groups for line in groups(files, spark)} == known
