"""The class-data archive: Spark's classes as Java has parsed and verified them, kept from one session to the next.

Most of a cold start is Java reading and verifying some 17,000 classes. An archive of them, mapped into memory, halves
it. In: the Java, the Spark and the options of a local session. Out: JVM options, or none. After the first session, a
background process (`archiver`) makes the archive once and renames it into place, so nobody reads half an archive.
The archive is optional: if it cannot be made or does not fit, Java starts as it would without it, silently.
`SRTM_CLASS_ARCHIVE=off` disables it; `existing` uses an existing archive and never makes one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from srtm.errors import PipelineError
from srtm.pipeline.runtime.java import cache_folder, java_program

SWITCH = "SRTM_CLASS_ARCHIVE"
EXISTING = "existing"  # for programs that measure: making an archive keeps a core busy for a minute
# Both suit a short-lived JVM. An archive is valid only for the options it was made with.
JVM_OPTIONS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


def archive_options() -> list[str]:
    """JVM options that use the archive; empty if there is no archive."""
    archive = archive_file()
    if archive is None or not archive.exists():
        return []
    with suppress(OSError):
        os.utime(archive)  # the archiver keeps those used last
    # Without -Xlog:disable, Java prints to stdout why an archive does not fit.
    return [f"-XX:SharedArchiveFile={archive}", "-Xlog:disable"]


def make_archive_later() -> None:
    """Start making the archive in the background, unless it exists or an earlier attempt failed."""
    if os.environ.get(SWITCH, "").lower() == EXISTING:
        return
    archive = archive_file()
    if archive is None or archive.exists() or failed_file(archive).exists():
        return
    with suppress(OSError):
        maker = subprocess.Popen(
            [sys.executable, "-m", "srtm.pipeline.runtime.archiver", str(archive)],
            env=os.environ | {SWITCH: "off"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        maker.returncode = 0  # it outlives this process: no ResourceWarning


def being_made() -> bool:
    """Whether a background process is making an archive now."""
    try:
        with (cache_folder() / "classes" / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no archive was ever made here
        return False
    return False


def archive_file() -> Path | None:
    """The path of the archive for this Java, this Spark and these options; None if archives are off."""
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "no"):
        return None
    import pyspark

    try:
        java = java_program()
        machine = java.parent.parent / "lib" / "server" / "libjvm.so"
        seen = (machine if machine.exists() else java).stat()
    except (OSError, PipelineError):
        return None
    where = [os.environ.get(name, "") for name in ("SPARK_HOME", "SPARK_CONF_DIR", "HADOOP_CONF_DIR")]
    known = [java, seen.st_size, seen.st_mtime_ns, pyspark.__file__, pyspark.__version__, *where, *JVM_OPTIONS]
    name = hashlib.sha256("\n".join(map(str, known)).encode()).hexdigest()[:16]
    return cache_folder() / "classes" / f"{name}.jsa"


def failed_file(archive: Path) -> Path:
    """The mark of a failed attempt, which is not repeated."""
    return archive.with_suffix(".failed")
