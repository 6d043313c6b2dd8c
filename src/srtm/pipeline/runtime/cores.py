"""How many tasks Spark runs at once."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MANY = 65_536  # more than any Spark has cores


def parallelism(spark: SparkSession) -> int:
    """The session's default parallelism: that of the cluster, whatever machine the client runs on."""
    try:
        return int(spark.sparkContext.defaultParallelism)
    except Exception:  # Spark Connect has no context, and raises an error of its own
        return _of_server(spark)


def _of_server(spark: SparkSession) -> int:
    """The number of partitions that a Connect server gives to a range: it has no other way to ask."""
    plan = str(spark.sql(f"EXPLAIN SELECT * FROM range({_MANY})").toArrow()["plan"][0])
    if splits := re.search(r"\bsplits=(\d+)", plan):
        return int(splits[1])
    from pyspark.sql import functions as f

    numbers = spark.range(_MANY).select(f.spark_partition_id().alias("number"))  # takes a job
    return 1 + int(numbers.agg(f.max("number")).toArrow()[0][0].as_py())
