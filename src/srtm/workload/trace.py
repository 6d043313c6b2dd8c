"""Trace files: Parquet, one row per message, read by every other package.

| column       | type   |                                                              |
|--------------|--------|--------------------------------------------------------------|
| `topic`      | string |                                                              |
| `publisher`  | string |                                                              |
| `group`      | string | correlation group, or null                                   |
| `arrival_ns` | int64  | kernel receive time                                          |
| `broker`     | string | recorded runs only                                           |
| `release_ns` | int64  | recorded runs only: when the bucket let the message go       |
| `sent_ns`    | int64  | recorded runs only: written to the first subscriber          |

A trace is a file or a folder of files, sorted or not. Files written here are sorted by `arrival_ns` and delta-encoded,
in row groups of about a million messages with statistics, so readers can each take a stretch of time.
A recorded file's metadata has what its broker lent and borrowed of each topic (`moved_in`), if it lent.
A file gets its name only when it is complete.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from srtm.errors import TraceError
from srtm.model.placement import Publisher
from srtm.model.profile import mean_rate
from srtm.workload.publishers import Arrivals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


ARRIVAL_SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("publisher", pa.string(), nullable=False),
        pa.field("group", pa.string()),
        pa.field("arrival_ns", pa.int64(), nullable=False),
    ]
)
RECORDED_SCHEMA = pa.schema(
    [
        *ARRIVAL_SCHEMA,
        pa.field("broker", pa.string(), nullable=False),
        pa.field("release_ns", pa.int64(), nullable=False),
        pa.field("sent_ns", pa.int64()),
    ]
)
_READ = pa.schema([field.with_nullable(True) for field in ARRIVAL_SCHEMA])  # foreign files may hold nulls
_ROW_GROUP = 1_000_000
_STRINGS = [field.name for field in RECORDED_SCHEMA if field.type == pa.string()]
_TIMES = [field.name for field in RECORDED_SCHEMA if field.type == pa.int64()]


BROKER_KEY = "srtm.recorded_by"  # of a recorded file's metadata
MOVED_KEY = "srtm.lent"


class Moved(NamedTuple):
    """Tokens that a broker lent and borrowed while it recorded, in pico-tokens."""

    lent_ptok: int
    borrowed_ptok: int


def moved_in(path: Path) -> dict[str, dict[str, Moved]]:
    """What brokers lent and borrowed during a recorded run, by topic and broker; only of topics that lent."""
    found: dict[str, dict[str, Moved]] = {}
    for file in files_of(path):
        try:
            about = pq.read_metadata(file).metadata or {}
            peers_of = json.loads(about.get(MOVED_KEY.encode(), b"{}"))
            broker = about.get(BROKER_KEY.encode(), b"").decode()
            for topic, peers in peers_of.items():
                brokers = found.setdefault(topic, {})
                before, more = brokers.get(broker, Moved(0, 0)), [Moved(*each) for each in peers.values()]
                brokers[broker] = Moved(
                    before.lent_ptok + sum(each.lent_ptok for each in more),
                    before.borrowed_ptok + sum(each.borrowed_ptok for each in more),
                )
        except (OSError, pa.ArrowInvalid, ValueError, TypeError, AttributeError) as error:
            raise TraceError(f"{file} says nothing readable about lent tokens: {error}", path=str(file)) from None
    return found


@contextmanager
def writing(path: Path, schema: pa.Schema, about: dict[str, str]) -> Iterator[pq.ParquetWriter]:
    """A Parquet writer that leaves `path` complete or absent."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with _writer(partial, schema) as writer:
            yield writer
            writer.add_key_value_metadata(about)
        partial.replace(path)
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror or error}", path=str(path)) from None
    finally:  # also covers the opening: an interrupt may come just after it
        partial.unlink(missing_ok=True)


def _writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        path,
        encoded(schema),
        compression="zstd",
        use_dictionary=[name for name in _STRINGS if name in schema.names],
        column_encoding={name: "DELTA_BINARY_PACKED" for name in _TIMES if name in schema.names},
        sorting_columns=[pq.SortingColumn(schema.get_field_index("arrival_ns"))],
        store_schema=False,
    )


def encoded(schema: pa.Schema) -> pa.Schema:
    """The schema with strings as dictionaries, as the writer takes rows. Readers see plain strings."""
    names = pa.dictionary(pa.int32(), pa.string())
    return pa.schema([field.with_type(names) if field.type == pa.string() else field for field in schema])


class ArrivalWriter:
    """Turns arrivals, in order of time, into rows of one topic; `flush` writes the rest."""

    def __init__(self, writer: pq.ParquetWriter, topic: str, publishers: Sequence[Publisher]) -> None:
        self._writer = writer
        self._schema = encoded(ARRIVAL_SCHEMA)
        self._topic = pa.array([topic])
        self._names = pa.array([publisher.id for publisher in publishers])
        groups = sorted({publisher.group for publisher in publishers if publisher.group is not None})
        number = {name: index for index, name in enumerate(groups)}
        self._groups = pa.array(groups, pa.string())
        self._held: list[Arrivals] = []
        self._group_of = np.array([number.get(publisher.group or "", -1) for publisher in publishers], np.int32)

    def write(self, arrivals: Arrivals) -> None:
        """Take arrivals, and write a row group whenever they fill one."""
        self._held.append(arrivals)
        if sum(len(held.times_ns) for held in self._held) >= _ROW_GROUP:
            self.flush()

    def flush(self) -> None:
        """Write the held rows as one row group."""
        times = np.concatenate([held.times_ns for held in self._held] or [np.empty(0, np.int64)])
        senders = np.concatenate([held.publisher_of for held in self._held] or [np.empty(0, np.int32)])
        self._held.clear()
        count = len(times)
        if not count:
            return
        groups = self._group_of[senders]
        columns = [
            pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), self._topic),
            pa.DictionaryArray.from_arrays(senders, self._names),
            pa.DictionaryArray.from_arrays(pa.array(groups, mask=groups < 0), self._groups),
            pa.array(times),
        ]
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema), row_group_size=count)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Messages of one topic at one broker, in order of arrival."""

    topic: str
    broker: str
    publishers: Sequence[Publisher]
    arrivals: Arrivals
    release_ns: NDArray[np.int64]
    sent_ns: NDArray[np.int64]

    def write(self, path: Path, about: dict[str, str]) -> None:
        """Write them as a trace file."""
        names = pa.array([publisher.id for publisher in self.publishers])
        groups = pa.array([publisher.group for publisher in self.publishers], pa.string())
        senders = pa.array(self.arrivals.publisher_of)
        everyone = pa.array(np.zeros(len(senders), np.int32))
        columns = [
            pa.DictionaryArray.from_arrays(everyone, pa.array([self.topic])),
            pa.DictionaryArray.from_arrays(senders, names),
            groups.take(senders).dictionary_encode(),
            pa.array(self.arrivals.times_ns),
            pa.DictionaryArray.from_arrays(everyone, pa.array([self.broker])),
            pa.array(self.release_ns),
            pa.array(self.sent_ns),
        ]
        with writing(path, RECORDED_SCHEMA, about) as writer:
            rows = pa.record_batch(columns, schema=encoded(RECORDED_SCHEMA))
            for begin in range(0, len(senders), _ROW_GROUP):
                writer.write_batch(rows.slice(begin, _ROW_GROUP), row_group_size=_ROW_GROUP)


@dataclass(frozen=True, slots=True)
class TopicArrivals:
    """One topic of a trace, sorted: its publishers with their measured rates, and its arrivals."""

    topic: str
    publishers: tuple[Publisher, ...]
    arrivals: Arrivals


def files_of(path: Path) -> list[Path]:
    """The Parquet files of a trace: the file itself, or those of the folder in order of name."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*.parquet") if file.is_file())
        if not files:
            raise TraceError(f"folder {path} holds no .parquet file", path=str(path))
        return files
    if not path.exists():
        raise TraceError(f"no trace at {path}: check the path", path=str(path))
    return [path]


def batches(path: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Some columns of a trace, row group by row group, in the order of the files; foreign files may hold nulls."""
    wanted = pa.schema([RECORDED_SCHEMA.field(name).with_nullable(True) for name in columns])
    for file in files_of(path):
        try:
            with pq.ParquetFile(file) as source:
                check_schema(file, source.schema_arrow, columns)
                there = [name for name in columns if name in source.schema_arrow.names]
                for group in range(source.num_row_groups):
                    rows = source.read_row_group(group, columns=there)
                    for name in set(columns) - set(there):
                        rows = rows.append_column(name, pa.nulls(rows.num_rows, wanted.field(name).type))
                    yield from rows.select(list(columns)).cast(wanted).to_batches()
        except (OSError, pa.ArrowInvalid) as error:
            raise TraceError(f"{file} is not a readable Parquet file: {error}", path=str(file)) from None


def load(path: Path, topic: str | None = None) -> list[TopicArrivals]:
    """A whole trace in memory, sorted, one entry per topic; or just the named topic, if the trace has it."""
    rows: Iterator[pa.RecordBatch] = batches(path, ARRIVAL_SCHEMA.names)
    if topic is not None:
        rows = (batch.filter(pc.equal(batch.column("topic"), topic)) for batch in rows)
    table = pa.Table.from_batches(rows, _READ)
    if not table.num_rows and (topic is None or not any(batch.num_rows for batch in batches(path, ["topic"]))):
        raise TraceError(f"{path} holds no messages", path=str(path))
    return in_topics(table, str(path))


def in_topics(table: pa.Table, source: str) -> list[TopicArrivals]:
    """The topics of a table of arrivals in any order."""
    for name in ("topic", "publisher", "arrival_ns"):
        if nulls := table[name].null_count:
            raise TraceError(f"{source}: {nulls} of {table.num_rows} rows have no {name}", path=source, column=name)
    topics = table["topic"].combine_chunks().dictionary_encode()
    codes = topics.indices.to_numpy()
    return [
        _one_topic(name, table.filter(pa.array(codes == code)))
        for code, name in sorted(enumerate(topics.dictionary.to_pylist()), key=lambda entry: entry[1])
    ]


def _one_topic(name: str, rows: pa.Table) -> TopicArrivals:
    times = rows["arrival_ns"].to_numpy()
    order = np.argsort(times, kind="stable")
    encoded = rows["publisher"].combine_chunks().dictionary_encode()
    senders = encoded.indices.to_numpy()
    # A publisher's group is that of its first message; the pipeline handles changes of group.
    first_rows = np.unique(senders, return_index=True)[1]
    groups = rows["group"].take(pa.array(first_rows)).to_pylist()
    span = int(times.min()), int(times.max())
    publishers = tuple(
        Publisher(publisher, float(mean_rate(messages, *span)), group)
        for publisher, messages, group in zip(
            encoded.dictionary.to_pylist(), np.bincount(senders).tolist(), groups, strict=True
        )
    )
    return TopicArrivals(name, publishers, Arrivals(times[order], senders[order].astype(np.int32)))


def check_schema(file: Path, schema: pa.Schema, columns: Sequence[str]) -> None:
    """Refuse a file that lacks any of the columns, or holds another type in them."""
    wrong: list[str] = []
    for name in columns:
        wanted: Any = RECORDED_SCHEMA.field(name).type
        if name not in schema.names and RECORDED_SCHEMA.field(name).nullable:
            continue
        if name not in schema.names:
            wrong.append(f"column {name!r} ({wanted}) is missing")
        elif schema.field(name).type not in (wanted, pa.large_string() if wanted == pa.string() else wanted):
            wrong.append(f"column {name!r} is {schema.field(name).type}, not {wanted}")
    if wrong:
        raise TraceError(
            f"{file} is not a trace: {'; '.join(wrong)}; its columns are {', '.join(schema.names)}."
            " Other data becomes a trace with srtm trace import",
            path=str(file),
        )
