"""Spark's failures, in one line with a remedy.

In: the exceptions of PySpark, py4j and gRPC, with Java's stack traces in them. Out: `PipelineError`, or the SRTM error
that a task raised, as it was raised there. Exceptions that are neither Spark's nor SRTM's pass unchanged.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from srtm import errors
from srtm.errors import InputError, PipelineError, SRTMError

REACHED_WITHIN_S = 10
_SPARKS = ("pyspark", "py4j", "grpc")


@dataclass(frozen=True)
class Place:
    """Where a session runs: the address of its master or server, and the folder for its temporary files."""

    address: str
    folder: str = "its temporary folder"


@contextmanager
def explained(place: Place) -> Iterator[None]:
    """Raise Spark's exceptions as SRTM's errors; the original is the cause."""
    try:
        yield
    except SRTMError:
        raise
    except Exception as error:
        if not isinstance(error, ConnectionError) and type(error).__module__.partition(".")[0] not in _SPARKS:
            raise
        raise explanation(_text(error), place) from error


def check_reachable(place: Place) -> str | None:
    """Refuse an address that does not respond; Spark itself would try for minutes.

    Returns the address of this machine that a master or server at another address sees.
    """
    scheme, _, hosts = place.address.partition("://")
    if not re.match(r"local(\[.+\])?$|spark://|k8s://|sc://|yarn$", place.address):
        raise InputError(
            f"{place.address!r} is not a Spark address: use a master (local[2], spark://host:7077, k8s://…, yarn) or a "
            "Connect server (sc://host)"
        )
    if scheme not in ("spark", "sc"):
        return None
    problems = []
    for host in hosts.split(","):
        at = urlsplit(f"//{host}")
        try:
            port = at.port or {"spark": 7077, "sc": 15002}[scheme]
            with socket.create_connection((at.hostname or "localhost", port), timeout=REACHED_WITHIN_S) as way:
                host = str(way.getsockname()[0])
                return f"[{host}]" if ":" in host else host
        except (OSError, ValueError) as error:
            problems.append(str(getattr(error, "strerror", None) or error).lower())
    kind = "Spark master" if scheme == "spark" else "Spark Connect server"
    raise PipelineError(
        f"no {kind} responds at {place.address} ({problems[0]}): start it, correct the address, or omit it to use this "
        "machine",
        address=place.address,
    )


def explanation(text: str, place: Place) -> SRTMError:
    """The error that a text of Spark's describes."""
    if raised := re.search(r"srtm\.errors\.(\w+): ([^\n]*)", text):
        kind = getattr(errors, raised[1], PipelineError)
        return kind(raised[2].strip()) if issubclass(kind, SRTMError) else PipelineError(raised[2].strip())
    for pattern, message in _CAUSES:
        if found := re.search(pattern, text):
            return PipelineError(message(found, place), address=place.address)
    return PipelineError(f"Spark on {place.address} failed: {first_line(text)}", address=place.address)


_CAUSES: list[tuple[str, Callable[[re.Match[str], Place], str]]] = [
    (
        r"No space left on device|Disk quota exceeded",
        lambda _, place: (
            f"no space left in {place.folder}, where Spark spills what does not fit into memory: free some, or choose "
            "another folder with TMPDIR=… or --spark-conf spark.local.dir=…"
        ),
    ),
    (
        r"PYTHON_VERSION_MISMATCH\W.*?version: (\S+) than that in driver: ([\d.]+\d)",
        lambda found, _: (
            f"the workers run Python {found[1]}, but this is Python {found[2]}: set theirs with "
            "--spark-conf spark.pyspark.python=/path/to/python"
        ),
    ),
    (
        r'Cannot run program "([^"]+)"',
        lambda found, _: (
            f"Spark's workers cannot run {found[1]}: install it there or, if it is Python, set theirs with "
            "--spark-conf spark.pyspark.python=/path/to/python"
        ),
    ),
    (
        r"No module named '([^']+)'",
        lambda found, _: f"the workers' Python lacks {found[1]}: install it there (pip install 'srtm[spark]')",
    ),
    (
        r"java\.lang\.OutOfMemoryError|SparkOutOfMemoryError|UNABLE_TO_ACQUIRE_MEMORY|TaskResultLost",
        lambda _, place: (
            f"Spark on {place.address} ran out of memory: raise it with --spark-conf spark.driver.memory=4g or, on a "
            "cluster, --spark-conf spark.executor.memory=4g"
        ),
    ),
    (
        r"Python worker exited unexpectedly|MemoryError",
        lambda _, place: (
            f"a Python worker on {place.address} was killed, most likely out of memory: run fewer at a time, for "
            "example with --master 'local[1]' or --spark-conf spark.executor.cores=1"
        ),
    ),
    (
        r"ExecutorLostFailure \(executor (\S+) exited[^)]*\)(?:.*?Reason: ([^\n]+))?",
        lambda found, place: (
            f"{place.address} repeatedly lost its executors ({(found[2] or 'no reason given').strip(' .')}): check its "
            "workers, or give executors more memory with --spark-conf spark.executor.memory=4g"
        ),
    ),
    (
        r"JAVA_GATEWAY_EXITED",
        lambda *_: "Spark did not start; see Java's message above. If it names an option, correct it (--spark-conf)",
    ),
    (
        r"UNAUTHENTICATED|[Ii]nvalid authentication token",
        lambda _, place: f"{place.address} requires a token: add it to the address, as in {place.address}/;token=…",
    ),
    (
        r"UNAVAILABLE|[Cc]onnection (?:refused|reset)|Broken pipe|Py4JNetworkError|SparkContext was shut",
        lambda _, place: (
            f"lost the connection to Spark on {place.address}: run it again; if it ran out of memory, raise that "
            "(--spark-conf spark.driver.memory=4g)"
        ),
    ),
]


def _text(error: Exception) -> str:
    try:
        said = str(error)
    except Exception:  # the error asks the JVM for its text, and the JVM is gone
        said = ""
    return f"{type(error).__name__}: {said}"


def first_line(text: str) -> str:
    """The cause that Spark names, without the text around it."""
    raised = re.findall(r"^([A-Za-z_][\w.]*(?:: [^\n]+)?)$", text.partition("Traceback (most recent")[2], re.MULTILINE)
    caused = (
        raised[:1] or re.findall(r"^(?:Caused by)?: (?:[\w.]+\.)?([^\n]+)", text, re.MULTILINE)[-1:] or text.split("\n")
    )
    return caused[0].strip()[:300]
