"""What all tests share: how much hypothesis tries, which tests run where, and which need an optional part."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from srtm import native

ROOT = Path(__file__).parent.parent
# Tests run the interpreted build, of which they may replace parts; with SRTM_COMPILED, the compiled one.
if not os.environ.get("SRTM_COMPILED"):
    os.environ["SRTM_INTERPRETED"] = "1"

pytest_plugins = ["tests.spark"]

settings.register_profile("default", max_examples=200, deadline=None, print_blob=True)
# CI repeats the same examples, so that it fails for what a change did and not by chance.
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True)
settings.register_profile("fast", parent=settings.get_profile("default"), max_examples=30)
settings.register_profile("long", parent=settings.get_profile("default"), max_examples=5_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


# What `make test-fast` leaves out. Fixtures say it by themselves; a test that starts a process is marked.
FIXTURES = {
    "spark": {"spark", "connect_server", "spark_cluster"},
    "browser": {"browser", "site"},
    "processes": {"engine", "alone", "s3"},
}
# These take minutes: a worker that began them last would work on alone.
FIRST = (
    "test_extras",
    "examples/",
    "pipeline/",
    "lab/",
    "test_docs_commands",
    "test_readme",
    "web/",
    "cli/",
    "control/",
    "client/",
)
# Tests of one worker share a Spark session, and a second session would start cold on cores that are busy.
ON_ONE_SESSION = (
    "tests/pipeline/importing/",
    "tests/pipeline/test_",
    "tests/pipeline/traces/",
    "tests/lab/",
    "tests/cli/test_import",
    "tests/cli/test_recorded",
)
TOGETHER = (  # files that share an expensive fixture
    ("tests/lab/",),
    ("tests/web/",),
    ("tests/pipeline/runtime/test_cluster.py", "tests/pipeline/streaming/test_streaming.py"),
)
# Most sessions are short, and much of their time goes into verifying classes.
QUICK_JVM = "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"


def pytest_configure(config: pytest.Config) -> None:
    """Caches of the product go where they are removed again; Ctrl-C reaches the programs that tests start."""
    folder = tempfile.TemporaryDirectory(prefix="srtm-tests-")
    os.environ["XDG_CACHE_HOME"] = folder.name
    os.environ["SRTM_CLASS_ARCHIVE"] = "off"  # to make one takes longer than it would save here
    os.environ.setdefault("SPARK_SUBMIT_OPTS", QUICK_JVM)
    config.add_cleanup(folder.cleanup)
    if os.environ.get("SRTM_COMPILED") and not native.is_compiled():
        raise pytest.UsageError(f"SRTM_COMPILED is set, but SRTM is {native.build()}")
    # A shell starts what runs in its background with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """Gives whole files to parallel workers, and several at once if their tests share something expensive."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = nodeid.partition("::")[0]
        return next((files[0] for files in TOGETHER if file.startswith(files)), file)

    def _assign_work_unit(self, node: Any) -> None:
        """Give the next file: to the first worker of those on Spark's session, to the last one from the end.

        So tests that compute run beside tests that wait, from the beginning to the end.
        """
        warm = node is self.nodes[0]
        fitting = [file for file in self.workqueue if file.startswith(ON_ONE_SESSION) is warm] or [*self.workqueue]
        self.workqueue.move_to_end(fitting[-1 if node is self.nodes[-1] else 0], last=False)
        super()._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    """Called by pytest-xdist (`--dist load`, the default)."""
    return ByFile(config, log)


def pytest_xdist_auto_num_workers() -> int:
    """Twice as many as cores, because tests also wait; each may start a Spark, so at most four."""
    return min(4, 2 * len(os.sched_getaffinity(0)))


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by what they use, and put the longest first."""
    for item in items:
        used = set(getattr(item, "fixturenames", ()))
        for mark, fixtures in FIXTURES.items():
            if used & fixtures:
                item.add_marker(mark)
        if item.get_closest_marker("needs") is not None:
            item.add_marker("processes")

    def rank(item: pytest.Item) -> int:
        return next((number for number, part in enumerate(FIRST) if part in item.nodeid), len(FIRST))

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """Spare the garbage collector thousands of tests, which stay to the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _processes_are_declared(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep `make test-fast` free of other programs: a test that starts one must be marked."""
    with pytest.MonkeyPatch.context() as patch:
        if "not processes" in request.config.option.markexpr:
            patch.setattr(subprocess.Popen, "__init__", _refuse_process)
            patch.setattr(asyncio, "create_subprocess_exec", _refuse_process)
        yield


def _refuse_process(*args: object, **_: object) -> None:
    pytest.fail(f"this test starts {args}: mark it with pytest.mark.processes", pytrace=False)


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    """A program that a test runs in this process writes its log to a stderr that ends with the test."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


@dataclass(frozen=True)
class Part:
    """A program that some tests run, where to find it, and how to get it."""

    program: str
    remedy: str

    @property
    def path(self) -> str | None:
        folders = [ROOT / ".parts/bin", Path(sys.executable).parent]
        return shutil.which(self.program, path=os.pathsep.join([*map(str, folders), os.environ["PATH"]]))


PARTS = {
    "nsqd": Part("nsqd", "run tests/parts/build (it takes Go)"),
    "nsqlookupd": Part("nsqlookupd", "run tests/parts/build (it takes Go)"),
    "nsqadmin": Part("nsqadmin", "run tests/parts/build (it takes Go)"),
    "moto_server": Part("moto_server", "run tests/parts/build (it takes Go)"),
    "go": Part("go", "install Debian's package golang"),
    "nats-server": Part("nats-server", "pip install 'srtm[nats]'"),
    "cc": Part("cc", "install Debian's packages gcc and libc6-dev"),
    "uv": Part("uv", "run make test, or pip install uv"),
    "node": Part("node", "install Debian's package nodejs"),
    "curl": Part("curl", "install Debian's package curl"),
    "chromium": Part("chromium", "install Debian's package chromium"),
    "systemd-analyze": Part("systemd-analyze", "install Debian's package systemd"),
    "promtool": Part("promtool", "install Debian's package prometheus"),
}


def require(name: str) -> None:
    """Skip the test that runs if a part is missing, and say how to get it; fail it if no part may be missing."""
    part = PARTS[name]
    if part.path is None:
        missing = f"needs {part.program}: {part.remedy}"
        if os.environ.get("SRTM_REQUIRE_PARTS"):
            pytest.fail(missing, pytrace=False)
        pytest.skip(missing)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        require(mark.args[0])
