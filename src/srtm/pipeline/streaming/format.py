"""The Spark format `srtm`: a topic as a stream, a table and a sink (docs/streaming.md).

    spark.readStream.format("srtm").option("topic", "traffic").load()

Spark finds it by itself if this package is installed (`pyspark_srtm`). If not, as on most Connect servers, call
`register(spark)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException
from pyspark.sql import functions as f
from pyspark.sql.datasource import DataSource

from srtm.errors import InputError
from srtm.pipeline.streaming.settings import Settings, read_settings
from srtm.pipeline.streaming.sink import BatchWriter, StreamWriter
from srtm.pipeline.streaming.source import SCHEMA, BatchReader, StreamReader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

KEY = "query string, batch bigint, partition int, sequence bigint"


class SrtmDataSource(DataSource):
    """An SRTM topic."""

    @classmethod
    def name(cls) -> str:
        """The name for `format(…)`."""
        return "srtm"

    def schema(self) -> str:
        """The columns of a message."""
        self._settings()  # report bad options as early as possible
        return SCHEMA

    def reader(self, schema: StructType) -> BatchReader:
        """For `spark.read`."""
        del schema
        return BatchReader(self._settings())

    def streamReader(self, schema: StructType) -> StreamReader:
        """For `spark.readStream`."""
        del schema
        return StreamReader(self._settings())

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:  # noqa: FBT001 - Spark's signature
        """For `DataFrame.write`."""
        if overwrite:
            raise InputError("a topic cannot be overwritten: write with mode('append')")
        return BatchWriter(self._sink_settings(), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: FBT001 - likewise
        """For `DataFrame.writeStream`."""
        del overwrite  # complete mode publishes every batch whole, as requested
        return StreamWriter(self._sink_settings(), schema)

    def _settings(self) -> Settings:
        return read_settings(self.options)

    def _sink_settings(self) -> Settings:
        settings = self._settings()
        if settings.several:
            raise InputError(f"topic = {settings.topic!r}: a sink publishes to one topic; name it in option topic")
        if settings.engine:
            raise InputError(
                "engine: a sink publishes through brokers; remove the option, and set controller or brokers"
            )
        return settings


def register(spark: SparkSession) -> None:
    """Register the format with a session that may not find it by itself."""
    try:
        spark.dataSource.register(SrtmDataSource)
    except PySparkException as problem:
        if problem.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise


def unwrapped(frame: DataFrame) -> DataFrame:
    """Messages that the sink published with `keys`: adds the column `key`, and restores bodies from envelopes.

    `unwrapped(frame).dropDuplicates(["key"])` holds each message once.
    """
    fields: Any = f.from_json(f.col("body").cast("string"), f"srtm struct<{_struct(KEY)}>, body binary")
    return frame.withColumn("_fields", fields).select(
        *(f.coalesce("_fields.body", "body").alias(name) if name == "body" else name for name in frame.columns),
        f.col("_fields.srtm").alias("key"),
    )


def _struct(fields: str) -> str:
    return ", ".join(":".join(field.split()) for field in fields.split(", "))
