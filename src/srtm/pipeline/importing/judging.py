"""Rows of others judged: each becomes a row of a trace, or a reject with its reason.

In: a DataFrame of any columns. Out: the columns of a trace, and `why` for each row that does not make one. Times are
read as decimals and become whole nanoseconds without passing through a float; digits below the nanosecond are rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from srtm.model.scan import LATEST_NS
from srtm.pipeline.importing.columns import FACTORS
from srtm.pipeline.importing.foreign import FILE, MALFORMED
from srtm.units import NS_PER_US
from srtm.workload.trace import ARRIVAL_SCHEMA, RECORDED_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql import Column, DataFrame

    from srtm.pipeline.importing.columns import Columns

    Check = tuple[Column, str, str | None]  # the condition of a fault, its reason, and the column of the trace it is in

_NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
_ISO = r"^\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}(\.\d{1,9})?(Z|[+-]\d{2}(:?\d{2})?)?$"
_LONGEST = 300  # characters of a row that are shown


def judged(
    frame: DataFrame,
    handles: Mapping[str, str],
    columns: Columns,
    labels: Mapping[str, str] | None = None,
    stamps: Iterable[str] = (),
) -> DataFrame:
    """The columns of the trace; and for rejected rows `why` (reason, column, value), the row as text, and its file."""
    from pyspark.sql import functions as f

    labels = labels or {name: handle[1:-1] for name, handle in handles.items()}
    kinds = {name: frame.select(handle).dtypes[0][1] for name, handle in handles.items()}
    text = {name: f.col(handle).cast("string") for name, handle in handles.items()}
    schema = RECORDED_SCHEMA if "broker" in handles else ARRIVAL_SCHEMA
    malformed = f.col(MALFORMED) if MALFORMED in frame.columns else f.lit(None).cast("string")
    file = f.col(FILE) if FILE in frame.columns else f.lit(None).cast("string")
    values: dict[str, Column] = {name: f.lit(value) for name, value in columns.constants.items()}
    units = {}
    for field in schema:
        name = field.name
        if name not in handles:
            values.setdefault(name, f.lit(None).cast("string" if field.type == pa.string() else "bigint"))
        elif field.type == pa.string():
            values[name] = f.when(f.trim(text[name]) != "", text[name])
        else:
            units[name] = "ns" if name in stamps else columns.unit_of(name, kinds[name], labels[name])
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
            checks += _time_checks(field.name, units[field.name], columns.earliest_ns, nullable=field.nullable)
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
    # A number beyond 64 bits is out of range rather than unparsable.
    huge = text.rlike(_NUMBER) if unit in FACTORS else f.lit(False)
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
    """Whole nanoseconds; null if there is no time, or it exceeds 64 bits."""
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
    factor = f.lit(FACTORS[unit]).cast("decimal(10,0)")
    return f.round(column.try_cast("decimal(27,9)") * factor).try_cast("bigint")


def _iso_nanoseconds(text: Column) -> Column:
    from pyspark.sql import functions as f

    clean = f.translate(f.trim(text), ",z", ".Z")
    tail = f.substring(clean, len("2023-11-14T22:13:20."), 20)
    zoneless = f.length(f.translate(tail, "Z+-", "")) == f.length(tail)
    zoned = f.when(zoneless, f.concat(clean, f.lit("Z"))).otherwise(clean)
    # Spark reads six digits of a fraction and ignores the rest.
    micros = f.unix_micros(f.when(clean.rlike(_ISO), zoned).try_cast("timestamp"))
    furthest = 9 * 10**15  # out of range, but does not overflow when multiplied
    bounded = f.when(f.abs(micros) > furthest, furthest).otherwise(micros)
    rest = f.rpad(f.regexp_extract(tail, r"^\.\d{6}(\d{1,3})", 1), 3, "0")
    return bounded * NS_PER_US + rest.cast("bigint")


def _is_text(column: Column) -> Column:
    """Whether a name is intact: Spark's readers replace bytes that are not UTF-8 by U+FFFD."""
    from pyspark.sql import functions as f

    return column.isNull() | (f.is_valid_utf8(column) & ~column.contains("\ufffd"))
