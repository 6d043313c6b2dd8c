"""A DataFrame of messages, written as the trace files that SRTM reads fastest.

In: rows of the trace schema, in any order. Out: a folder of Parquet files, or one file, written by `workload.trace`:
sorted by `arrival_ns`, in row groups of about a million messages of one topic that do not overlap in time.

With more than `MANY_TOPICS` topics, row groups of one topic each would be mostly footer. Small topics then share row
groups, which are sorted by `arrival_ns` as well; jobs count the messages of their topics in a run of its own.

Every task writes a file with a unique name beside the result, and reports it. The driver moves the files of the tasks
that count into a new folder and renames that: the result is complete or absent. Files of tasks that were repeated,
killed or interrupted are deleted with the folder they were written to.
"""

from __future__ import annotations

import shutil
import time
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from srtm.errors import InputError, PipelineError, TraceError
from srtm.pipeline.importing.staging import as_group
from srtm.pipeline.runtime.cores import parallelism
from srtm.workload.trace import writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyspark.sql import DataFrame

ROW_GROUP = 1_000_000  # messages
MANY_TOPICS = 5_000
_SMALL_TOPIC = 10_000  # messages
_FILE = 4 * ROW_GROUP  # messages per file, if there are more than one file per task holds
_SMALLEST_FILE = ROW_GROUP // 4
_ONE_FILE = 50_000_000  # messages one task may sort
_WRITTEN = "partition int, name string, messages long"
_ARROW = pa.schema([("partition", pa.int32()), ("name", pa.string()), ("messages", pa.int64())])


class Written(NamedTuple):
    """The size of a written trace."""

    files: int
    bytes: int


def check_output(out: Path, *, force: bool = False) -> None:
    """Refuse a path that cannot or must not be written, before any work is done."""
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: folder {out.parent} does not exist; create it first", path=str(out))
    if not out.exists():
        return
    if not force:
        raise InputError(f"--out {out} already exists: choose another name, or overwrite it with --force")
    if out.is_dir() == _is_file(out):
        kind = "folder" if out.is_dir() else "file"
        raise InputError(
            f"--out {out} is an existing {kind}, and --force does not turn it into the other kind: choose another name"
        )
    if out.is_dir():
        foreign = [path for path in sorted(out.rglob("*")) if path.is_file() and path.suffix != ".parquet"]
        if foreign:
            raise InputError(
                f"--out {out} holds more than a trace ({foreign[0].name}): not overwriting it; choose another name"
            )


def write_trace(rows: DataFrame, out: Path, schema: pa.Schema, *, messages: int, topics: int) -> Written:
    """Write rows as trace files, all or nothing; `rows` must be the same each time they are computed."""
    with beside(out) as folder:
        return write_within(folder, rows, out, schema, messages=messages, topics=topics)


def write_within(folder: Path, rows: DataFrame, out: Path, schema: pa.Schema, *, messages: int, topics: int) -> Written:
    """`write_trace` with an existing folder of `beside`."""
    if _is_file(out) and messages > _ONE_FILE:
        raise InputError(
            f"{messages:,} messages are too many for one file: name a folder, for example --out {out.stem}"
        )
    tasks = parallelism(rows.sparkSession)
    partitions = 1 if _is_file(out) else max(-(-messages // _FILE), min(tasks, -(-messages // _SMALLEST_FILE)))
    ordered = (
        rows.select(*schema.names)
        .repartitionByRange(partitions, "topic", "arrival_ns")
        .sortWithinPartitions("topic", "arrival_ns", "publisher")
    )
    done = ordered.mapInArrow(_writes(str(folder / "tasks"), schema, sharing=topics > MANY_TOPICS), _WRITTEN).toArrow()
    files = sorted((row["partition"], row["name"], row["messages"]) for row in done.to_pylist())
    if (written := sum(count for _, _, count in files)) != messages:
        raise PipelineError(
            f"Spark wrote {written:,} of {messages:,} messages: the input changed meanwhile; import it again"
        )
    for number, (_, name, _) in enumerate(files):
        (folder / "tasks" / name).rename(folder / "done" / f"part-{number:05}.parquet")
    result = folder / "done" / "part-00000.parquet" if _is_file(out) else folder / "done"
    size = sum(file.stat().st_size for file in (folder / "done").iterdir())
    _replace(result, out, folder / "before")
    return Written(len(files), size)


def _is_file(out: Path) -> bool:
    return out.suffix == ".parquet"


@contextmanager
def beside(out: Path) -> Iterator[Path]:
    """A temporary folder next to the result, on the same disk; always deleted afterwards."""
    folder = out.absolute().with_name(f".{out.name}.{uuid.uuid4().hex[:12]}.partial")
    try:
        for name in ("stage", "tasks", "done"):
            (folder / name).mkdir(parents=True)
        yield folder
    except OSError as error:
        raise TraceError(f"cannot write {out}: {error.strerror or error}", path=str(out)) from None
    finally:
        for _ in range(50):  # a task that is being stopped may still create a file
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.1)


def _replace(result: Path, out: Path, before: Path) -> None:
    """Move the result into place; if that fails, restore what it replaces."""
    if out.exists():
        out.rename(before)
    try:
        result.rename(out)
    except BaseException:
        if before.exists() and not out.exists():
            before.rename(out)
        raise


def _writes(
    folder: str, schema: pa.Schema, *, sharing: bool
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A task over batches sorted by topic and time: writes one file, and yields a row that describes it."""

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        name, messages = f"{uuid.uuid4().hex}.parquet", 0
        groups = row_groups(batches, schema, sharing=sharing)
        first = next(groups, None)
        if first is None:
            return
        with writing(Path(folder, name), schema, {}) as writer:
            group: pa.Table | None = first
            while group is not None:
                writer.write_table(group, row_group_size=group.num_rows)
                messages += group.num_rows
                group = next(groups, None)
        found = {"partition": context.partitionId() if context else 0, "name": name, "messages": messages}
        yield pa.RecordBatch.from_pylist([found], _ARROW)

    return run


def row_groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema, *, sharing: bool) -> Iterator[pa.Table]:
    """Rows sorted by topic and time, as row groups; if `sharing`, small topics share them."""
    held: list[pa.RecordBatch] = []
    shared: list[pa.RecordBatch] = []
    topic: str | None = None
    whole = True  # no row group of this topic was written yet
    for name, run in _runs(batches, sharing=sharing):
        if name is None:
            shared.append(run)
        elif name == topic:
            held.append(run)
        else:
            if sharing and whole and _rows(held) < _SMALL_TOPIC:
                shared += held
            elif held:
                yield as_group(held, schema)
            topic, held, whole = name, [run], True
        if _rows(held) >= ROW_GROUP:
            yield as_group(held, schema)
            held, whole = [], False
        if _rows(shared) >= ROW_GROUP:
            yield as_group(shared, schema).sort_by("arrival_ns")
            shared = []
    if sharing and whole and _rows(held) < _SMALL_TOPIC:
        shared += held
    elif held:
        yield as_group(held, schema)
    if shared:
        yield as_group(shared, schema).sort_by("arrival_ns")


def _runs(batches: Iterable[pa.RecordBatch], *, sharing: bool) -> Iterator[tuple[str | None, pa.RecordBatch]]:
    """Runs of rows of one topic; if `sharing`, topics that lie entirely in a batch come as one run, without a name."""
    for batch in batches:
        topics = batch.column("topic").dictionary_encode()
        codes = topics.indices.to_numpy()
        ends = [*(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
        if sharing and len(ends) > 2:
            ends = [ends[0], ends[-2], ends[-1]]
        begin = 0
        for number, end in enumerate(ends):
            if end > begin:
                inner = sharing and len(ends) == 3 and number == 1
                yield None if inner else topics.dictionary[int(codes[begin])].as_py(), batch.slice(begin, end - begin)
            begin = end


def _rows(batches: list[pa.RecordBatch]) -> int:
    return sum(batch.num_rows for batch in batches)
