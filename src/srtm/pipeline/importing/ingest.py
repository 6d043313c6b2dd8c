"""Import: traces that others recorded, as CSV, JSON lines or Parquet, become traces of SRTM.

In: files or a DataFrame, where each column of a trace comes from, and the unit of the times. Out: the trace, and every
row that is not in it together with the reason. A row is in exactly one of the two.

Times are read as decimals and become whole nanoseconds without passing through a float; digits below the nanosecond are
rounded. A unit is given, or evident from the type of a column; it is never guessed. Times are points in time, UTC where
they do not say, and outside of 1971 to 2116 the unit is taken to be wrong; `relative` times count from the beginning of
the recording instead, and only must not be negative.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from srtm.errors import InputError, SRTMError, TraceError
from srtm.model.scan import LATEST_NS
from srtm.pipeline.importing.foreign import FILE, MALFORMED, Source, find, sources
from srtm.pipeline.importing.output import beside, check_output, write_within
from srtm.pipeline.importing.staging import stage
from srtm.pipeline.runtime.failures import Place, explanation
from srtm.units import NS_PER_MS, NS_PER_S, NS_PER_US, exact
from srtm.workload.trace import ARRIVAL_SCHEMA, RECORDED_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyspark.sql import Column, DataFrame, SparkSession

    Check = tuple[Column, str, str | None]  # what is wrong, how to call it, and the column of the trace that it is in

UNITS = ("s", "ms", "us", "ns", "iso8601")
EARLIEST_NS = 365 * 86_400 * NS_PER_S  # 1971
MAX_REJECTS = "1%"
Unit = str | Mapping[str, str] | None

_FACTORS = {"s": NS_PER_S, "ms": NS_PER_MS, "us": NS_PER_US, "ns": 1}
_RECORDED = ("broker", "release_ns")
_NAMES = ("topic", "publisher", "broker")
_NUMBERS = ("tinyint", "smallint", "int", "bigint", "float", "double", "decimal", "string")
_NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
_ISO = r"^\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}(\.\d{1,9})?(Z|[+-]\d{2}(:?\d{2})?)?$"
_LONGEST = 300  # characters of a row that are shown


class Normalised(NamedTuple):
    """The rows that make a trace, and those that do not: reason, column, value, row and file of each."""

    rows: DataFrame
    rejects: DataFrame


class Example(NamedTuple):
    """A row that was rejected: where it stands, what is wrong with it, and what may help."""

    file: str | None
    column: str | None
    value: str | None
    row: str | None
    hint: str | None = None


class Rejected(NamedTuple):
    """How many rows were rejected for a reason, and a few of them."""

    reason: str
    rows: int
    examples: tuple[Example, ...]


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import read, wrote and left out."""

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
        """How many rows are not in the trace."""
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
    """The rows of a DataFrame as a trace, and its rejects; `mapping` says which column each column of a trace is.

    A column that is not in the mapping is taken by its own name where there is one. `topic` and `publisher` are names
    for all rows. Both results read the frame; `persist` it if that is dear.
    """
    wanted = Wanted.of(mapping, unit, topic, publisher, relative=relative)
    mapped = wanted.mapped(frame.columns, "the DataFrame", recorded=wanted.is_recorded(frame.columns))
    judged = _judged(frame, {name: _quoted(source) for name, source in mapped.items()}, wanted)
    return Normalised(_rows(judged), _rejects(judged))


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

    Nothing is written where more rows are rejected than `max_rejects` allows: a number, or a percentage of all rows.
    `tell` hears what is being done.
    """
    out = Path(out)
    tell = tell or (lambda _: None)
    wanted = Wanted.of(mapping, unit, topic, publisher, relative=relative)
    allowed = _limit(max_rejects)
    check_output(out, force=force)
    files = find(inputs, form)
    tell(f"reading {_listed(files)}")
    with _spark_errors(out), beside(out) as folder:
        found = sources(
            spark, files, wanted.names(), delimiter=delimiter, header=header, skip_unreadable=skip_unreadable
        )
        if not found.sources:
            raise TraceError(f"{_listed(files)}: no rows")
        judged = _union(found.sources, wanted)
        schema = RECORDED_SCHEMA if "broker" in judged.columns else ARRIVAL_SCHEMA
        staged = stage(judged.select(*schema.names, "why.*", "row", "file"), folder / "stage", schema)
        rejected = tuple(_rejected(reason, *facts, wanted) for reason, facts in staged.rejects.items())
        rejects = sum(line.rows for line in rejected)
        if rejects > allowed(staged.messages + rejects):
            raise TraceError(_refusal(rejected, staged.messages + rejects, max_rejects), rejected=rejected)
        if not staged.messages:
            raise TraceError("\n".join([f"{_listed(files)}: no rows that make a trace", *lines(rejected)]))
        rows = spark.read.schema(judged.select(*schema.names).schema).parquet(*map(str, staged.files))
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


@dataclass(frozen=True, slots=True)
class Wanted:
    """Where the columns of a trace come from: a column of the input, a name for all rows, or nowhere."""

    mapping: Mapping[str, str]
    unit: str | None
    units: Mapping[str, str]
    constants: Mapping[str, str]
    relative: bool

    @classmethod
    def of(
        cls, mapping: Mapping[str, str] | None, unit: Unit, topic: str | None, publisher: str | None, *, relative: bool
    ) -> Wanted:
        """The same from what a caller says, or an error that lists all that is wrong with it."""
        mapping = dict(mapping or {})
        constants = {name: value for name, value in (("topic", topic), ("publisher", publisher)) if value is not None}
        units = dict(unit) if isinstance(unit, Mapping) else {}
        bare = unit if isinstance(unit, str) else None
        times = [name for name in RECORDED_SCHEMA.names if name.endswith("_ns")]
        wrong = [
            f"{name!r} is no column of a trace: choose from {', '.join(RECORDED_SCHEMA.names)}"
            for name in mapping
            if name not in RECORDED_SCHEMA.names
        ]
        wrong += [f"{name} is given as a column and as a name" for name in constants if name in mapping]
        wrong += [f"the name of the {name} is empty" for name, value in constants.items() if not value.strip()]
        wrong += [f"{name!r} has no unit: choose from {', '.join(times)}" for name in units if name not in times]
        wrong += [
            f"{each!r} is no unit of time: choose from {', '.join(UNITS)}"
            for each in [bare, *units.values()]
            if each is not None and each not in UNITS
        ]
        if wrong:
            raise InputError("; ".join(wrong))
        return cls(mapping, bare, units, constants, relative)

    def names(self) -> set[str]:
        """Columns of the input that may be used."""
        return {self.mapping.get(name, name) for name in RECORDED_SCHEMA.names if name not in self.constants}

    def is_recorded(self, columns: Iterable[str]) -> bool:
        """Whether columns of these names are a recorded run: as the mapping says, or as they are called."""
        explicit = any(name in self.mapping for name in (*_RECORDED, "sent_ns"))
        return explicit or all(name in columns for name in _RECORDED)

    def mapped(self, columns: Iterable[str], where: str, *, recorded: bool) -> dict[str, str]:
        """The column of the input for each column of the trace that has one."""
        there = list(columns)
        mapped, missing = {}, []
        for field in RECORDED_SCHEMA if recorded else ARRIVAL_SCHEMA:
            source = self.mapping.get(field.name, field.name)
            if field.name in self.constants:
                continue
            if source in there:
                mapped[field.name] = source
            elif field.name in self.mapping:
                missing.append(f"has no column {source!r} to be {field.name}")
            elif not field.nullable:
                constant = f", or give one name for all rows with --{field.name}" if field.name in _NAMES[:2] else ""
                missing.append(f"has no column {field.name!r}: say which it is with --column {field.name}=…{constant}")
        if missing:
            alone = len(there) == 1 and re.search(r"[;\t|,]", there[0])
            remedy = f"; if that is several columns, set --delimiter to {alone[0]!r}" if alone else ""
            have = ", ".join(map(repr, there)) or "none at all"
            raise TraceError(f"{where} {'; '.join(missing)}. Its columns are {have}{remedy}", columns=there)
        return mapped

    def unit_of(self, name: str, kind: str, source: str) -> str:
        """The unit of a column of times: 'timestamp' where its type says it."""
        if kind in ("timestamp", "timestamp_ntz", "date"):
            return kind
        unit = self.units.get(name, self.unit)
        if kind.partition("(")[0] not in _NUMBERS:
            raise TraceError(f"column {source!r} is {kind}, which is no time: choose another for {name}", column=source)
        if unit is None:
            raise InputError(
                f"column {source!r} ({kind}) does not say in which unit it counts: add --unit {', '.join(UNITS[:-1])}"
                f" or {UNITS[-1]}",
                column=source,
            )
        if unit == "iso8601" and kind != "string":
            raise InputError(f"column {source!r} is {kind}, not text as in ISO 8601: say --unit s, ms, us or ns")
        return unit

    def hint(self, reason: str, value: str | None) -> str | None:
        """What a time that is out of range may be instead."""
        if not reason.endswith("out of range") or value is None:
            return None
        try:
            number = Decimal(value)
        except InvalidOperation:
            return None
        for unit, factor in _FACTORS.items():
            if unit != self.unit and EARLIEST_NS <= number * factor <= LATEST_NS:
                return f"in {unit} it would be {iso(int(number * factor))}"
        return None if self.relative or number < 0 else "if times count from the start of the recording, add --relative"

    @property
    def earliest_ns(self) -> int:
        """Times before this one are rejected; those after LATEST_NS are, too."""
        return 0 if self.relative else EARLIEST_NS


def _union(found: list[Source], wanted: Wanted) -> DataFrame:
    recorded = all(wanted.is_recorded(source.columns) for source in found)
    frames = []
    for source in found:
        mapped = wanted.mapped(source.columns, str(source.files[0]), recorded=recorded)
        handles = {name: _quoted(source.handles[column]) for name, column in mapped.items()}
        stamps = {name for name, column in mapped.items() if column in source.stamps}
        frames.append(_judged(source.frame, handles, wanted, mapped, stamps))
    return reduce(lambda one, other: one.unionByName(other), frames)


def _judged(
    frame: DataFrame,
    handles: Mapping[str, str],
    wanted: Wanted,
    labels: Mapping[str, str] | None = None,
    stamps: Iterable[str] = (),
) -> DataFrame:
    """Columns of the trace, and for rows that are rejected `why` (reason, column, value), the row as text, its file."""
    from pyspark.sql import functions as f

    labels = labels or {name: handle[1:-1] for name, handle in handles.items()}
    kinds = {name: frame.select(handle).dtypes[0][1] for name, handle in handles.items()}
    text = {name: f.col(handle).cast("string") for name, handle in handles.items()}
    schema = RECORDED_SCHEMA if "broker" in handles else ARRIVAL_SCHEMA
    malformed = f.col(MALFORMED) if MALFORMED in frame.columns else f.lit(None).cast("string")
    file = f.col(FILE) if FILE in frame.columns else f.lit(None).cast("string")
    values: dict[str, Column] = {name: f.lit(value) for name, value in wanted.constants.items()}
    units = {}
    for field in schema:
        name = field.name
        if name not in handles:
            values.setdefault(name, f.lit(None).cast("string" if field.type == pa.string() else "bigint"))
        elif field.type == pa.string():
            values[name] = f.when(f.trim(text[name]) != "", text[name])
        else:
            units[name] = "ns" if name in stamps else wanted.unit_of(name, kinds[name], labels[name])
            values[name] = _nanoseconds(f.col(handles[name]), kinds[name], units[name])
    read = frame.select(
        *(values[name].alias(name) for name in schema.names),
        *(text[name].alias(f"_{name}") for name in handles),
        malformed.alias(MALFORMED),
        file.alias(FILE),
    )
    checks: list[Check] = [(f.col(MALFORMED).isNotNull(), "malformed line", None)]
    for field in schema:
        if field.name in units:
            checks += _time_checks(field.name, units[field.name], wanted.earliest_ns, nullable=field.nullable)
        elif field.name in handles:
            if not field.nullable:
                checks.append((f.col(field.name).isNull(), f"missing {field.name}", field.name))
            checks.append((~_is_text(f.col(field.name)), f"{field.name} is not UTF-8", field.name))
    if "release_ns" in units:
        early = f.col("release_ns") < f.col("arrival_ns")
        checks.append((early, "release_ns before arrival_ns", "release_ns"))
    if "sent_ns" in units:
        checks.append((f.col("sent_ns") < f.col("release_ns"), "sent_ns before release_ns", "sent_ns"))
    why = f.lit(None)
    for wrong, reason, name in reversed(checks):
        label = f.lit(labels[name] if name else None).cast("string")
        value = f.col(f"_{name}") if name else f.lit(None).cast("string")
        why = f.when(
            wrong, f.struct(f.lit(reason).alias("reason"), label.alias("column"), value.alias("value"))
        ).otherwise(why)
    row = f.coalesce(MALFORMED, f.to_json(f.struct(*(f.col(f"_{name}").alias(labels[name]) for name in handles))))
    judged = read.select(*schema.names, why.alias("why"), *(f"_{name}" for name in handles), MALFORMED, FILE)
    bad = f.col("why").isNotNull()
    return judged.select(
        *schema.names,
        "why",
        f.when(bad, f.substring(row, 1, _LONGEST)).alias("row"),
        f.when(bad, f.col(FILE)).alias("file"),
    )


def _time_checks(name: str, unit: str, earliest_ns: int, *, nullable: bool) -> list[Check]:
    from pyspark.sql import functions as f

    text, value = f.col(f"_{name}"), f.col(name)
    missing = text.isNull() | (f.trim(text) == "")
    # A number that no integer of 64 bits holds is no time of day either, but it is a number.
    huge = text.rlike(_NUMBER) if unit in _FACTORS else f.lit(False)
    checks: list[Check] = [] if nullable else [(missing, f"missing {name}", name)]
    return [
        *checks,
        (value.isNull() & ~missing & ~huge, f"unparsable {name}", name),
        (
            (value.isNull() & ~missing) | (value < earliest_ns) | (value > LATEST_NS),
            f"{name} out of range",
            name,
        ),
    ]


def _nanoseconds(column: Column, kind: str, unit: str) -> Column:
    """Whole nanoseconds; null where there is no time, or none that 64 bits hold."""
    from pyspark.sql import functions as f

    if unit == "timestamp":
        return _scaled(f.unix_micros(column), "us")
    if unit in ("timestamp_ntz", "date"):
        text = column.cast("string")
        return _iso_nanoseconds(f.concat(text, f.lit(" 00:00:00")) if unit == "date" else text)
    if unit == "iso8601":
        return _iso_nanoseconds(column)
    return _scaled(column.cast("string") if kind in ("float", "double") else column, unit)


def _scaled(column: Column, unit: str) -> Column:
    from pyspark.sql import functions as f

    # Decimals multiply without loss up to 38 digits: 18 + 9 of the number, and 10 of the factor.
    if unit == "ns":
        return f.round(column.try_cast("decimal(38,9)")).try_cast("bigint")
    factor = f.lit(_FACTORS[unit]).cast("decimal(10,0)")
    return f.round(column.try_cast("decimal(27,9)") * factor).try_cast("bigint")


def _iso_nanoseconds(text: Column) -> Column:
    from pyspark.sql import functions as f

    clean = f.translate(f.trim(text), ",z", ".Z")
    tail = f.substring(clean, len("2023-11-14T22:13:20."), 20)
    zoneless = f.length(f.translate(tail, "Z+-", "")) == f.length(tail)
    zoned = f.when(zoneless, f.concat(clean, f.lit("Z"))).otherwise(clean)
    # Spark reads six digits of a fraction and passes over the rest.
    micros = f.unix_micros(f.when(clean.rlike(_ISO), zoned).try_cast("timestamp"))
    furthest = 9 * 10**15  # beyond it is out of range, and still fits when it is multiplied
    bounded = f.when(f.abs(micros) > furthest, furthest).otherwise(micros)
    rest = f.rpad(f.regexp_extract(tail, r"^\.\d{6}(\d{1,3})", 1), 3, "0")
    return bounded * NS_PER_US + rest.cast("bigint")


def _is_text(column: Column) -> Column:
    """Whether a name came through: Spark's readers put U+FFFD in the place of bytes that are no UTF-8."""
    from pyspark.sql import functions as f

    return column.isNull() | (f.is_valid_utf8(column) & ~column.contains("\ufffd"))


def _rows(judged: DataFrame) -> DataFrame:
    return judged.where("why is null").drop("why", "row", "file")


def _rejects(judged: DataFrame) -> DataFrame:
    return judged.where("why is not null").select("why.*", "row", "file")


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


def _rejected(reason: str, rows: int, examples: list[dict[str, str | None]], wanted: Wanted) -> Rejected:
    shown = (
        Example(_path(row["file"]), row["column"], row["value"], row["row"], wanted.hint(reason, row["value"]))
        for row in examples
    )
    return Rejected(reason, rows, tuple(shown))


def _path(uri: str | None) -> str | None:
    return unquote(re.sub("^file:/+", "/", uri)) if uri else None


def _limit(text: str) -> Callable[[int], Fraction]:
    """How many of so many rows may be rejected: '100', or '1%' of them."""
    share = text.strip().endswith("%")
    number = exact(text.strip().removesuffix("%"), "--max-rejects")
    if number < 0:
        raise InputError(f"--max-rejects {text}: it cannot be negative", value=text)
    return lambda rows: rows * number / 100 if share else number


def _refusal(rejected: tuple[Rejected, ...], rows: int, allowed: str) -> str:
    count = sum(line.rows for line in rejected)
    said = f"{count:,} of {rows:,} rows make no trace, and at most {allowed} may be left out: nothing was written."
    remedy = "Correct them or the options, or allow more with --max-rejects"
    return "\n".join([f"{said} {remedy}", *lines(rejected)])


def lines(rejected: Iterable[Rejected]) -> list[str]:
    """Rejects for people: a line for each reason, and a line for each example."""
    said = []
    for line in rejected:
        said.append(f"  {line.reason}: {line.rows:,}")
        for example in line.examples:
            value = f"{example.column} = {example.value!r}" if example.column else ""
            place = ": ".join(part for part in (example.file, value) if part)
            said.append(f"    {place}{f' ({example.hint})' if example.hint else ''} in {example.row}")
    return said


def iso(time_ns: int) -> str:
    """A time as ISO 8601 says it, in UTC."""
    return f"{np.datetime64(time_ns, 'ns')}Z"


@contextmanager
def _spark_errors(out: Path) -> Iterator[None]:
    """What goes wrong inside of Spark, in one line that names the remedy."""
    try:
        yield
    except (SRTMError, OSError):
        raise
    except Exception as error:
        raise translated(str(error), out) from None


def translated(text: str, out: Path) -> SRTMError:
    """One of our errors for what Spark says about its own; those of any job are `failures.explanation`'s."""
    if failed := re.search(r"\[FAILED_READ_FILE.*?reading file (\S+?)\.?\s", text):
        file = _path(failed[1])
        remedy = "replace or remove it" + ("" if not file or file.endswith(".parquet") else ", or --skip-unreadable")
        return TraceError(f"{file} cannot be read to its end, it is damaged or cut short: {remedy}", path=file)
    # Tasks write to names of their own, which nobody else has heard of.
    named = re.sub(r"cannot write \S+\.parquet:", f"cannot write {out}:", text)
    return explanation(named, Place("this session"))


def _listed(files: Iterable[Path]) -> str:
    names = [str(file) for file in files]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
