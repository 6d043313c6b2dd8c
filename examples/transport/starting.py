"""Starting Spark for the demo: in a thread, at low priority, with its output in a file."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from leave import Over

from srtm.pipeline.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class StartingSpark:
    """A Spark session that a thread starts while the cluster starts."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._session: SparkSession | None = None
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._start, daemon=True)
        self._thread.start()

    def wait(self, pause: Callable[[float], None]) -> SparkSession:
        """The session, once it has started; raises what went wrong. Calls `pause` while waiting."""
        while self._thread.is_alive():
            pause(0.1)
        if self._session is None:
            raise self._problem or Over("Spark did not start")
        self._session.createDataFrame([], "id int")  # Java looks for sinks in the session that this thread used last
        return self._session

    def _start(self) -> None:
        added = f"-Djava.io.tmpdir={self._folder}"
        options = {"spark.sql.shuffle.partitions": "2", "spark.driver.extraJavaOptions": added}
        try:
            with at_leisure():
                self._session = self._stack.enter_context(spark_session(options=options))
        except BaseException as problem:  # the main thread reports it
            self._problem = problem


def keep_sparks_words(path: Path) -> None:
    """Send the stderr of Spark's processes to a file; that of this process stays where it is.

    When they are stopped, Java and PySpark's workers print stack traces about each other to the inherited descriptor 2.
    """
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    kept = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(kept, 2)
    os.close(kept)


@contextmanager
def at_leisure() -> Iterator[None]:
    """Start processes at batch priority, so that they do not delay the brokers."""
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, priority)
