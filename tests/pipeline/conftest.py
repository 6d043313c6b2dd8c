"""One Spark, and one standing server, for all pipeline tests; started when the first of them needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from srtm.pipeline.runtime import server as servers
from srtm.pipeline.session import spark_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    # Few partitions, because every one costs a task: data in tests is small.
    with spark_session(master="local[2]", options={"spark.sql.shuffle.partitions": "2"}) as session:
        yield session


@pytest.fixture(scope="session")
def server() -> Iterator[servers.Server]:
    yield servers.start()
    servers.stop()
