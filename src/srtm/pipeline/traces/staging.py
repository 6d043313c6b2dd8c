"""DataFrames as files: tasks sort their partitions and write them to a folder, which is then read as any trace.

Spark's sort by range costs more than everything after it. Sorted partitions need no shuffle: `traces.files` merges
them. Driver and tasks must see the same folder, so this is for sessions on one machine.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from srtm.pipeline.traces.batches import batch_of
from srtm.workload.trace import RECORDED_SCHEMA, encoded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

    from srtm.pipeline.traces.batches import Batches

_AT_ONCE = 4_000_000  # messages that a task holds and sorts
_ROW_GROUP = 1_000_000
_FIELDS = "file string"


def on_one_machine(spark: SparkSession) -> bool:
    """Whether driver and tasks share their files for certain."""
    try:
        return str(spark.sparkContext.master).startswith("local")
    except Exception:  # Spark Connect has no context, and raises an error of its own
        return False


@contextmanager
def staged(frame: DataFrame, columns: list[str], key: str) -> Iterator[Path | None]:
    """A folder with the frame's rows as files sorted by the key, until the end of the context; None without rows."""
    folder = Path(tempfile.mkdtemp(prefix="srtm-staged-"))
    try:
        schema = pa.schema([RECORDED_SCHEMA.field(name).with_nullable(True) for name in columns])

        def task(batches: Batches) -> Batches:
            held, rows, names = [], 0, []
            for batch in batches:
                held.append(batch)
                rows += batch.num_rows
                if rows >= _AT_ONCE:
                    names.append(write_sorted(folder, held, schema, key))
                    held, rows = [], 0
            if rows:
                names.append(write_sorted(folder, held, schema, key))
            yield batch_of(_FIELDS, [(name,) for name in names])

        found = frame.select(columns).mapInArrow(task, _FIELDS).toArrow()
        names = set(found["file"].to_pylist())
        for file in folder.iterdir():
            if file.name not in names:  # of a task that failed, or that Spark ran twice
                file.unlink()
        yield folder if names else None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_sorted(folder: Path, batches: list[pa.RecordBatch], schema: pa.Schema, key: str) -> str:
    """The name of a file with these batches, in order of the key."""
    table = pa.Table.from_batches(batches).cast(schema)
    strings = [name for name in schema.names if schema.field(name).type == pa.string()]
    for place, name in enumerate(schema.names):
        if name in strings:
            table = table.set_column(place, name, table[name].dictionary_encode())
    table = table.unify_dictionaries().combine_chunks()
    if not table[key].null_count:
        table = table.take(pa.array(np.argsort(table[key].to_numpy(), kind="stable")))
    name = f"{uuid.uuid4().hex}.parquet"
    with pq.ParquetWriter(
        folder / name, encoded(schema), compression="lz4", use_dictionary=strings, store_schema=False
    ) as file:
        file.write_table(table, row_group_size=_ROW_GROUP)
    return name
