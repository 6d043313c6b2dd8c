"""How many tasks Spark runs at once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def parallelism(spark: SparkSession) -> int:
    """The session's default parallelism, or the cores of this machine if the session does not tell."""
    try:
        return int(spark.sparkContext.defaultParallelism)
    except Exception:  # Spark Connect has no context, and raises an error of its own
        return int(spark.conf.get("spark.default.parallelism", str(os.cpu_count() or 1)) or 1)
