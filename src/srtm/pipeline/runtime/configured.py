"""Spark's configuration of this process, before a session exists.

In: spark-submit, or the arguments in PYSPARK_SUBMIT_ARGS and the file spark-defaults.conf. Out: options by name. Spark
reads them anyway; a session must know them first, because it starts differently on a cluster and on this machine.
"""

from __future__ import annotations

import os
import re
import shlex
from itertools import pairwise
from pathlib import Path


def submitted() -> bool:
    """Whether spark-submit started this process; the process then has a JVM with its configuration."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def configured() -> dict[str, str]:
    """Options that the user gave to spark-submit or wrote into Spark's files."""
    if submitted():
        from pyspark import SparkConf, SparkContext

        SparkContext._ensure_initialized()
        return dict(SparkConf().getAll())
    arguments = re.sub(r"(^|\s)(--[\w-]+)=", r"\1\2 ", os.environ.get("PYSPARK_SUBMIT_ARGS", ""))
    file, given = _defaults(), dict[str, str]()
    for flag, value in pairwise(shlex.split(arguments)):
        if flag == "--properties-file":
            file = Path(value)
        elif flag == "--master":
            given["spark.master"] = value
        elif flag in ("--conf", "-c"):
            name, _, option = value.partition("=")
            given[name] = option
    return _of_file(file) | given


def _defaults() -> Path:
    from pyspark.find_spark_home import _find_spark_home

    folder = os.environ.get("SPARK_CONF_DIR") or Path(_find_spark_home(), "conf")
    return Path(folder, "spark-defaults.conf")


def _of_file(file: Path) -> dict[str, str]:
    """The options of a file in the format of Java's properties."""
    try:
        lines = [line.strip() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    pairs = [re.split(r"\s*[=:\s]\s*", line, maxsplit=1) for line in lines if line and line[0] not in "#!"]
    return {name: "".join(value) for name, *value in pairs}
