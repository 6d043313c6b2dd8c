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

A trace is a file or a folder of files (`uris`), sorted or not. A column of strings may be in the names of folders
instead, as Hive has it: `topic=x/…`. Files written here are sorted by `arrival_ns` and
delta-encoded, in row groups of about a million messages with statistics, so readers can each take a stretch of time.
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
from srtm.workload.gathered import Rows, Senders, TopicArrivals, arrivals_of
from srtm.workload.publishers import Arrivals
from srtm.workload.uris import explained, files_of, footers_of, parquet, partitions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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
_ROW_GROUP = 1_000_000
_STRINGS = [field.name for field in RECORDED_SCHEMA if field.type == pa.string()]
_TIMES = [field.name for field in RECORDED_SCHEMA if field.type == pa.int64()]


BROKER_KEY = "srtm.recorded_by"  # of a recorded file's metadata
MOVED_KEY = "srtm.lent"


class Moved(NamedTuple):
    """Tokens that a broker lent and borrowed while it recorded, in pico-tokens."""

    lent_ptok: int
    borrowed_ptok: int


def moved_in(path: str | Path) -> dict[str, dict[str, Moved]]:
    """What brokers lent and borrowed during a recorded run, by topic and broker; only of topics that lent."""
    found: dict[str, dict[str, Moved]] = {}
    for file, footer in footers_of(path).items():
        about = footer.metadata or {}
        try:
            peers_of = json.loads(about.get(MOVED_KEY.encode(), b"{}"))
            broker = about.get(BROKER_KEY.encode(), b"").decode()
            for topic, peers in peers_of.items():
                brokers = found.setdefault(topic, {})
                before, more = brokers.get(broker, Moved(0, 0)), [Moved(*each) for each in peers.values()]
                brokers[broker] = Moved(
                    before.lent_ptok + sum(each.lent_ptok for each in more),
                    before.borrowed_ptok + sum(each.borrowed_ptok for each in more),
                )
        except (ValueError, TypeError, AttributeError) as error:
            raise TraceError(f"{file} says nothing readable about lent tokens: {error}", path=file) from None
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


def batches(path: str | Path, columns: Sequence[str], *, with_dictionaries: bool = False) -> Iterator[pa.RecordBatch]:
    """Some columns of a trace, row group by row group, in the order of the files; foreign files may hold nulls."""
    schema = encoded(plain(columns)) if with_dictionaries else plain(columns)
    names = [name for name in columns if name in _STRINGS and with_dictionaries]
    for file in files_of(path):
        with explained(file), parquet(file, names) as source:
            check_schema(file, source.schema_arrow, columns)
            for number in range(source.num_row_groups):
                yield from rows_of(source, file, number, schema).to_batches()


def plain(columns: Sequence[str]) -> pa.Schema:
    """Some columns of a trace, any of which may hold nulls."""
    return pa.schema([RECORDED_SCHEMA.field(name).with_nullable(True) for name in columns])


def partitions_of(file: str) -> dict[str, str | None]:
    """The columns of a trace that the folders of a file name."""
    return {name: value for name, value in partitions(file).items() if name in _STRINGS}


def rows_of(source: pq.ParquetFile, file: str, number: int, schema: pa.Schema, *, topic: str | None = None) -> pa.Table:
    """A row group in the columns and types of a schema: from the file, else from its folders, else null.

    The topic is not read if it is given.
    """
    there = source.schema_arrow.names
    known = {name: value for name, value in partitions_of(file).items() if name not in there}
    if topic is not None:
        known["topic"] = topic
    read = [name for name in schema.names if name in there and name not in known]
    rows = source.read_row_group(number, columns=read, use_threads=False)
    for name in schema.names:
        if name not in read:
            everywhere = pa.array(np.zeros(rows.num_rows, np.int32))
            value = pa.array([known.get(name)], RECORDED_SCHEMA.field(name).type)
            same = value.take(everywhere) if value.null_count else pa.DictionaryArray.from_arrays(everywhere, value)
            rows = rows.append_column(name, same)
    return rows.select(schema.names).cast(schema)


def load(path: str | Path, topic: str | None = None) -> list[TopicArrivals]:
    """A whole trace in memory, sorted, one entry per topic; or just the named topic, if the trace has it."""
    rows = batches(path, ARRIVAL_SCHEMA.names, with_dictionaries=True)
    messages, found = _gathered(rows if topic is None else _only(rows, topic), str(path))
    if not messages and (topic is None or not any(batch.num_rows for batch in batches(path, ["topic"]))):
        raise TraceError(f"{path} holds no messages", path=str(path))
    return found


def in_topics(table: pa.Table, source: str) -> list[TopicArrivals]:
    """The topics of a table of arrivals in any order."""
    names = ARRIVAL_SCHEMA.names
    table = table.select(names).cast(plain(names))
    for place, name in enumerate(names):
        if name in _STRINGS:
            table = table.set_column(place, name, table[name].dictionary_encode())
    return _gathered(table.to_batches(), source)[1]


def _only(rows: Iterable[pa.RecordBatch], topic: str) -> Iterator[pa.RecordBatch]:
    for batch in rows:
        topics = batch.column("topic")
        yield batch.filter(pc.equal(topics.dictionary, topic).take(topics.indices))


def _gathered(rows: Iterable[pa.RecordBatch], source: str) -> tuple[int, list[TopicArrivals]]:
    """How many messages there are, and their topics."""
    senders, held, messages = Senders(), list[Rows](), 0
    nulls = dict.fromkeys(("topic", "publisher", "arrival_ns"), 0)
    for batch in rows:
        messages += batch.num_rows
        for name in nulls:
            nulls[name] += batch.column(name).null_count
        if batch.num_rows and not any(nulls.values()):
            held.append(senders.numbered(batch))
    for name, count in nulls.items():
        if count:
            raise TraceError(f"{source}: {count} of {messages} rows have no {name}", path=source, column=name)
    return messages, arrivals_of([(senders.table(), held)]) if messages else []


def check_schema(file: str, schema: pa.Schema, columns: Sequence[str]) -> None:
    """Refuse a file that lacks any of the columns, or holds another type in them."""
    wrong: list[str] = []
    known = partitions_of(file)
    for name in columns:
        wanted: Any = RECORDED_SCHEMA.field(name).type
        if name in schema.names:
            kind = schema.field(name).type
            kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            if kind != wanted and not (wanted == pa.string() and kind == pa.large_string()):
                wrong.append(f"column {name!r} is {kind}, not {wanted}")
        elif name not in known and not RECORDED_SCHEMA.field(name).nullable:
            wrong.append(f"column {name!r} ({wanted}) is missing")
    if wrong:
        raise TraceError(
            f"{file} is not a trace: {'; '.join(wrong)}; its columns are {', '.join(schema.names)}."
            " Other data becomes a trace with srtm trace import",
            path=file,
        )
