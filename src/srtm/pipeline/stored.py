"""The files of a store of profiles: Parquet, a folder for each hour, `hour=2026-11-18T03/profiles.parquet`.

In: rows of topics, each about a stretch of an hour. Out: the same rows, hour by hour. An hour is written whole, and
under its name only when it is complete. A row replaces rows of its topic that lie within its time, and stands beside
those before and after it; one that overlaps another in part is refused, because neither has all messages. One program
at a time may write to a store.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from srtm.errors import InputError, TraceError
from srtm.model import burst
from srtm.units import NS_PER_S, format_instant
from srtm.workload.uris import explained, located

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from srtm.pipeline.traces.batches import Ints

_FILE, _GROUPS_FILE = "profiles.parquet", "groups.parquet"
_HOUR = re.compile(r"hour=(\d{4}-\d\d-\d\dT\d\d)")
_LONGS, _SHORTS = pa.list_(pa.int64()), pa.list_(pa.int32())
SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("hour_ns", pa.int64()),
        ("messages", pa.int64()),
        ("first_ns", pa.int64()),
        ("last_ns", pa.int64()),
        ("seen_from_ns", pa.int64()),  # what the row's trace covers, whatever the hour: its first message of any topic,
        ("seen_until_ns", pa.int64()),  # and its last
        ("envelope", pa.list_(pa.int64(), len(burst.WINDOWS_NS))),
        ("batch_sizes", _SHORTS),
        ("batch_counts", _LONGS),
        ("publishers", pa.list_(pa.string())),
        ("place", pa.int32()),  # of the first rate in `hours.GRID`; the others follow it
        ("backlogs", _LONGS),  # behind the stretch, at each rate
        ("clear", _LONGS),  # `hours.LEVELS` of each rate
        ("bins", _LONGS),  # how many of the next two are of each rate
        ("needs", _SHORTS),
        ("counts", _LONGS),
    ],
    {"srtm.store": "1"},
)


GROUPS = pa.schema([("topic", pa.string()), ("publisher", pa.string()), ("group", pa.string())])


class Store:
    """A folder of hours: a path, or a URI that Arrow can write to."""

    def __init__(self, folder: str | Path) -> None:
        self.name = str(folder)
        self._place = located(folder)

    def hours(self) -> list[int]:
        """The hours that the store holds, in order, by the time they begin."""
        files, path, _ = self._place
        with explained(self.name):
            found = files.get_file_info(fs.FileSelector(path, allow_not_found=True))
        names = [match[1] for entry in found if (match := _HOUR.fullmatch(entry.base_name))]
        return sorted(_begin_ns(name) for name in names)

    def read(self, hour_ns: int, columns: list[str] | None = None) -> pa.Table:
        """The rows of an hour, or some of their columns; none if the store does not have it."""
        return self._read(hour_ns, _FILE, pa.schema([SCHEMA.field(name) for name in columns or SCHEMA.names]))

    def _read(self, hour_ns: int, name: str, schema: pa.Schema) -> pa.Table:
        files, path, _ = self._place
        file = f"{path}/{_folder(hour_ns)}/{name}"
        with explained(f"{self.name}/{_folder(hour_ns)}/{name}"):
            if files.get_file_info(file).type == fs.FileType.NotFound:
                return schema.empty_table()
            with files.open_input_file(file) as stream:
                return pq.read_table(stream, columns=schema.names).cast(schema)

    def put(self, rows: pa.Table) -> list[int]:
        """Add rows of SCHEMA; returns the hours that they are of. Nothing is written if one is refused."""
        of = rows["hour_ns"].to_numpy()
        joined = {hour: self._joined(hour, rows.filter(pa.array(of == hour))) for hour in np.unique(of).tolist()}
        for hour, table in joined.items():
            self._write(hour, _FILE, table)
        return list(joined)

    def groups(self, hour_ns: int) -> dict[str, dict[str, str]]:
        """The publishers that were found in groups in an hour, by topic, each with its group."""
        found: dict[str, dict[str, str]] = {}
        for row in self._read(hour_ns, _GROUPS_FILE, GROUPS).to_pylist():
            its_own = found.setdefault(row["topic"], {})
            if row["publisher"] is not None:
                its_own[row["publisher"]] = row["group"]
        return found

    def put_groups(self, hour_ns: int, groups: Mapping[str, Mapping[str, str]]) -> None:
        """Set the groups of an hour, by topic and publisher; those of other topics stay."""
        rows = []
        for topic, its_own in sorted((self.groups(hour_ns) | dict(groups)).items()):
            pairs: list[tuple[str | None, str | None]] = [*sorted(its_own.items())]
            pairs = pairs or [(None, None)]  # looked for, and none found
            rows += [{"topic": topic, "publisher": publisher, "group": group} for publisher, group in pairs]
        self._write(hour_ns, _GROUPS_FILE, pa.Table.from_pylist(rows, GROUPS))

    def _joined(self, hour_ns: int, new: pa.Table) -> pa.Table:
        """The rows of an hour with new ones instead of those that they cover; what both have seen stays seen."""
        old = self.read(hour_ns)
        whole = pa.concat_tables([old, new])
        topics = whole["topic"].to_pylist()
        spans = list(zip(*(whole[name].to_pylist() for name in _SPAN), strict=True))
        places, *seen = (whole[name].to_numpy().copy() for name in ("place", *_SEEN))
        kept, coming = np.ones(len(whole), np.bool_), dict[str, list[int]]()
        for number in range(len(old), len(whole)):
            coming.setdefault(topics[number], []).append(number)
        for known in range(len(old)):
            for number in coming.get(topics[known], ()):
                if _covers(topics[known], spans[number], spans[known]):
                    seen[0][[known, number]] = min(seen[0][known], seen[0][number])
                    seen[1][[known, number]] = max(seen[1][known], seen[1][number])
                    # Of two rows about the same messages, one is chosen that does not depend on which came first.
                    same = spans[number] == spans[known] and places[known] < places[number]
                    kept[number if same else known] = False
        for name, values in zip(_SEEN, seen, strict=True):
            whole = whole.set_column(SCHEMA.get_field_index(name), SCHEMA.field(name), pa.array(values))
        whole = whole.filter(pa.array(kept))
        return whole.sort_by([("topic", "ascending"), ("first_ns", "ascending")])

    def _write(self, hour_ns: int, name: str, table: pa.Table) -> None:
        files, path, prefix = self._place
        folder = f"{path}/{_folder(hour_ns)}"
        # Other file systems than this machine's show an object only when it is complete.
        target = f"{folder}/{name}" if prefix else f"{folder}/.{name}.partial"
        try:
            files.create_dir(folder)
            with files.open_output_stream(target) as stream:
                pq.write_table(table, stream, compression="zstd")
            if not prefix:
                files.move(target, f"{folder}/{name}")
        except (OSError, pa.ArrowException) as error:
            said = str(error).partition("\n")[0]
            raise TraceError(f"cannot write to the store {self.name}: {said}", path=self.name) from None


_SPAN = ("first_ns", "last_ns", "messages")
_SEEN = ("seen_from_ns", "seen_until_ns")


def _covers(topic: str, new: tuple[int, int, int], old: tuple[int, int, int]) -> bool:
    """Whether a new stretch replaces an old one; InputError if both have messages that the other lacks."""
    if new[0] <= old[0] and old[1] <= new[1] and new[2] >= old[2]:
        return True
    if old[1] <= new[0] or new[1] <= old[0]:
        return False
    told = [f"{format_instant(begin)} to {format_instant(end)} ({count:,})" for begin, end, count in (old, new)]
    raise InputError(
        f"the store has messages of topic {topic!r} from {told[0]}, and the trace has some from {told[1]}: "
        "give it a trace with all messages of these hours, from all brokers"
    )


def _folder(hour_ns: int) -> str:
    return f"hour={datetime.fromtimestamp(hour_ns // NS_PER_S, UTC):%Y-%m-%dT%H}"


def _begin_ns(name: str) -> int:
    return round(datetime.strptime(name, "%Y-%m-%dT%H").replace(tzinfo=UTC).timestamp()) * NS_PER_S


def lists(values: Ints | pa.Array, counts: Ints, kind: pa.DataType) -> pa.ListArray:
    """Rows of so many values each."""
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(starts), pa.array(values).cast(kind.value_type))


def flat(column: pa.ChunkedArray) -> tuple[Ints | pa.Array, Ints]:
    """The values of a column of lists one after the other, and how many each row has."""
    whole = column.combine_chunks()
    counts = np.diff(whole.offsets.to_numpy()).astype(np.int64)
    values = whole.flatten()
    return (values if pa.types.is_string(values.type) else values.to_numpy().astype(np.int64)), counts
