"""Analysis of traces on Spark: the same jobs on a laptop, on a cluster and through Spark Connect.

The only folder that imports pyspark. Spark reads, partitions, shuffles and scales; `model/` computes.
"""

from srtm.pipeline.shipping import ship

__all__ = ["ship"]
