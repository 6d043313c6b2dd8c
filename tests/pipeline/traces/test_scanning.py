"""Tasks and driver without Spark: any cut of any topics into files and stretches gives the numbers of the model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from srtm.model import burst
from srtm.model import profile as model
from srtm.model.defaults import HEADROOM, QUANTILE
from srtm.pipeline import profile as job
from srtm.pipeline.profile import TopicProfile, profile, profile_source
from srtm.pipeline.traces import files as reading_files
from srtm.pipeline.traces import frames, stretches, tasks
from srtm.pipeline.traces.frames import Frame
from srtm.pipeline.traces.stretches import Span
from srtm.pipeline.traces.topics import Topics
from tests.pipeline.local import LocalSpark, Rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Message = tuple[str, str, int]  # topic, publisher, arrival

TOPICS = ["t", "a/b", "50% ü=_"]
GAPS_NS = [0, 0, 0, 1, 999, 10**6, 10**8, 10**9, 11 * 10**9, 3 * 86_400 * 10**9]


@st.composite
def messages(draw: st.DrawFn) -> list[Message]:
    """Messages of a few topics in order of time: equal times, bursts, gaps of days."""
    rows, at = [], draw(st.integers(-(10**12), 10**12))
    topics = draw(st.integers(1, len(TOPICS)))
    for _ in range(draw(st.integers(1, 40))):
        at += draw(st.sampled_from(GAPS_NS))
        topic, publisher = draw(st.integers(0, topics - 1)), draw(st.integers(0, 3))
        rows += [(TOPICS[topic], f"p{publisher}", at)] * draw(st.sampled_from([1, 1, 2, 7]))
    return rows


def expected(rows: list[Message]) -> list[TopicProfile]:
    """The model, topic by topic, over the whole."""
    lines = []
    for topic in sorted({topic for topic, _, _ in rows}):
        mine = sorted((at, publisher) for name, publisher, at in rows if name == topic)
        names = sorted({publisher for _, publisher in mine})
        times = np.array([at for at, _ in mine])
        known = model.profile(times)
        sizes = burst.batch_sizes(times, np.array([names.index(publisher) for _, publisher in mine], np.int32))
        lines.append(
            TopicProfile(
                topic,
                len(mine),
                len(names),
                float(known.rate_mps),
                known.bucket,
                int(times[0]),
                int(times[-1]),
                dict(zip(burst.WINDOWS_NS, burst.envelope(times).tolist(), strict=True)),
                {size: int(sizes[size]) for size in np.flatnonzero(sizes).tolist()},
            )
        )
    return lines


def table_of(rows: list[Message]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else ((), (), ())
    kinds = (pa.string(), pa.string(), pa.int64())
    arrays = [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
    return pa.table(arrays, names=["topic", "publisher", "arrival_ns"])


def _otherwise(field: pa.Field, strings: pa.DataType) -> pa.Field:
    return pa.field(field.name, strings if field.type == pa.string() else field.type, nullable=False)


def _write(folder: Path, number: int, table: pa.Table, row_group_size: int, *, partitioned: bool) -> None:
    """A file, or one of each topic, whose folder has the topic's name as Hive and Spark write it."""
    if not partitioned:
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=row_group_size)
        return
    topics = table["topic"].cast(pa.string())
    for topic in topics.unique().to_pylist():
        rows = table.filter(pc.equal(topics, topic)).drop_columns("topic")
        (place := folder / f"topic={quote(topic, safe='')}").mkdir(exist_ok=True)
        pq.write_table(rows, place / f"{number}.parquet", row_group_size=row_group_size)


@settings(max_examples=min(100, settings().max_examples))
@given(messages(), st.data())
def test_any_files_give_the_profile_of_the_whole(rows: list[Message], data: st.DataObject) -> None:
    """Messages dealt to files at random or by time, row groups of any size, sorted or not, batches of any size.

    Topics are a column or the names of folders.
    """
    files: list[list[Message]] = [[] for _ in range(data.draw(st.integers(1, 4)))]
    by_time = data.draw(st.booleans())
    for number, row in enumerate(rows):
        place = number * len(files) // len(rows) if by_time else data.draw(st.integers(0, len(files) - 1))
        files[place].append(row)
    with tempfile.TemporaryDirectory() as folder:
        for number, its_rows in enumerate(files):
            if data.draw(st.booleans()):
                its_rows = data.draw(st.permutations(its_rows))
            size = data.draw(st.integers(1, 20))
            table = table_of(its_rows)
            if data.draw(st.booleans()):  # another writer, with other habits
                strings = data.draw(st.sampled_from([pa.large_string(), pa.dictionary(pa.int8(), pa.string())]))
                table = table.cast(pa.schema([_otherwise(field, strings) for field in table.schema]))
            _write(Path(folder), number, table, size, partitioned=data.draw(st.booleans()))
        spark = cast("SparkSession", LocalSpark(data.draw(st.integers(1, 5))))
        with (
            patch.multiple(stretches, _SMALL=data.draw(st.sampled_from([0, 10**6])), _REREAD=1000),
            patch.object(reading_files, "_BATCH", data.draw(st.integers(1, 50))),
            patch.multiple(job, _KEPT=data.draw(st.integers(0, 40))),
            patch.object(tasks, "_SMALL", data.draw(st.sampled_from([0, 2**17]))),
        ):
            assert profile(folder, spark) == expected(rows)


@settings(max_examples=min(100, settings().max_examples))
@given(messages(), st.data())
def test_any_sorted_stretches_give_the_profile_of_the_whole(rows: list[Message], data: st.DataObject) -> None:
    """Rows sorted by topic and time, as Spark sorts them, cut into partitions and batches anywhere."""
    rows = sorted(rows, key=lambda row: (row[0], row[2]))
    keys = [(topic, at) for topic, _, at in rows]
    # Spark never separates equal rows.
    places = [i for i in range(1, len(rows)) if keys[i] != keys[i - 1]]
    cuts = sorted(data.draw(st.sets(st.sampled_from(places), max_size=5))) if places else []
    partitions = []
    for begin, end in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        size = data.draw(st.integers(1, 20))
        partitions.append(table_of(rows[begin:end]).to_batches(max_chunksize=size))
    spans: dict[str, Span] = {}
    for topic, _, at in rows:
        spans[topic] = spans[topic].joined(Span(1, at, at)) if topic in spans else Span(1, at, at)
    with (
        patch.object(frames, "_BATCH", data.draw(st.integers(1, 50))),
        patch.multiple(job, _KEPT=data.draw(st.integers(0, 40))),
    ):
        source = Frame("arrival_ns", 1, cast("Any", Rows(partitions)), len(partitions), {}, Topics.of(spans))
        assert profile_source(source, HEADROOM, QUANTILE) == expected(rows)
