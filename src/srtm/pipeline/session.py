"""The one place that makes a Spark session, or finds one.

A session that exists in this process is used as it is: its settings stay, and it lives on. Otherwise `master` is a
cluster (`spark://…`), `remote` a Spark Connect server (`sc://…`), and `standing` allows the server of `srtm spark up`;
without them, spark-submit and Spark's own configuration decide, and `local[*]` is the last resort. Spark is quiet:
failures are raised, not logged, as SRTM's errors (`runtime.failures`). Workers receive this package.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from srtm.errors import InputError, PipelineError
from srtm.pipeline.runtime.archive import JVM_OPTIONS, archive_options, make_archive_later
from srtm.pipeline.runtime.configured import configured, submitted
from srtm.pipeline.runtime.failures import Place, check_reachable, explained
from srtm.pipeline.runtime.java import java_home
from srtm.pipeline.runtime.quiet import hushed, java_logging
from srtm.pipeline.runtime.server import running_server
from srtm.pipeline.shipping import ship

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession as SparkSession  # for modules that may not import pyspark

_ADDED = "spark.driver.extraJavaOptions"
_HERE = "127.0.0.1"
_BARE = {"spark.master": "local[*]", "spark.app.name": "pyspark-shell"}  # of a JVM that starts without options
_SQL = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Rows per Arrow batch: with the default of 10,000, jobs on sorted rows take twice as long.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
}


@contextmanager
def spark_session(
    *,
    master: str | None = None,
    remote: str | None = None,
    options: dict[str, str] | None = None,
    standing: bool = False,
    heavy: bool = False,
) -> Iterator[SparkSession]:
    """A session for a `with` block; everything it started ends with the block, and nothing else does.

    A session that this process has already is used as it is; a master or options that differ from its own are an
    `InputError`. `standing` allows the server of `srtm spark up`, if it runs the same versions as this process and
    nothing else says where to run. `heavy` is for work that Java itself does, such as parsing: it starts more slowly,
    and is twice as fast once warm.
    """
    if master and remote:
        raise InputError(f"give either a master ({master}) or a Connect server ({remote}), not both")
    try:
        import pyspark  # noqa: F401
    except ImportError:
        raise PipelineError("the pipeline needs Spark: pip install 'srtm[spark]'") from None
    options = options or {}
    found = _existing()
    if not (found or master or remote) and os.environ.get("SPARK_REMOTE", "").startswith("sc://"):
        remote = os.environ["SPARK_REMOTE"]
    if remote:
        made = _on_server(remote, options, found)
    elif found:
        made = _as_it_is(found, {"spark.master": master, **options} if master else options)
    else:
        known = configured()
        master = master or options.get("spark.master") or known.get("spark.master")
        server = running_server() if standing and not (master or options) else None
        if server:
            made = _on_server(server.url, {}, None, shipping=False)
        else:
            made = _with_driver(master or "local[*]", options, known, heavy=heavy)
    with made as session:
        yield session


def _existing() -> SparkSession | None:
    """The session of this process, or one on its context."""
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession, is_remote

    if not is_remote():
        from pyspark import SparkContext

        if SparkContext._active_spark_context is None:
            return None
    try:
        return SparkSession.active()
    except PySparkRuntimeError:
        return None if is_remote() else SparkSession.builder.getOrCreate()


def _has_driver(session: SparkSession) -> bool:
    return not type(session).__module__.startswith("pyspark.sql.connect")


@contextmanager
def _as_it_is(session: SparkSession, wanted: Mapping[str, str]) -> Iterator[SparkSession]:
    """A session that somebody else made, and keeps."""
    where = session.conf.get("spark.master", None) or "a Connect server"
    if "spark.master" in wanted:
        check_reachable(Place(wanted["spark.master"]))
    different = sorted(name for name, value in wanted.items() if session.conf.get(name, None) != value)
    if different:
        raise InputError(
            f"this process has a Spark session on {where}, which stays as it is; it differs in {', '.join(different)}: "
            "omit that, or stop the session first"
        )
    with explained(Place(where)):
        yield session


@contextmanager
def _on_server(
    url: str, options: dict[str, str], found: SparkSession | None, *, shipping: bool = True
) -> Iterator[SparkSession]:
    """A session of its own on a Connect server, beside any that this process has there."""
    from pyspark.sql import SparkSession

    place = Place(url.partition("/;")[0])
    with hushed(), explained(place), _environment():
        check_reachable(place)
        if found and _has_driver(found):
            raise InputError(
                f"this process has a Spark session on {found.conf.get('spark.master')}, and PySpark cannot use a "
                f"Connect server beside it: stop the session first, or omit {place.address}"
            )
        builder = SparkSession.builder.appName("srtm").remote(url)
        for name, value in options.items():
            builder = builder.config(name, value)
        session = builder.create()
        try:
            if shipping:
                ship(session)
            yield session
        except BaseException:
            session.interruptAll()  # otherwise the server keeps running the job
            raise
        finally:
            session.stop()


@contextmanager
def _with_driver(master: str, options: dict[str, str], known: dict[str, str], *, heavy: bool) -> Iterator[SparkSession]:
    """A session with the driver in this process, on a cluster or on this machine's cores."""
    local = master.startswith("local")
    with (
        tempfile.TemporaryDirectory(prefix="srtm-spark-", ignore_cleanup_errors=True) as name,
        hushed(),
        explained(Place(master, (known | options).get("spark.local.dir", tempfile.gettempdir()))),
    ):
        folder, way = Path(name), check_reachable(Place(master))
        wanted = _SQL | known | options | {"spark.master": master}
        if not submitted():
            wanted = _driver_options(folder, os.environ.get("SPARK_LOCAL_IP", _HERE if local else way)) | wanted
            java = [
                *JVM_OPTIONS,
                *(["-XX:TieredStopAtLevel=4"] if heavy else []),
                *(archive_options() if local else []),
                java_logging(folder, local=local),
                wanted.get(_ADDED, ""),
            ]
            wanted[_ADDED] = " ".join(java)
        with _started(wanted, known, local=local) as session:
            if not local:
                ship(session)
            yield session
    if local and not submitted():
        make_archive_later()


@contextmanager
def _started(wanted: dict[str, str], known: dict[str, str], *, local: bool) -> Iterator[SparkSession]:
    """The session; its JVM stays in this process, without the options that it started with."""
    from pyspark import SparkContext

    launched = SparkContext._gateway is None and not submitted()
    session = _start(wanted, local=local)
    try:
        yield session
    finally:
        machine = session.sparkContext._jvm
        _stop(session)
        if machine and launched:
            with suppress(Exception):  # the JVM may be gone
                for name in wanted.keys() - known.keys():
                    machine.System.clearProperty(name)
                for name, value in (_BARE | known).items():
                    machine.System.setProperty(name, value)


def _start(wanted: dict[str, str], *, local: bool) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.config(map=wanted)  # type: ignore[arg-type]
    if submitted():
        return builder.getOrCreate()
    python = wanted.get("spark.pyspark.python") or (not local and os.environ.get("PYSPARK_PYTHON")) or sys.executable
    with (
        _environment(
            JAVA_HOME=str(java_home()),
            # Without these, workers run the first `python3` on the path.
            PYSPARK_PYTHON=python,
            PYSPARK_DRIVER_PYTHON=sys.executable,
            SPARK_LOCAL_IP=os.environ.get("SPARK_LOCAL_IP", _HERE if local else None),
            # For the JVM that composes the command line.
            SPARK_LAUNCHER_OPTS=os.environ.get("SPARK_LAUNCHER_OPTS", " ".join(JVM_OPTIONS)),
            SPARK_REMOTE=None,
        ),
        _no_orphans(),
    ):
        return builder.getOrCreate()


@contextmanager
def _environment(**changes: str | None) -> Iterator[None]:
    """Change variables of the environment, and restore those and the one by which PySpark remembers Connect."""
    before = {name: os.environ.get(name) for name in (*changes, "SPARK_CONNECT_MODE_ENABLED")}
    try:
        _set(changes)
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


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


def _stop(session: SparkSession) -> None:
    # PySpark waits a second for its accumulator thread. There are no accumulators, so let it end by itself.
    context = session.sparkContext
    counting = getattr(context, "_accumulatorServer", None)
    if counting:
        context._accumulatorServer = None  # type: ignore[assignment]
        counting.handle_error = lambda *_: None  # no stack trace when Java disconnects
        threading.Thread(target=counting.shutdown, daemon=True).start()
    session.stop()


def _driver_options(folder: Path, host: str | None) -> dict[str, str]:
    return {
        "spark.app.name": "srtm",
        **({"spark.driver.host": host} if host else {}),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.local.dir": str(folder),
    }
