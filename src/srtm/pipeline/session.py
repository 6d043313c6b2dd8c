"""The one place that makes a Spark session.

`local[*]` by default; `master` is a cluster (`spark://…`), `remote` a Spark Connect server (`sc://…`), and `standing`
allows the server of `srtm spark up` if it runs. Spark is quiet: failures are raised, not logged, as SRTM's errors
(`runtime.failures`). Workers run the driver's Python, and receive this package.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import srtm
from srtm.errors import InputError, PipelineError
from srtm.pipeline.runtime.archive import JVM_OPTIONS, archive_options, make_archive_later
from srtm.pipeline.runtime.failures import Place, check_reachable, explained
from srtm.pipeline.runtime.java import java_home
from srtm.pipeline.runtime.server import running_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession as SparkSession  # for modules that may not import pyspark

_QUIET = """\
status = off
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex{0}
# Failures are raised in Python; Java's stack traces on the way there do not help.
logger.context.name = org.apache.spark.SparkContext
logger.context.level = off
logger.disk.name = org.apache.spark.storage.DiskBlockObjectWriter
logger.disk.level = off
logger.executor.name = org.apache.spark.executor.Executor
logger.executor.level = off
logger.tasks.name = org.apache.spark.scheduler.TaskSetManager
logger.tasks.level = off
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
# Spark waits for a cluster that is full, and this logger says so.
logger.scheduler.name = org.apache.spark.scheduler.TaskSchedulerImpl
logger.scheduler.level = WAITING
"""
_ADDED = "spark.driver.extraJavaOptions"


@contextmanager
def spark_session(
    *,
    master: str | None = None,
    remote: str | None = None,
    options: dict[str, str] | None = None,
    standing: bool = False,
    heavy: bool = False,
) -> Iterator[SparkSession]:
    """A session for a `with` block; everything it started ends with the block.

    `standing` allows the server of `srtm spark up`, if it runs the same versions as this process and no master, server
    or options are given. `heavy` is for work that Java itself does, such as parsing: it starts more slowly, and is
    twice as fast once warm.
    """
    if master and remote:
        raise InputError(f"give either a master ({master}) or a Connect server ({remote}), not both")
    try:
        import pyspark  # noqa: F401
    except ImportError:
        raise PipelineError("the pipeline needs Spark: pip install 'srtm[spark]'") from None
    _hush()
    options = options or {}
    server = running_server() if standing and not (master or remote or options) else None
    with tempfile.TemporaryDirectory(prefix="srtm-spark-", ignore_cleanup_errors=True) as folder:
        if server:
            made = _on_server(server.url, {}, None)
        elif remote:
            made = _on_server(remote, options, Path(folder))
        else:
            made = _with_driver(master or "local[*]", options, Path(folder), heavy=heavy)
        with made as session:
            yield session


@contextmanager
def _on_server(url: str, options: dict[str, str], folder: Path | None) -> Iterator[SparkSession]:
    """A session on a Connect server; with a folder to pack it in, this package is sent to the workers."""
    from pyspark.sql import SparkSession

    place = Place(url.partition("/;")[0])
    with explained(place):
        check_reachable(place)
        builder = SparkSession.builder.appName("srtm").remote(url)
        for name, value in options.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        try:
            if folder:
                session.addArtifacts(str(_package(folder)), pyfile=True)
            yield session
        except BaseException:
            session.interruptAll()  # otherwise the server keeps running the job
            raise
        finally:
            session.stop()


@contextmanager
def _with_driver(master: str, options: dict[str, str], folder: Path, *, heavy: bool) -> Iterator[SparkSession]:
    """A session with the driver in this process, on a cluster or on this machine's cores."""
    from pyspark.sql import SparkSession

    local = master.startswith("local")
    place = Place(master, options.get("spark.local.dir", tempfile.gettempdir()))
    with explained(place):
        check_reachable(place)
        _prepare_driver(options)
        java = [
            *JVM_OPTIONS,
            *(["-XX:TieredStopAtLevel=4"] if heavy else []),
            *(archive_options() if local else []),
            _logging(folder, local=local),
            options.get(_ADDED, ""),
        ]
        builder = SparkSession.builder.appName("srtm")
        for name, value in {**_driver_options(master, folder), **options, _ADDED: " ".join(java)}.items():
            builder = builder.config(name, value)
        with _no_orphans():
            session = builder.getOrCreate()
        try:
            if not local:
                session.addArtifacts(str(_package(folder)), pyfile=True)
            yield session
        finally:
            _stop(session)
    if local:
        make_archive_later()


@contextmanager
def _no_orphans() -> Iterator[None]:
    """Kill the JVM being started if an exception interrupts its start: nothing else knows of it yet."""
    before = _children()
    try:
        yield
    except BaseException:
        for pid in _children() - before:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise


def _children() -> set[int]:
    found = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):
            if int(file.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(file.parent.name))
    return found


def _hush() -> None:
    """Stop PySpark and py4j from logging stack traces of what they raise, for example at Ctrl-C."""
    from pyspark.logger import PySparkLogger

    logging.getLogger("py4j").setLevel(logging.CRITICAL + 10)
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger", "pyspark.sql.connect.logging"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 10)
    root = logging.getLogger()
    if _not_from_py4j not in root.filters:
        root.addFilter(_not_from_py4j)


def _not_from_py4j(record: logging.LogRecord) -> bool:
    return "py4j" not in record.pathname


def _stop(session: SparkSession) -> None:
    # PySpark waits a second for its accumulator thread. There are no accumulators, so let it end by itself.
    context = session.sparkContext
    counting = getattr(context, "_accumulatorServer", None)
    if counting:
        context._accumulatorServer = None  # type: ignore[assignment]
        counting.handle_error = lambda *_: None  # no stack trace when Java disconnects
        threading.Thread(target=counting.shutdown, daemon=True).start()
    session.stop()


def _prepare_driver(options: dict[str, str]) -> None:
    os.environ["JAVA_HOME"] = str(java_home())
    # Without these, workers run the first `python3` on the path.
    os.environ["PYSPARK_PYTHON"] = options.get("spark.pyspark.python", sys.executable)
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", " ".join(JVM_OPTIONS))  # of the JVM that composes the command line


def _driver_options(master: str, folder: Path) -> dict[str, str]:
    return {
        "spark.master": master,
        "spark.driver.host": os.environ["SPARK_LOCAL_IP"],
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.local.dir": str(folder),
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # Rows per Arrow batch: with the default of 10,000, jobs on sorted rows take twice as long.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
    }


def _logging(folder: Path, *, local: bool) -> str:
    file = folder / "log4j2.properties"
    file.write_text(_QUIET.replace("WAITING", "off" if local else "warn"))
    return f"-Dlog4j2.configurationFile={file.as_uri()}"


def _package(folder: Path) -> Path:
    """A zip of this package, for workers that lack it.

    Workers of a shared server keep files by name, so the name identifies the content: the same source always gives the
    same bytes, and another source gives another name.
    """
    source = Path(srtm.__file__).parent
    packed = BytesIO()
    with ZipFile(packed, "w", ZIP_DEFLATED) as package:
        for file in sorted(source.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                package.writestr(ZipInfo(str(file.relative_to(source.parent))), file.read_bytes(), ZIP_DEFLATED)
    content = packed.getvalue()
    path = folder / f"srtm-{sha256(content).hexdigest()[:16]}.zip"
    path.write_bytes(content)
    return path
