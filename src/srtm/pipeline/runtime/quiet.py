"""A quiet Spark: failures are raised, so neither Java nor PySpark should log them as well."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_JAVA = """\
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
_SILENT = logging.CRITICAL + 10


def java_logging(folder: Path, *, local: bool) -> str:
    """The option for a JVM that logs little; its configuration is written to a folder."""
    file = folder / "log4j2.properties"
    file.write_text(_JAVA.replace("WAITING", "off" if local else "warn"))
    return f"-Dlog4j2.configurationFile={file.as_uri()}"


@contextmanager
def hushed() -> Iterator[None]:
    """Stop PySpark and py4j from logging stack traces of what they raise, for example at Ctrl-C."""
    from pyspark.logger import PySparkLogger

    names = ("SQLQueryContextLogger", "DataFrameQueryContextLogger", "pyspark.sql.connect.logging")
    loggers = [logging.getLogger("py4j"), *map(PySparkLogger.getLogger, names)]
    root, levels = logging.getLogger(), [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(_SILENT)
    root.addFilter(_not_from_py4j)
    try:
        yield
    finally:
        root.removeFilter(_not_from_py4j)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _not_from_py4j(record: logging.LogRecord) -> bool:
    return "py4j" not in record.pathname
