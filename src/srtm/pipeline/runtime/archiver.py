"""Makes the class-data archive that `archive` describes: run as `python -m srtm.pipeline.runtime.archiver FILE`.

In: the path of the archive. Out: the archive, or a mark that making it failed. A small session runs the pipeline's
kinds of work, Java lists the classes it loads, and a second Java dumps them into the archive.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from srtm.pipeline.runtime.archive import JVM_OPTIONS, failed_file
from srtm.pipeline.runtime.java import java_program
from srtm.pipeline.session import spark_session

KEPT = 2  # archives of about 200 MB each


def make_archive(archive: Path) -> bool:
    """Make the archive; False if that fails or another process is making one."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with (archive.parent / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        for left in archive.parent.glob("making-*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="making-", dir=archive.parent, ignore_cleanup_errors=True) as folder:
            try:
                _dump(Path(folder, "classes"), Path(folder, "archive"))
                Path(folder, "archive").replace(archive)
            except Exception:  # whatever the cause, the next attempt would fail too
                failed_file(archive).touch()
                return False
        _remove_old(archive.parent)
    return True


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
    """List the classes that the pipeline's kinds of work load in a file; returns their class path."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyspark.sql import functions as f

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
    gateway.proc.stdin.close()  # the JVM exits at the end of its input and completes the list
    gateway.proc.wait(timeout=60)
    return class_path


def _remove_old(folder: Path) -> None:
    archives = sorted(folder.glob("*.jsa"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in archives[KEPT:]:
        old.unlink(missing_ok=True)


def _give_way() -> None:
    """Run this process, and the Java it starts, only when the machine is otherwise idle."""
    os.nice(19)
    with suppress(AttributeError, OSError):  # only Linux has it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


if __name__ == "__main__":
    _give_way()
    sys.exit(not make_archive(Path(sys.argv[1])))
