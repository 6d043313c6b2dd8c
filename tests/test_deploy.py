"""What `deploy/` has: its files are valid, srtm understands their commands, and those of its units run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from srtm.control.keeping.address import parse
from tests.conftest import PARTS, ROOT
from tests.programs import wait_for

DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
BIN = Path(sys.executable).parent


def check(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def installed(unit: Path, folder: Path) -> Path:
    """A unit as it would be here: of this environment's srtm, a template as its first instance."""
    copy = folder / unit.name.replace("@", "@1")
    copy.write_text(unit.read_text().replace("/opt/srtm/bin/srtm", sys.executable))
    return copy


@pytest.mark.needs("systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_are_valid_and_keep_to_themselves(unit: Path, tmp_path: Path) -> None:
    program = PARTS["systemd-analyze"].path or ""
    assert check(program, "verify", installed(unit, tmp_path)) == ""
    shown = check(program, "security", "--offline=true", "--no-pager", installed(unit, tmp_path))
    level = re.search(r"exposure level for \S+: ([\d.]+)", shown)
    assert level
    assert float(level[1]) < 2


@contextmanager
def started(unit: Path, settings: Path, folder: Path, **changes: str) -> Iterator[dict[str, str]]:
    """A unit's command with its settings but for these, until it says where it is; gives its addresses."""
    lines = [line.partition("=") for line in settings.read_text().splitlines() if line and not line.startswith("#")]
    values = {name: value for name, _, value in lines} | changes | {"STATE_DIRECTORY": str(folder)}
    found = re.search(r"^ExecStart=/opt/srtm/bin/srtm (.*)$", unit.read_text(), re.MULTILINE)
    assert found
    # systemd's own rule: ${X} is one word, $X is as many as it has.
    text = re.sub(r"\$\{(\w+)\}", lambda name: shlex.quote(values[name[1]]), found[1])
    words = shlex.split(re.sub(r"\$(\w+)", lambda name: values[name[1]], text))
    folder.mkdir()
    environment = {**os.environ, **{name: value for name, value in values.items() if name.startswith("SRTM_")}}
    with subprocess.Popen(
        [sys.executable, "-m", "srtm", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as process:
        try:
            assert process.stdout is not None
            yield dict(re.findall(r"(\w+) (\S+:\d+)", process.stdout.readline()))
        finally:
            process.terminate()
            assert process.wait(30) == 0


@pytest.mark.processes
def test_units_commands_make_a_cluster(tmp_path: Path) -> None:
    systemd = DEPLOY / "systemd"
    ports = {"LISTEN": "127.0.0.1", "TCP_PORT": "0", "HTTP_PORT": "0"}
    own = {"WEB_PORT": "0", "ADDRESS": "127.0.0.1", "SRTM_STORE": f"sqlite:{tmp_path / 'c'}"}
    controller = started(
        systemd / "srtm-controller.service", systemd / "controller.env", tmp_path / "c", **ports, **own
    )
    with controller as at:
        settings = {**ports, "ADDRESS": "127.0.0.1", "CONTROLLER": at["TCP"], "OPTIONS": "--log-level error"}
        broker = started(systemd / "srtm-broker@.service", systemd / "broker-1.env", tmp_path / "b", **settings)
        with broker:
            command = [sys.executable, "-m", "srtm", "check", "--brokers", "1"]
            environment = {**os.environ, "SRTM_CONTROLLER": f"http://{at['HTTP']}"}
            wait_for(lambda: subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0)
    assert (tmp_path / "c" / "controller.sqlite").exists()


def test_the_dockerfile_finds_what_it_copies() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    for line in re.findall(r"^COPY (?!--)(.*)$", text, re.MULTILINE):
        for name in line.split()[:-1]:
            assert (ROOT / name).exists()
            assert f"!{name}" in ignored


@pytest.mark.processes
def test_the_compose_file_is_valid() -> None:
    check(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")


@pytest.mark.processes
@pytest.mark.parametrize("name", ["brokers.yaml", "controller.yaml", "nats.yaml"])
def test_the_manifests_are_valid(name: str) -> None:
    check(BIN / "kubernetes-validate", "--strict", DEPLOY / "kubernetes" / name)


def containers() -> dict[str, list[str]]:
    """The arguments of every container."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    found = {f"compose {name}": service["command"] for name, service in compose["services"].items()}
    for path in (DEPLOY / "kubernetes").glob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            template: dict[str, Any] = document.get("spec", {}).get("template", {})
            for container in template.get("spec", {}).get("containers", []):
                found[f"kubernetes {container['name']}"] = container["args"]
    return found


@pytest.mark.processes
@pytest.mark.parametrize(
    "where", ["compose controller", "compose broker", "kubernetes controller", "kubernetes broker"]
)
def test_containers_have_arguments_that_srtm_understands(where: str) -> None:
    assert "Usage: srtm" in check(sys.executable, "-m", "srtm", *containers()[where], "--help")


@pytest.mark.processes
def test_help_does_not_hide_an_argument_that_is_wrong() -> None:
    command = [sys.executable, "-m", "srtm", "broker", "--no-such-flag", "--help"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2


def test_three_controllers_share_the_servers_that_run_beside_them() -> None:
    """The names in --store are those of the NATS servers, and brokers register with every controller."""
    found = {each["kind"] + " " + each["metadata"]["name"]: each for each in manifests()}
    assert found["StatefulSet srtm-controller"]["spec"]["replicas"] == 3
    servers, service = found["StatefulSet srtm-nats"]["spec"], found["Service srtm-nats"]
    names = [f"srtm-nats-{at}.{servers['serviceName']}" for at in range(servers["replicas"])]
    assert service["metadata"]["name"] == servers["serviceName"]
    store = next(each for each in containers()["kubernetes controller"] if each.startswith("--store="))
    address = parse(store.removeprefix("--store="))
    assert address.servers is not None
    assert [host for host, _ in address.servers.servers] == names
    assert "--controller=srtm-controllers:4160" in containers()["kubernetes broker"]
    assert found["Service srtm-controllers"]["spec"]["clusterIP"] == "None"


def manifests() -> list[Any]:
    return [each for path in (DEPLOY / "kubernetes").glob("*.yaml") for each in yaml.safe_load_all(path.read_text())]
