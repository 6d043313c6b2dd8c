"""Import: traces that others recorded, as CSV, JSON lines or Parquet, become traces of SRTM.

In: files or a DataFrame, the column of the input for each column of a trace (`columns`), and the unit of the times.
Out: the trace, and every rejected row with its reason (`judging`). Each row of the input is in exactly one of the two.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from srtm.errors import SRTMError, TraceError
from srtm.pipeline.importing.columns import Columns, Unit
from srtm.pipeline.importing.foreign import Source, find, path_of, quoted, sources
from srtm.pipeline.importing.judging import judged
from srtm.pipeline.importing.output import beside, check_output, write_within
from srtm.pipeline.importing.rejects import Rejected, limit, lines, refusal, rejected_for
from srtm.pipeline.importing.staging import stage
from srtm.pipeline.runtime.failures import Place, explanation
from srtm.workload.trace import ARRIVAL_SCHEMA, RECORDED_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pyspark.sql import DataFrame, SparkSession

MAX_REJECTS = "1%"


class Normalised(NamedTuple):
    """The rows that make a trace, and the rejects: reason, column, value, row and file of each."""

    rows: DataFrame
    rejects: DataFrame


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import read, wrote and rejected."""

    out: Path
    files: int
    read: int
    written: int
    rejected: tuple[Rejected, ...]
    skipped: dict[Path, str]
    topics: int
    publishers: int
    first_ns: int
    last_ns: int
    bytes: int

    @property
    def rejects(self) -> int:
        """How many rows were rejected."""
        return sum(line.rows for line in self.rejected)


def normalise(
    frame: DataFrame,
    mapping: Mapping[str, str] | None = None,
    unit: Unit = None,
    *,
    topic: str | None = None,
    publisher: str | None = None,
    relative: bool = False,
) -> Normalised:
    """The rows of a DataFrame as a trace, and its rejects; `mapping` maps columns of a trace to those of the frame.

    An unmapped column is taken by its own name if the frame has it. `topic` and `publisher` are names for all rows.
    Both results read the frame; `persist` it if that is expensive.
    """
    columns = Columns.of(mapping, unit, topic, publisher, relative=relative)
    mapped = columns.mapped(frame.columns, "the DataFrame", recorded=columns.is_recorded(frame.columns))
    found = judged(frame, {name: quoted(source) for name, source in mapped.items()}, columns)
    return Normalised(
        found.where("why is null").drop("why", "row", "file"),
        found.where("why is not null").select("why.*", "row", "file"),
    )


def ingest(
    inputs: Iterable[str | Path],
    spark: SparkSession,
    out: str | Path,
    *,
    form: str | None = None,
    mapping: Mapping[str, str] | None = None,
    unit: Unit = None,
    topic: str | None = None,
    publisher: str | None = None,
    relative: bool = False,
    delimiter: str | None = None,
    header: bool = True,
    max_rejects: str = MAX_REJECTS,
    skip_unreadable: bool = False,
    force: bool = False,
    tell: Callable[[str], None] | None = None,
) -> Imported:
    """Write files, folders and patterns of files as one trace: a folder, or a file if `out` ends in .parquet.

    Nothing is written if more rows are rejected than `max_rejects` allows: a number, or a percentage of all rows.
    `tell` is called with progress messages.
    """
    out = Path(out)
    tell = tell or (lambda _: None)
    columns = Columns.of(mapping, unit, topic, publisher, relative=relative)
    allowed = limit(max_rejects)
    check_output(out, force=force)
    files = find(inputs, form)
    tell(f"reading {_listed(files)}")
    with _spark_errors(out), beside(out) as folder:
        found = sources(
            spark, files, columns.names(), delimiter=delimiter, header=header, skip_unreadable=skip_unreadable
        )
        if not found.sources:
            raise TraceError(f"{_listed(files)}: no rows")
        rows_judged = _union(found.sources, columns)
        schema = RECORDED_SCHEMA if "broker" in rows_judged.columns else ARRIVAL_SCHEMA
        staged = stage(rows_judged.select(*schema.names, "why.*", "row", "file"), folder / "stage", schema)
        rejected = tuple(rejected_for(reason, *facts, columns) for reason, facts in staged.rejects.items())
        rejects = sum(line.rows for line in rejected)
        if rejects > allowed(staged.messages + rejects):
            raise TraceError(refusal(rejected, staged.messages + rejects, max_rejects), rejected=rejected)
        if not staged.messages:
            raise TraceError("\n".join([f"{_listed(files)}: no valid rows", *lines(rejected)]))
        rows = spark.read.schema(rows_judged.select(*schema.names).schema).parquet(*map(str, staged.files))
        counted = _counted(rows)
        tell(f"writing {out}")
        written = write_within(folder, rows, out, schema, messages=staged.messages, topics=counted.topics)
    return Imported(
        out,
        len(files) - len(found.skipped),
        staged.messages + rejects,
        staged.messages,
        rejected,
        found.skipped,
        counted.topics,
        counted.publishers,
        counted.first_ns,
        counted.last_ns,
        written.bytes,
    )


def _union(found: list[Source], columns: Columns) -> DataFrame:
    recorded = all(columns.is_recorded(source.columns) for source in found)
    frames = []
    for source in found:
        mapped = columns.mapped(source.columns, str(source.files[0]), recorded=recorded)
        handles = {name: quoted(source.handles[column]) for name, column in mapped.items()}
        stamps = {name for name, column in mapped.items() if column in source.stamps}
        frames.append(judged(source.frame, handles, columns, mapped, stamps))
    return reduce(lambda one, other: one.unionByName(other), frames)


class _Counts(NamedTuple):
    topics: int
    publishers: int
    first_ns: int
    last_ns: int


def _counted(rows: DataFrame) -> _Counts:
    from pyspark.sql import functions as f

    pairs = rows.groupBy("topic", "publisher").agg(
        f.min("arrival_ns").alias("first"), f.max("arrival_ns").alias("last")
    )
    counted = pairs.agg(f.count_distinct("topic"), f.count_distinct("publisher"), f.min("first"), f.max("last"))
    return _Counts(*(column[0].as_py() for column in counted.toArrow().columns))


@contextmanager
def _spark_errors(out: Path) -> Iterator[None]:
    """Raise Spark's errors as SRTM's, in one line that names the remedy."""
    try:
        yield
    except (SRTMError, OSError):
        raise
    except Exception as error:
        raise translated(str(error), out) from None


def translated(text: str, out: Path) -> SRTMError:
    """The SRTM error for a text of Spark's; `failures.explanation` knows those that any job can meet."""
    if failed := re.search(r"\[FAILED_READ_FILE.*?reading file (\S+?)\.?\s", text):
        file = path_of(failed[1])
        remedy = "replace or remove it" + ("" if not file or file.endswith(".parquet") else ", or --skip-unreadable")
        return TraceError(f"{file} is damaged or truncated: {remedy}", path=file)
    # Tasks write to temporary names, which mean nothing to the user.
    named = re.sub(r"cannot write \S+\.parquet:", f"cannot write {out}:", text)
    return explanation(named, Place("this session"))


def _listed(files: Iterable[Path]) -> str:
    names = [str(file) for file in files]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
