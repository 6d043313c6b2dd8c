"""Arrow record batches of messages, as tasks receive them and hand results back."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Batches = Iterator[pa.RecordBatch]
    Work = Callable[[int, Batches], Batches]

_TYPES = {
    "string": pa.string(),
    "long": pa.int64(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "array<string>": pa.list_(pa.string()),
}


def by_topic(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Each topic with its rows, in their order; the rows of a batch of several topics lack the topic column."""
    topics = batch.column("topic")
    codes = topics.indices.to_numpy()
    if not len(codes):
        return
    if codes.min() == codes.max():
        yield topics.dictionary[int(codes[0])].as_py(), batch
        return
    order = np.argsort(codes.astype(np.uint16) if len(topics.dictionary) < 2**16 else codes, kind="stable")
    ordered, grouped = codes[order], batch.drop_columns(["topic"]).take(pa.array(order))
    begins = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(ordered)]
    for begin, end in pairwise(begins):
        yield topics.dictionary[int(ordered[begin])].as_py(), grouped.slice(begin, end - begin)


def batch_of(fields: str, rows: Sequence[Sequence[object]]) -> pa.RecordBatch:
    """Rows as a task hands them to Spark; `fields` is the schema, as Spark writes it."""
    named = [entry.split() for entry in fields.split(",")]
    columns: Sequence[Sequence[object]] = list(zip(*rows, strict=True)) if rows else [()] * len(named)
    arrays = [pa.array(column, _TYPES[kind]) for column, (_, kind) in zip(columns, named, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, [name for name, _ in named])


def with_dictionaries(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with strings as dictionaries."""
    columns = [
        column.dictionary_encode()
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)
