"""By which Spark finds the format `srtm`: it looks for a `DefaultSource` in every package called pyspark_…."""

from srtm.pipeline.streaming.format import SrtmDataSource as DefaultSource

__all__ = ["DefaultSource"]
