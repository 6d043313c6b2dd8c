"""The one place that makes a Spark session, or takes the caller's.

`local[*]` unless told otherwise; `master` is a cluster (`spark://…`), `remote` a Spark Connect server (`sc://…`). Spark
is quiet: what goes wrong is raised, not logged. Workers run the driver's Python and get this package along.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import srtm
from srtm.errors import PipelineError
from srtm.pipeline.java import java_home

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

_QUIET = """\
status = off
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex{0}
# A task that fails is raised in Python; its stack trace on the way there helps nobody.
logger.executor.name = org.apache.spark.executor.Executor
logger.executor.level = off
logger.tasks.name = org.apache.spark.scheduler.TaskSetManager
logger.tasks.level = off
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
"""


@contextmanager
def spark_session(
    *, master: str | None = None, remote: str | None = None, options: dict[str, str] | None = None
) -> Iterator[SparkSession]:
    """A session for the time of a `with` block; everything that it started ends with it."""
    if master and remote:
        raise PipelineError(f"give a master ({master}) or a Connect server ({remote}), not both")
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise PipelineError("the pipeline runs on Spark: install it with pip install 'srtm[spark]'") from None
    logging.getLogger("py4j").setLevel(logging.CRITICAL + 10)  # it logs a stack trace for every Ctrl-C
    folder = Path(tempfile.mkdtemp(prefix="srtm-spark-"))
    try:
        builder = SparkSession.builder.appName("srtm")
        if remote:
            builder = builder.remote(remote)
        else:
            _prepare_driver()
            for name, value in _driver_options(master or "local[*]", folder).items():
                builder = builder.config(name, value)
        for name, value in (options or {}).items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        try:
            if remote or not (master or "local").startswith("local"):
                session.addArtifacts(str(_package(folder)), pyfile=True)
            yield session
        finally:
            session.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _prepare_driver() -> None:
    os.environ["JAVA_HOME"] = str(java_home())
    # Without these, workers run whatever `python3` is first on the path.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def _driver_options(master: str, folder: Path) -> dict[str, str]:
    logs = folder / "log4j2.properties"
    logs.write_text(_QUIET)
    java = f"-Dlog4j2.configurationFile={logs.as_uri()} -XX:+UseSerialGC -XX:TieredStopAtLevel=1"
    return {
        "spark.master": master,
        "spark.driver.host": os.environ["SPARK_LOCAL_IP"],
        "spark.driver.extraJavaOptions": java,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.local.dir": str(folder),
        "spark.sql.execution.arrow.pyspark.enabled": "true",
    }


def _package(folder: Path) -> Path:
    """A zip of this package, for workers that do not have it."""
    source = Path(srtm.__file__).parent
    copy = folder / "package" / "srtm"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return Path(shutil.make_archive(str(folder / "srtm"), "zip", copy.parent))
