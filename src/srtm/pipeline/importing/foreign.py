"""Files that SRTM did not write: found, inspected, and read by Spark's own readers.

In: names of files, folders or patterns; CSV, JSON lines or Parquet, the first two also as gzip or bzip2. Out: a
`Source` for every layout among them. All columns of CSV and JSON are read as text, so no digit is lost before its unit
is known. This module opens files only for their headers, and reports an unreadable one before any job starts.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import re
import zlib
from collections import defaultdict
from glob import glob, has_magic
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from srtm.errors import InputError, TraceError
from srtm.workload.uris import absolute, is_remote

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from pyspark.sql import DataFrame, SparkSession

FORMS = ("csv", "jsonl", "parquet")
FILE, MALFORMED = "_srtm_file", "_srtm_malformed"
_ENDINGS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_OPENERS: dict[str, Callable[..., IO[bytes]]] = {".gz": gzip.open, ".bz2": bz2.open}  # type: ignore[dict-item]
_SAMPLE = 1_000  # lines of a JSON file in which every column must occur
_UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error, pa.ArrowException)


class Source(NamedTuple):
    """Files of one layout: their columns, and a frame that reads them.

    The frame has the wanted columns, under the names of `handles`, as well as `FILE` and `MALFORMED`: the text of a
    line that could not be parsed. `stamps` are columns whose type says that they are whole nanoseconds.
    """

    files: tuple[Path, ...]
    columns: tuple[str, ...]
    frame: DataFrame
    handles: dict[str, str]
    stamps: frozenset[str] = frozenset()


class Found(NamedTuple):
    """The sources of an import, and the skipped files with the reason for each."""

    sources: list[Source]
    skipped: dict[Path, str]


def find(inputs: Iterable[str | Path], form: str | None = None) -> dict[Path, str]:
    """All files that the inputs name, with the form of each: by its suffix unless given."""
    if form is not None and form not in FORMS:
        raise InputError(f"unknown file format {form!r}; known: {', '.join(FORMS)}", value=form)
    found: dict[Path, str] = {}
    for given in map(str, inputs):
        if is_remote(given):
            remedy = "copy it here, or pass a DataFrame that Spark reads from it to ingest.normalise"
            raise TraceError(f"cannot import {given}, which is not a file of this machine: {remedy}", path=given)
        name = absolute(given) if given.startswith("file:") else given
        path = Path(name)
        matches = [path] if path.exists() else [Path(match) for match in sorted(glob(name, recursive=True))]  # noqa: PTH207
        if not matches:
            what = "matches no file" if has_magic(name) else "does not exist"
            raise TraceError(f"{name} {what}: check the name", path=name)
        for match in matches:
            files = _inside(match, form) if match.is_dir() else [match]
            for file in files:
                found[file.absolute()] = form or _form_of(file)
                if file.name.startswith(("_", ".")):
                    raise TraceError(f"{file}: Spark ignores files whose name starts with _ or .: rename it")
    return found


def _inside(folder: Path, form: str | None) -> list[Path]:
    files = [
        file
        for file in sorted(folder.rglob("*"))
        if file.is_file()
        and not any(part.startswith(("_", ".")) for part in file.relative_to(folder).parts)
        and (form is not None or _ending(file) in _ENDINGS)
    ]
    if not files:
        raise TraceError(f"folder {folder} holds no file with a known suffix: name the format of its files with --from")
    return files


def _ending(file: Path) -> str:
    return Path(file.stem if file.suffix.lower() in _OPENERS else file.name).suffix.lower()


def _form_of(file: Path) -> str:
    form = _ENDINGS.get(_ending(file))
    if form is None:
        raise TraceError(f"{file}: its suffix does not tell its format: add --from {' or --from '.join(FORMS)}")
    return form


def sources(
    spark: SparkSession,
    files: dict[Path, str],
    wanted: Collection[str],
    *,
    delimiter: str | None = None,
    header: bool = True,
    skip_unreadable: bool = False,
) -> Found:
    """One source for every layout among the files; files without rows are in none."""
    layouts: dict[Layout, list[Path]] = defaultdict(list)
    keys: dict[str, str] = {}
    names: dict[tuple[tuple[str, str], ...], tuple[str, ...]] = {}
    skipped: dict[Path, str] = {}
    for file, form in files.items():
        between = delimiter or ("\t" if _ending(file) == ".tsv" else ",")
        try:
            if skip_unreadable:
                _read_through(file)
            columns = _columns_of(file, form, between, header=header)
        except _UNREADABLE as error:
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            if not skip_unreadable:
                remedy = "remove it, or skip it with --skip-unreadable"
                raise TraceError(f"{file} is not a readable {form} file: {said}; {remedy}", path=str(file)) from None
            skipped[file] = said
            continue
        if form == "jsonl":  # a key missing in a file is a value missing in its lines
            keys |= columns
        if form == "parquet":  # unused columns do not make another layout
            names.setdefault(used := tuple(item for item in columns.items() if item[0] in wanted), tuple(columns))
            layouts[Layout(form, "", used)].append(file)
        elif columns:
            layouts[Layout(form, between, () if form == "jsonl" else tuple(columns.items()))].append(file)
    if skipped and len(skipped) == len(files):
        file, said = next(iter(skipped.items()))
        raise TraceError(f"none of the {len(files)} files can be read; the first is {file}: {said}", path=str(file))
    found = []
    for layout, members in layouts.items():
        if layout.form == "csv":
            found.append(_csv(spark, members, dict(layout.columns), wanted, layout.delimiter, header=header))
        elif layout.form == "jsonl":
            found.append(_json(spark, members, keys, wanted))
        else:
            found.append(_parquet(spark, members, dict(layout.columns), names[layout.columns]))
    return Found(found, skipped)


class Layout(NamedTuple):
    """What files must share to be read together."""

    form: str
    delimiter: str
    columns: tuple[tuple[str, str], ...]


def _read_through(file: Path) -> None:
    """Read a compressed file to its end: only there does a truncated one fail."""
    if file.suffix.lower() in _OPENERS:
        with _opened(file) as stream:
            while stream.read(1 << 20):
                pass


def _columns_of(file: Path, form: str, delimiter: str, *, header: bool) -> dict[str, str]:
    """The name and type of every column; empty for an empty file."""
    if form == "csv":
        return _csv_columns(file, delimiter, header=header)
    return _json_columns(file) if form == "jsonl" else _parquet_columns(file)


def _opened(file: Path) -> IO[bytes]:
    opener = _OPENERS.get(file.suffix.lower())
    return opener(file, "rb") if opener else file.open("rb")


def _csv_columns(file: Path, delimiter: str, *, header: bool) -> dict[str, str]:
    """The names of the columns: those of the first line, or 1, 2, 3 … without a header."""
    with _opened(file) as stream:
        lines = (line.decode("utf-8-sig") for line in stream)
        first = next((line for line in lines if line.strip()), None)
    if first is None:
        return {}
    names = next(csv.reader([first], delimiter=delimiter))
    if not header:
        return {str(number): "text" for number in range(1, len(names) + 1)}
    return {_unique(name.strip(), names[:position]): "text" for position, name in enumerate(names)}


def _unique(name: str, before: Sequence[str]) -> str:
    """The name, numbered if an earlier column has it too, so every column keeps its place."""
    seen = sum(other.strip() == name for other in before)
    return f"{name} ({seen + 1})" if seen else name


def _json_columns(file: Path) -> dict[str, str]:
    names: dict[str, str] = {}
    some = False
    with _opened(file) as stream:
        for line in islice(stream, _SAMPLE):
            some = some or bool(line.strip())
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except ValueError:
                continue  # Spark's reader reports malformed lines
            for entry in row if isinstance(row, list) else [row]:
                names |= dict.fromkeys(entry, "text") if isinstance(entry, dict) else {}
    if some and not names:
        raise TraceError(f"{file}: none of its first {_SAMPLE:,} lines is a JSON object; check --from")
    return dict(sorted(names.items()))


def _parquet_columns(file: Path) -> dict[str, str]:
    footer = pq.read_metadata(file)
    leaves = {footer.schema.column(i).path: footer.schema.column(i) for i in range(footer.num_columns)}
    return {
        field.name: "timestamp"
        if field.name in leaves and leaves[field.name].physical_type == "INT96"
        else _spark_type(field.type)
        for field in footer.schema.to_arrow_schema()
    }


def _spark_type(kind: pa.DataType) -> str:
    """The type to request from Spark for a column; 'stamp' is a bigint of nanoseconds, '' an unsupported type."""
    if pa.types.is_dictionary(kind):
        return _spark_type(kind.value_type)
    if pa.types.is_timestamp(kind):
        return "stamp" if kind.unit == "ns" else "timestamp" if kind.tz else "timestamp_ntz"
    if pa.types.is_uint64(kind):
        return "decimal(20,0)"
    if pa.types.is_integer(kind):
        return "bigint"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    text = (pa.types.is_string(kind), pa.types.is_large_string(kind), pa.types.is_binary(kind))
    if any(text):
        return "string"
    return {"double": "double", "float": "float", "date32[day]": "date", "bool": "boolean"}.get(str(kind), "")


def _csv(
    spark: SparkSession,
    files: list[Path],
    columns: dict[str, str],
    wanted: Collection[str],
    delimiter: str,
    *,
    header: bool,
) -> Source:
    handles = {name: f"_c{position}" for position, name in enumerate(columns)}
    # With column pruning, the reader skips unused columns and does not notice that a line is too short.
    reader = spark.read.schema(", ".join(f"{handle} string" for handle in [*handles.values(), MALFORMED])).options(
        sep=delimiter,
        header=header,
        escape='"',
        mode="PERMISSIVE",
        columnNameOfCorruptRecord=MALFORMED,
        columnPruning=False,
    )
    frame = _with_file(reader.csv(_escaped(files)), [*handles.values(), MALFORMED])
    used = {name: handle for name, handle in handles.items() if name in wanted}
    return Source(tuple(files), tuple(columns), frame, used)


def _json(spark: SparkSession, files: list[Path], columns: dict[str, str], wanted: Collection[str]) -> Source:
    used = {name: name for name in columns if name in wanted}
    schema = ", ".join(f"{quoted(name)} string" for name in [*used, MALFORMED])
    reader = spark.read.schema(schema).options(mode="PERMISSIVE", columnNameOfCorruptRecord=MALFORMED)
    frame = _with_file(reader.json(_escaped(files)), [*used, MALFORMED])
    return Source(tuple(files), tuple(columns), frame, used)


def _parquet(spark: SparkSession, files: list[Path], columns: dict[str, str], names: tuple[str, ...]) -> Source:
    from pyspark.sql import functions as f

    if useless := [name for name in columns if not columns[name]]:
        raise TraceError(f"{files[0]}: column {useless[0]!r} is nested, but a trace takes plain values")
    # An explicit schema reads nanoseconds unchanged; Spark's own time types stop at microseconds.
    types = {name: "bigint" if kind == "stamp" else kind for name, kind in columns.items()}
    reader = spark.read.schema(", ".join(f"{quoted(name)} {kind}" for name, kind in types.items()))
    frame = _with_file(reader.parquet(*_escaped(files)), [*columns])
    frame = frame.withColumn(MALFORMED, f.lit(None).cast("string"))
    stamps = frozenset(name for name, kind in columns.items() if kind == "stamp")
    return Source(tuple(files), names, frame, {name: name for name in columns}, stamps)


def _with_file(frame: DataFrame, columns: Sequence[str]) -> DataFrame:
    from pyspark.sql import functions as f

    return frame.select(*map(quoted, columns), f.col("_metadata.file_path").alias(FILE))


def quoted(name: str) -> str:
    """A column name as SQL takes it."""
    return "`" + name.replace("`", "``") + "`"


def _escaped(files: Iterable[Path]) -> list[str]:
    """Paths escaped for Spark, which would read them as patterns."""
    special = str.maketrans({sign: f"\\{sign}" for sign in "\\*?[]{}"})
    return [str(file).translate(special) for file in files]


def path_of(uri: str | None) -> str | None:
    """The path behind the URI that Spark gives a file."""
    return unquote(re.sub("^file:/+", "/", uri)) if uri else None
