"""One Spark session, one Connect server and one standalone cluster per worker; each starts when first needed.

A plugin of tests/conftest.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from srtm.pipeline.runtime.server import Server
    from tests.pipeline.runtime.standalone import Cluster


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A local session. Two shuffle partitions, because each costs a task and data in tests is small."""
    from srtm.pipeline.session import spark_session

    with spark_session(master="local[2]", options={"spark.sql.shuffle.partitions": "2"}) as session:
        yield session


@pytest.fixture(scope="session")
def connect_server() -> Iterator[Server]:
    """The standing Connect server, which commands of this process find by themselves."""
    from srtm.pipeline.runtime import server

    yield server.start()
    server.stop()


@pytest.fixture(scope="session")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A master and two workers of one core each."""
    from tests.pipeline.runtime.standalone import standalone

    with standalone(tmp_path_factory.mktemp("spark-cluster")) as cluster:
        yield cluster
