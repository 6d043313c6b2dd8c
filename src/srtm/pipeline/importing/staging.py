"""Rows on their way through an import: judged once, and kept where they can be read again.

Parsing is the expensive step of an import, and its result is needed three times: for counting, for the sample that
decides how to sort, and for sorting. Each task writes its good rows to a file, in input order, and returns how many
there are, with the rejects by reason and a few examples. Spark's own cache would do the same; filling it took from half
as long as parsing to somewhat longer.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from srtm.workload.trace import encoded, writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyspark.sql import DataFrame

EXAMPLES = 3
REJECT = ("reason", "column", "value", "row", "file")
_STAGED = "name string, messages long, rejects string"
_ARROW = pa.schema([("name", pa.string()), ("messages", pa.int64()), ("rejects", pa.string())])
_HELD = 200_000  # rows per row group


class Staged(NamedTuple):
    """Files of good rows, the number of rows, and the rejects by reason: how many, and examples."""

    files: list[Path]
    messages: int
    rejects: dict[str, tuple[int, list[dict[str, str | None]]]]


def stage(judged: DataFrame, folder: Path, schema: pa.Schema) -> Staged:
    """Write the rows without a reason; `judged` has the columns of the schema and of `REJECT`."""
    done = judged.mapInArrow(_stages(str(folder), schema), _STAGED).toArrow().to_pylist()
    counts: Counter[str] = Counter()
    examples: dict[str, list[dict[str, str | None]]] = {}
    for task in done:
        for reason, rows, some in json.loads(task["rejects"]):
            counts[reason] += rows
            examples[reason] = [*examples.get(reason, []), *some][:EXAMPLES]
    return Staged(
        [folder / task["name"] for task in done if task["messages"]],
        sum(task["messages"] for task in done),
        {reason: (rows, examples[reason]) for reason, rows in counts.most_common()},
    )


def _stages(folder: str, schema: pa.Schema) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        name, messages = f"{uuid.uuid4().hex}.parquet", 0
        rejects: dict[str, list[Any]] = {}
        with writing(Path(folder, name), schema, {}) as writer:
            for rows in _good(batches, schema, rejects):
                writer.write_table(rows, row_group_size=rows.num_rows)
                messages += rows.num_rows
        told = {"name": name, "messages": messages, "rejects": json.dumps(list(rejects.values()))}
        yield pa.RecordBatch.from_pylist([told], _ARROW)

    return run


def _good(batches: Iterable[pa.RecordBatch], schema: pa.Schema, rejects: dict[str, list[Any]]) -> Iterator[pa.Table]:
    """The rows without a reason, a row group at a time; rows with one are entered into `rejects`."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        good = pc.is_null(batch.column("reason"))
        if pc.all(good, min_count=0).as_py():
            held.append(batch.select(schema.names))
        else:
            held.append(batch.filter(good).select(schema.names))
            _enter(batch.filter(pc.invert(good)).select(REJECT), rejects)
        if sum(rows.num_rows for rows in held) >= _HELD:
            yield as_group(held, schema)
            held = []
    if any(rows.num_rows for rows in held):
        yield as_group(held, schema)


def _enter(batch: pa.RecordBatch, rejects: dict[str, list[Any]]) -> None:
    for counted in batch.column("reason").value_counts().to_pylist():
        reason = counted["values"]
        entry = rejects.setdefault(reason, [reason, 0, []])
        entry[1] += counted["counts"]
        if (missing := EXAMPLES - len(entry[2])) > 0:
            entry[2] += batch.filter(pc.equal(batch.column("reason"), reason)).slice(0, missing).to_pylist()


def as_group(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    """Rows in the form that trace writers take."""
    table = pa.Table.from_batches(batches).combine_chunks()
    columns = [
        table[field.name].dictionary_encode() if field.type == pa.string() else table[field.name] for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=encoded(schema))
