"""Lets Spark find the format `srtm`: Spark looks for a `DefaultSource` in every package named pyspark_…."""

from srtm.pipeline.streaming.format import SrtmDataSource as DefaultSource

__all__ = ["DefaultSource"]
