"""What tasks and driver send each other: a few Arrow tables, each packed into values of one binary column.

Spark hands rows on one by one, value by value. A packed table passes it as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from srtm.pipeline.traces.batches import Batches

PART_FIELDS = "part string, rows binary"
_LARGEST = 2**26  # bytes of a packed value, far below what Spark can hold in one


def packed(parts: Mapping[str, pa.Table]) -> Batches:
    """Tables as a task sends them, in their order."""
    for name, table in parts.items():
        size = max(1, table.num_rows * _LARGEST // max(table.nbytes, 1))
        for begin in range(0, max(1, table.num_rows), size):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table.slice(begin, size))
            rows = sink.getvalue()
            ends = pa.py_buffer(np.array([0, rows.size], np.int32))
            value = pa.Array.from_buffers(pa.binary(), 1, [None, ends, rows])
            yield pa.RecordBatch.from_arrays([pa.array([name]), value], ["part", "rows"])


def unpacked(received: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """The tables of all tasks, by task and then in the order in which it sent them."""
    if not received.num_rows:
        return
    for name, rows in zip(received["part"].to_pylist(), received["rows"], strict=True):
        with pa.ipc.open_stream(rows.as_buffer()) as stream:
            yield name, stream.read_all()


def joined(received: pa.Table) -> dict[str, pa.Table]:
    """The tables of all tasks, those of one name one below the other."""
    parts: dict[str, list[pa.Table]] = defaultdict(list)
    for name, table in unpacked(received):
        parts[name].append(table)
    return {name: pa.concat_tables(tables) for name, tables in parts.items()}


def table_of(**columns: NDArray[np.generic] | pa.Array) -> pa.Table:
    """A table of arrays; a two-dimensional one becomes a column of lists of one length."""
    return pa.table({name: _column(values) for name, values in columns.items()})


def _column(values: NDArray[np.generic] | pa.Array) -> pa.Array:
    if isinstance(values, np.ndarray) and values.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).ravel()), values.shape[1])
    return pa.array(values)


def rows_of(column: pa.ChunkedArray, width: int) -> NDArray[np.int64]:
    """A column of lists of one length as a two-dimensional array."""
    whole = pa.concat_arrays([chunk.flatten() for chunk in column.chunks] or [pa.array([], pa.int64())])
    rows: NDArray[np.int64] = whole.to_numpy().reshape(-1, width)
    return rows
