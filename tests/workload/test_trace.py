from __future__ import annotations

import os
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from srtm.errors import TraceError
from srtm.model.placement import Publisher
from srtm.units import NS_PER_MS, NS_PER_S
from srtm.workload import trace
from srtm.workload.publishers import Arrivals, Population, Workload
from srtm.workload.trace import (
    ARRIVAL_SCHEMA,
    RECORDED_SCHEMA,
    ArrivalWriter,
    batches,
    encoded,
    load,
    writing,
)
from srtm.workload.uris import files_of

WORKLOAD = Workload(
    (Population(100, 10.0, 5, "poisson", 10, 4 * NS_PER_MS), Population(20, prefix="q")), 20 * NS_PER_S, seed=2
)


def write(path: Path, workload: Workload = WORKLOAD, topic: str = "traffic") -> None:
    with writing(path, ARRIVAL_SCHEMA, {"about": "a test"}) as writer:
        rows = ArrivalWriter(writer, topic, workload.publishers())
        for window in workload.windows():
            rows.write(window)
        rows.flush()


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write(tmp_path / "t.parquet")
    (topic,) = load(tmp_path / "t.parquet")
    arrivals, publishers = WORKLOAD.arrivals(), WORKLOAD.publishers()
    assert topic.topic == "traffic"
    assert (topic.arrivals.times_ns == arrivals.times_ns).all()
    names = [topic.publishers[number].id for number in topic.arrivals.publisher_of]
    assert names == [publishers[number].id for number in arrivals.publisher_of]
    assert {p.id: p.group for p in topic.publishers} == {p.id: p.group for p in publishers}
    sent = Counter(names)
    span = (arrivals.times_ns[-1] - arrivals.times_ns[0]) / NS_PER_S
    assert all(p.rate_mps == pytest.approx(sent[p.id] / span) for p in topic.publishers)


def test_the_file_keeps_the_contract(tmp_path: Path) -> None:
    write(tmp_path / "t.parquet")
    with pq.ParquetFile(tmp_path / "t.parquet") as file:
        assert file.schema_arrow.names == ["topic", "publisher", "group", "arrival_ns"]
        assert [str(field.type) for field in file.schema_arrow] == ["string", "string", "string", "int64"]
        column = file.metadata.row_group(0).column(3)
        assert "DELTA_BINARY_PACKED" in column.encodings
        assert column.compression == "ZSTD"
        assert column.statistics.min <= column.statistics.max
        assert file.metadata.row_group(0).sorting_columns == (pq.SortingColumn(3),)
        assert file.metadata.metadata[b"about"] == b"a test"


def test_row_groups_follow_one_another_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_ROW_GROUP", 5_000)
    workload = Workload((Population(1_000, 100.0),), 5 * NS_PER_S, seed=3)
    write(tmp_path / "t.parquet", workload)
    with pq.ParquetFile(tmp_path / "t.parquet") as file:
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    assert len(groups) > 2
    times = [group.column(3).statistics for group in groups]
    assert all(before.max <= after.min for before, after in pairwise(times))
    assert sum(group.num_rows for group in groups) == len(workload.arrivals().times_ns)


def test_the_schema_of_recorded_runs_is_fixed() -> None:
    assert RECORDED_SCHEMA.names == ["topic", "publisher", "group", "arrival_ns", "broker", "release_ns", "sent_ns"]
    assert RECORDED_SCHEMA.field("sent_ns").nullable
    assert not RECORDED_SCHEMA.field("release_ns").nullable


def test_a_reader_sorts_and_parts_the_topics(tmp_path: Path) -> None:
    for part, (topic, times) in enumerate([("b", [5, 3, 9]), ("a", [2, 1]), ("b", [4])]):
        with writing(tmp_path / f"{part}.parquet", ARRIVAL_SCHEMA, {}) as writer:
            rows = ArrivalWriter(writer, topic, [Publisher("p", 1.0), Publisher("q", 1.0, "g")])
            rows.write(Arrivals(np.array(times), np.arange(len(times), dtype=np.int32) % 2))
            rows.flush()
    first, second = load(tmp_path)
    assert (first.topic, first.arrivals.times_ns.tolist()) == ("a", [1, 2])
    assert (second.topic, second.arrivals.times_ns.tolist()) == ("b", [3, 4, 5, 9])
    assert [second.publishers[number].id for number in second.arrivals.publisher_of] == ["q", "p", "p", "p"]
    assert {publisher.id: publisher.group for publisher in second.publishers} == {"p": None, "q": "g"}


def test_only_the_columns_that_are_needed_are_read(tmp_path: Path) -> None:
    write(tmp_path / "t.parquet")
    read = list(batches(tmp_path / "t.parquet", ["arrival_ns"]))
    assert read[0].schema.names == ["arrival_ns"]
    assert sum(len(batch) for batch in read) == len(WORKLOAD.arrivals().times_ns)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "t.parquet"
    with pytest.raises(RuntimeError, match="half-way"), writing(target, ARRIVAL_SCHEMA, {}):
        raise RuntimeError("half-way")
    assert list(tmp_path.iterdir()) == []
    target.write_text("precious")
    with pytest.raises(RuntimeError), writing(target, ARRIVAL_SCHEMA, {}):
        raise RuntimeError
    assert target.read_text() == "precious"


def bad_file(path: Path, **columns: pa.Array) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_unreadable_traces_name_file_column_and_remedy(tmp_path: Path) -> None:
    good = tmp_path / "good.parquet"
    write(good)
    with pytest.raises(TraceError, match=r"no trace at .*nowhere"):
        load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match=r"holds no \.parquet file"):
        files_of(tmp_path / "empty")
    truncated = tmp_path / "cut.parquet"
    truncated.write_bytes(good.read_bytes()[:-100])
    with pytest.raises(TraceError, match=r"cut\.parquet is not a readable Parquet file"):
        load(truncated)
    short = bad_file(tmp_path / "short.parquet", topic=pa.array(["t"]), arrival_ns=pa.array([1.5]))
    with pytest.raises(
        TraceError,
        match=r"'publisher' \(string\) is missing.*'arrival_ns' is double, not int64; its columns are topic, arr",
    ):
        load(short)
    holes = bad_file(
        tmp_path / "holes.parquet",
        topic=pa.array(["t", "t"]),
        publisher=pa.array(["p", None]),
        group=pa.array([None, None], pa.string()),
        arrival_ns=pa.array([1, 2]),
    )
    with pytest.raises(TraceError, match="1 of 2 rows have no publisher"):
        load(holes)
    empty = tmp_path / "empty.parquet"
    with writing(empty, ARRIVAL_SCHEMA, {}) as writer:
        writer.write_table(encoded(ARRIVAL_SCHEMA).empty_table())
    with pytest.raises(TraceError, match="holds no messages"):
        load(empty)


def test_where_nothing_may_be_written_it_says_so(tmp_path: Path) -> None:
    with (
        pytest.raises(TraceError, match=r"cannot write .*No such file"),
        writing(tmp_path / "no" / "t.parquet", ARRIVAL_SCHEMA, {}),
    ):
        pass


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk without space")
def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    full = tmp_path / "full.parquet"
    (tmp_path / f"full.parquet.{os.getpid()}.partial").symlink_to("/dev/full")
    with pytest.raises(TraceError, match=r"full\.parquet.*No space left"):
        write(full)
    assert not full.exists()


def test_a_column_may_be_a_dictionary_or_the_name_of_a_folder(tmp_path: Path) -> None:
    names = pa.array(["p", "q"]).dictionary_encode()
    for number, topic in enumerate(["topic=a%2Fb", "topic=c"]):
        folder = tmp_path / topic / f"group=g{number}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"publisher": names, "arrival_ns": [1, 2]}), folder / "t.parquet")
    first, second = load(tmp_path)
    assert (first.topic, second.topic) == ("a/b", "c")
    assert [(publisher.id, publisher.group) for publisher in second.publishers] == [("p", "g1"), ("q", "g1")]
    numbers = pa.array([1, 2]).dictionary_encode()
    pq.write_table(pa.table({"publisher": numbers, "arrival_ns": [1, 2]}), tmp_path / "topic=c" / "t.parquet")
    with pytest.raises(TraceError, match="column 'publisher' is int64, not string"):
        load(tmp_path)
