"""The archive itself is made of a few classes here: to make a real one takes a minute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from srtm.pipeline.runtime import archive, archiver

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SESSION = """if True:
    import os
    from pathlib import Path
    from srtm.pipeline.session import spark_session
    with spark_session(master="local[1]") as spark:
        pid = spark.sparkContext._jvm.ProcessHandle.current().pid()
        mapped = Path(f"/proc/{pid}/maps").read_text()
        print(".jsa" in mapped and str(Path(os.environ["XDG_CACHE_HOME"], "srtm", "classes")) in mapped)
"""


@pytest.fixture
def few_classes(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An archive to be made in a cache of its own, of few classes of the real class path."""
    machine = spark.sparkContext._jvm
    assert machine is not None
    class_path = str(machine.System.getProperty("java.class.path"))

    def note(classes: Path) -> str:
        classes.write_text("java/lang/Object\norg/apache/spark/SparkConf\n")
        return class_path

    monkeypatch.setattr(archiver, "_note_classes", note)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(archive.SWITCH, "on")
    monkeypatch.delenv("JAVA_HOME", raising=False)  # it may point into the cache that all tests share
    found = archive.archive_file()
    assert found is not None
    return found


def test_a_session_starts_from_the_archive_and_says_nothing(few_classes: Path) -> None:
    assert archive.archive_options() == []
    assert archiver.make_archive(few_classes)
    assert archive.archive_options()[0] == f"-XX:SharedArchiveFile={few_classes}"
    assert [path.name for path in few_classes.parent.iterdir() if path != few_classes] == ["lock"]
    done = subprocess.run([sys.executable, "-c", SESSION], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_while_one_is_made_another_is_not(few_classes: Path) -> None:
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    few_classes.parent.mkdir(parents=True)
    command = [sys.executable, "-c", hold, str(few_classes.parent / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert not archiver.make_archive(few_classes)
        assert archive.being_made()
        process.communicate(b"\n")
    assert not few_classes.exists()
    assert not archive.being_made()


def test_a_program_that_measures_uses_an_archive_and_makes_none(
    few_classes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setenv(archive.SWITCH, archive.EXISTING)
    with monkeypatch.context() as without_processes:
        without_processes.setattr(subprocess, "Popen", refuse)
        archive.make_archive_later()
    assert not archive.being_made()
    assert archiver.make_archive(few_classes)
    assert archive.archive_options()[0] == f"-XX:SharedArchiveFile={few_classes}"


@pytest.mark.processes
def test_it_is_made_only_when_the_machine_is_idle() -> None:
    look = """if True:
        import os
        from srtm.pipeline.runtime import archiver
        archiver._give_way()
        print(os.sched_getscheduler(0), os.nice(0))
    """
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(os.SCHED_IDLE), "19"]


def test_what_fails_once_is_not_tried_again(few_classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise RuntimeError("this does not work")

    monkeypatch.setattr(archiver, "_note_classes", fail)
    assert not archiver.make_archive(few_classes)
    assert sorted(path.name for path in few_classes.parent.iterdir()) == [f"{few_classes.stem}.failed", "lock"]
    monkeypatch.setattr(subprocess, "Popen", fail)
    archive.make_archive_later()


def test_only_the_last_used_archives_stay(tmp_path: Path) -> None:
    for age, name in enumerate("abcd"):
        (tmp_path / f"{name}.jsa").touch()
        os.utime(tmp_path / f"{name}.jsa", (1_000 - age, 1_000 - age))
    archiver._remove_old(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsa", "b.jsa"]


def test_another_java_or_other_options_have_another_archive(few_classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert archive.archive_file() == few_classes
    monkeypatch.setattr(archive, "JVM_OPTIONS", ("-XX:+UseG1GC",))
    assert archive.archive_file() not in (None, few_classes)
    monkeypatch.setenv(archive.SWITCH, "off")
    assert archive.archive_file() is None
    assert archive.archive_options() == []


@pytest.mark.usefixtures("few_classes")
def test_where_no_process_can_be_started_there_is_no_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(subprocess, "Popen", refuse)
    archive.make_archive_later()
    assert archive.archive_options() == []
