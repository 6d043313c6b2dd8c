"""What Spark's failures are said to be: of real ones where they are cheap to bring about, of their texts otherwise."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from srtm.errors import ArrivalsError, PipelineError, SRTMError, TraceError
from srtm.pipeline.runtime import server as servers
from srtm.pipeline.runtime.failures import Place, check_reachable, explained, explanation
from srtm.pipeline.session import spark_session

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

HERE = Place("local[2]", "/scratch")


def raising(error: Exception) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def work(_: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        raise error

    return work


def test_an_error_of_ours_in_a_task_comes_out_as_it_was_raised(spark: SparkSession) -> None:
    said = "t.parquet, row group 3: it is broken: write it anew"
    with pytest.raises(TraceError) as caught, explained(HERE):
        spark.range(4).mapInArrow(raising(TraceError(said)), "id long").toArrow()
    assert str(caught.value) == said


def test_any_other_error_in_a_task_is_one_line(spark: SparkSession) -> None:
    with pytest.raises(PipelineError) as caught, explained(HERE):
        spark.range(4).mapInArrow(raising(KeyError("colour")), "id long").toArrow()
    assert str(caught.value) == "Spark on local[2] failed: KeyError: 'colour'"


def test_a_worker_that_is_killed_is_a_matter_of_memory(spark: SparkSession) -> None:
    def ended(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield from batches

    with pytest.raises(PipelineError, match=r"a Python worker on local\[2\] was killed.*run fewer"), explained(HERE):
        spark.range(4).mapInArrow(ended, "id long").toArrow()


def test_a_session_on_a_server_explains_too(connect_server: servers.Server) -> None:
    """Connect's errors are other classes. A process of its own: PySpark does not do both in one."""
    code = """if True:
        import sys
        from srtm.pipeline.session import spark_session
        from srtm.errors import SRTMError
        def broken(batches):
            from srtm.errors import TraceError
            raise TraceError("it is broken")
        for url in sys.argv[1:]:
            try:
                with spark_session(remote=url) as spark:
                    spark.range(4).mapInArrow(broken, "id long").toArrow()
            except SRTMError as error:
                print(type(error).__name__, error)
    """
    address = connect_server.address
    command = [sys.executable, "-c", code, connect_server.url, f"{address}/;token=guessed"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "TraceError it is broken",
        f"PipelineError {address} requires a token: add it to the address, as in {address}/;token=…",
    ], done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "Caused by: java.io.IOException: No space left on device",
            "no space left in /scratch.*spark.local.dir",
        ),
        (
            "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.12 than that in driver: 3.11, …",
            r"the workers run Python 3\.12, but this is Python 3\.11: .*spark.pyspark.python",
        ),
        ('Cannot run program "/opt/python": error=2', "workers cannot run /opt/python: .*spark.pyspark.python"),
        ("ModuleNotFoundError: No module named 'numba'", "the workers' Python lacks numba"),
        ("java.lang.OutOfMemoryError: Java heap space", "ran out of memory: .*spark.driver.memory"),
        (
            "ExecutorLostFailure (executor 3 exited caused by a task) Reason: Command exited with 137",
            r"repeatedly lost its executors \(Command exited with 137\)",
        ),
        ("Py4JNetworkError: Answer from Java side is empty", "lost the connection to Spark"),
        ("Py4JJavaError: calling o5.x\n: org.apache.spark.SparkException: Strange", "failed: SparkException: Strange$"),
    ],
)
def test_a_text_of_sparks_becomes_a_line_with_a_remedy(text: str, said: str) -> None:
    error = explanation(text, HERE)
    assert isinstance(error, PipelineError)
    assert "\n" not in str(error)
    assert re.search(said, str(error)), str(error)


def test_our_errors_keep_their_kind_and_their_lines_after_them_are_gone() -> None:
    text = "Traceback (most recent call last):\n  File x\nsrtm.errors.ArrivalsError: out of order\n\n\tat java"
    error = explanation(text, HERE)
    assert (type(error), str(error)) == (ArrivalsError, "out of order")


def test_what_is_not_sparks_passes() -> None:
    with pytest.raises(ZeroDivisionError), explained(HERE):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"master": "spark://nowhere.invalid:7077"}, "no Spark master responds at spark://nowhere.invalid:7077"),
        ({"master": "spark://127.0.0.1:1,127.0.0.1:2"}, "connection refused"),
        ({"remote": "sc://localhost:1/;token=x"}, "no Spark Connect server responds at sc://localhost:1 "),
        ({"master": "the cluster"}, "'the cluster' is not a Spark address"),
    ],
)
def test_an_address_where_nobody_answers_is_said_at_once(where: dict[str, str], said: str) -> None:
    begun = time.monotonic()
    with pytest.raises(SRTMError, match=said), spark_session(**where):  # type: ignore[arg-type]
        pass
    assert time.monotonic() - begun < 30


def test_one_master_of_several_is_enough(connect_server: servers.Server) -> None:
    check_reachable(Place(f"spark://127.0.0.1:1,127.0.0.1:{connect_server.port}"))


@pytest.mark.spark
def test_a_full_disk_is_named_with_its_folder(tmp_path: Path) -> None:
    """In a mount namespace, with a file system of one megabyte for what Spark writes."""
    space = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    tiny = f"mount -t tmpfs -o size=1m tmpfs {tmp_path}"
    if not shutil.which("unshare") or subprocess.run([*space, tiny], capture_output=True, check=False).returncode:
        pytest.skip("needs a user namespace to mount a small file system in")
    code = f"""if True:
        from pyspark.sql import functions as f
        from srtm.errors import PipelineError
        from srtm.pipeline.session import spark_session
        try:
            with spark_session(master="local[2]", options={{"spark.local.dir": "{tmp_path}"}}) as spark:
                spark.range(2_000_000).select("id", f.rand(1).alias("x")).repartition(3, "x").sort("x").count()
        except PipelineError as error:
            print(error)
    """
    done = subprocess.run(
        [*space, f'{tiny} && exec "$0" -c "$1"', sys.executable, code], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith(f"no space left in {tmp_path}, where Spark"), done.stderr


@pytest.mark.spark
def test_an_interruption_is_exit_code_1_without_a_stack_trace_or_a_jvm_left(tmp_path: Path) -> None:
    code = """if True:
        import sys, time
        from pathlib import Path
        from srtm.cli import app
        from srtm.pipeline import profile
        mark = Path(sys.argv[2])
        def endless(path, spark, **options):
            machine = spark.sparkContext._jvm.ProcessHandle.current().pid()
            def sleep(batches):
                import time
                mark.write_text(str(machine))
                time.sleep(600)
                yield from batches
            spark.range(0, 2, 1, 2).mapInArrow(sleep, "id long").toArrow()
        profile.profile = endless
        sys.exit(app.run(["profile", sys.argv[1], "--master", "local[2]"]))
    """
    mark = tmp_path / "mark"
    (tmp_path / "t.parquet").touch()
    command = [sys.executable, "-c", code, str(tmp_path / "t.parquet"), str(mark)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 180
    while not (mark.exists() and mark.read_text()) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in said
    machine = int(mark.read_text())
    while Path(f"/proc/{machine}").exists():
        assert time.monotonic() < deadline, "the JVM is still there"
        time.sleep(0.05)
