"""The city's Spark job: count vehicles per junction, and tell the lights how long to stay green."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import city

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery


def start(spark: SparkSession, controller: str, checkpoint: Path) -> StreamingQuery:
    """Start the job from topic `traffic` to topic `signals`, one batch per second."""
    from pyspark.sql import functions as f

    report: Any = f.from_json(f.col("body").cast("string"), "junction int, vehicles int")
    counts = (
        spark.readStream.format("srtm")
        .option("controller", controller)
        .option("topic", city.TRAFFIC)
        .load()
        .select(report.alias("report"), "arrival")
        .withWatermark("arrival", "1 second")
        .groupBy(f.window("arrival", "1 second"), "report.junction")
        .agg(f.sum("report.vehicles").alias("vehicles"), f.max("arrival").alias("newest"))
    )
    green: Any = f.least(f.lit(60), 10 + f.col("vehicles") / 10).cast("int")
    signals = counts.select(
        f.to_json(f.struct("junction", "vehicles", green.alias("green_s"), f.unix_micros("newest").alias("newest_us")))
        .cast("binary")
        .alias("body")
    )
    return (
        signals.writeStream.format("srtm")
        .option("controller", controller)
        .option("topic", city.SIGNALS)
        .option("checkpointLocation", str(checkpoint))
        .trigger(processingTime="1 second")
        .start()
    )
