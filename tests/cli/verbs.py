"""Every verb that takes a trace, on several traces and one Spark; what the tests of URIs run in a process.

`python -m tests.cli.verbs OPTIONS TRACE …` prints a JSON object: by trace and verb, the exit code and what was printed.
A process of its own has workers that know its environment. OPTIONS is a JSON object of options for Spark.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any

from srtm.cli.app import run
from srtm.pipeline import session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

CONTRACT = ["--r", "300", "--b", "1000"]
VERBS = {
    "profile": [],
    "groups": [],
    "penalty": CONTRACT,
    "conformance": CONTRACT,
    "plan": ["--brokers", "2", "--no-fit", "--policies", "lb", "--slo-p99", "10s"],
    "plan --all": ["--brokers", "2", "--slo-p99", "10s", "--what-if", "brokers=-1"],
    "report": [*CONTRACT, "--brokers", "2", "--force"],
}


def said(verb: str, trace: str, folder: str) -> list[Any]:
    """The exit code, the document on stdout, and stderr."""
    out = ["--out", f"{folder}/report.html"] if verb == "report" else []
    stdout, stderr = io.StringIO(), io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr):
        code = run([*verb.split(), trace, *VERBS[verb], *out, "--json"])
    found = json.loads(stdout.getvalue()) if stdout.getvalue() else {}
    if verb == "report":  # the page names its trace
        del found["bytes"], found["out"]
    return [code, found, stderr.getvalue()]


def main(options: str, *traces: str) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        session.spark_session(master="local[2]", options=json.loads(options)) as spark,
    ):

        @contextmanager
        def shared(**_: object) -> Iterator[SparkSession]:
            yield spark

        session.spark_session = shared
        found = {trace: {verb: said(verb, trace, folder) for verb in VERBS} for trace in traces}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
