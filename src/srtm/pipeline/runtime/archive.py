"""A class-data archive: what Java has to know of Spark's classes, kept from one session to the next.

Most of a cold start is Java reading and checking some 17,000 classes. An archive of them, mapped into memory, saves
half. In: the Java, the Spark and the options of a local session. Out: options, or none. The archive is made once, by a
process in the background, after the first session has ended; it appears by renaming, so that nobody sees half of one.
Nothing depends on it: where it cannot be made or does not fit, Java starts as it would without, and says nothing.
`SRTM_CLASS_ARCHIVE=off` switches it off; `existing` uses an archive that is there, and makes none.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from srtm.errors import PipelineError
from srtm.pipeline.runtime.java import cache_folder, java_program

SWITCH = "SRTM_CLASS_ARCHIVE"
EXISTING = "existing"  # for programs that measure something: to make an archive takes a core for a minute
KEPT = 2  # archives; each takes about 200 MB
# Both for a short life of the JVM, and part of what an archive is made for.
JVM_OPTIONS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


def archive_options() -> list[str]:
    """Options for Java to start from the archive; none where there is no archive."""
    archive = _archive()
    if archive is None or not archive.exists():
        return []
    with suppress(OSError):
        os.utime(archive)  # the ones that were used last are kept
    return [
        f"-XX:SharedArchiveFile={archive}",
        "-Xlog:disable",
    ]  # else Java tells, on stdout, why an archive does not fit


def make_archive_later() -> None:
    """Have the archive made in the background, unless it is there, is being made or could not be made before."""
    if os.environ.get(SWITCH, "").lower() == EXISTING:
        return
    archive = _archive()
    if archive is None or archive.exists() or _failed(archive).exists():
        return
    with suppress(OSError):
        maker = subprocess.Popen(
            [sys.executable, "-m", "srtm.pipeline.runtime.archive", str(archive)],
            env=os.environ | {SWITCH: "off"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        maker.returncode = 0  # it outlives this process, and Python need not warn of it


def being_made() -> bool:
    """Whether a process in the background is making an archive now."""
    try:
        with (cache_folder() / "classes" / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # nobody ever made one here
        return False
    return False


def make_archive(archive: Path) -> bool:
    """Run a small session, note the classes that it loads, and put them into an archive; False if that fails."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with (archive.parent / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False  # another process is at it
        for left in archive.parent.glob("making-*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="making-", dir=archive.parent, ignore_cleanup_errors=True) as folder:
            try:
                _dump(Path(folder, "classes"), Path(folder, "archive"))
                Path(folder, "archive").replace(archive)
            except Exception:  # whatever it is, it will be so the next time too
                _failed(archive).touch()
                return False
        _remove_old(archive.parent)
    return True


def _archive() -> Path | None:
    """Where the archive of this Java, this Spark and these options is, or would be."""
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


def _failed(archive: Path) -> Path:
    return archive.with_suffix(".failed")


def _dump(classes: Path, archive: Path) -> None:
    class_path = _note_classes(classes)
    subprocess.run(
        [
            java_program(),
            "-Xshare:dump",
            f"-XX:SharedClassListFile={classes}",
            f"-XX:SharedArchiveFile={archive}",
            *JVM_OPTIONS,
            "-cp",
            class_path,
        ],
        capture_output=True,
        check=True,
        timeout=600,
    )


def _note_classes(classes: Path) -> str:
    """Write the classes that the pipeline's kinds of work load to a file; the class path they were found on."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyspark.sql import functions as f

    from srtm.pipeline.session import spark_session

    noted = {"spark.driver.extraJavaOptions": f"-XX:DumpLoadedClassList={classes}"}
    with spark_session(master="local[2]", options=noted) as spark:
        context = spark.sparkContext
        machine, gateway = context._jvm, context._gateway
        assert machine is not None
        assert gateway is not None
        class_path = str(machine.System.getProperty("java.class.path"))
        spark.range(0, 4, 1, 2).mapInArrow(lambda batches: batches, "id long").toArrow()
        path = str(classes.with_suffix(".parquet"))
        pq.write_table(pa.table({"id": [1, 2, 3], "name": ["a", "a", "b"]}), path)
        rows = spark.read.parquet(path).dropna()
        rows.groupBy("name").agg(f.count("*"), f.count_distinct("id"), f.min("id"), f.max("id")).toArrow()
        ordered = rows.repartitionByRange(2, "name", "id").sortWithinPartitions("name", "id").persist()
        ordered.mapInArrow(lambda batches: batches, rows.schema).toArrow()
        ordered.unpersist()
    gateway.shutdown()
    gateway.proc.stdin.close()  # the JVM ends at the end of its input, and only then is the list complete
    gateway.proc.wait(timeout=60)
    return class_path


def _remove_old(folder: Path) -> None:
    archives = sorted(folder.glob("*.jsa"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in archives[KEPT:]:
        old.unlink(missing_ok=True)


def _give_way() -> None:
    """Take only the time that nobody else wants, for this process and the Java that it starts."""
    os.nice(19)
    with suppress(AttributeError, OSError):  # Linux alone has it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


if __name__ == "__main__":
    _give_way()
    sys.exit(not make_archive(Path(sys.argv[1])))
