"""A whole cluster with secrets: none of them is in a log, a command line, a bundle, the page, or an answer."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.broker.running import PATIENCE_S
from tests.programs import wait_for

pytestmark = pytest.mark.processes

GIVEN = {
    "SRTM_TOKEN": "given-to-the-controller-0123456789",
    "SRTM_CONTROL_TOKEN": "given-to-brokers-0123456789",
    "SRTM_BROKER_TOKEN": "shared-by-brokers-0123456789",
}


def descendants(process: int) -> set[int]:
    """The ids of a process and of all that it has started."""
    found, new = {process}, {process}
    while new:
        parents = new
        new = set()
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(path.read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended
                continue
            if parent in parents and int(path.parent.name) not in found:
                new.add(int(path.parent.name))
        found |= new
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[subprocess.Popen[str]]:
    flags = ["--brokers", "2", "--free-ports", "--tls", "--certs", str(folder / "certs"), "--log-level", "debug"]
    command = [sys.executable, "-m", "srtm", "up", *flags, "--data-path", str(folder / "data")]
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, text=True, env={**os.environ, **GIVEN})
        try:
            wait_for(lambda: "ready after" in (folder / "out").read_text())
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)


def test_no_secret_is_anywhere(cluster: subprocess.Popen[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (folder / "out").read_text().split()
    url = next(word.removeprefix("SRTM_CONTROLLER=") for word in words if word.startswith("SRTM_CONTROLLER="))
    page = words[words.index("page:") + 1].rstrip("/")
    authority = str(folder / "certs" / "ca.pem")
    tls = ssl.create_default_context(cafile=authority)
    secrets = set(GIVEN.values())
    seen: dict[str, bytes] = {}
    with httpx.Client(base_url=url, verify=tls, timeout=PATIENCE_S, trust_env=False) as api:
        api.headers["Authorization"] = f"Bearer {GIVEN['SRTM_TOKEN']}"
        for role in ("admin", "viewer", "operator", "broker"):
            secrets.add(api.post("/v1/tokens", json={"name": role, "role": role}).json()["secret"])
        assert api.put("/v1/topics/t", json={"r": 100, "b": 10, "publishers": [{"id": "p"}]}).status_code == 200
        for wrong in ("wrong-secret-0123456789", *list(secrets)[:2]):  # also those that nobody accepts
            httpx.get(f"{url}/v1/topics", headers={"Authorization": f"Bearer {wrong}"}, verify=tls, trust_env=False)
            httpx.get(f"{url}/v1/nothing?token={wrong[::-1]}", verify=tls, trust_env=False)
            secrets |= {wrong}
        with httpx.Client(base_url=page, verify=tls, trust_env=False, timeout=PATIENCE_S) as browser:
            token = {"token": GIVEN["SRTM_TOKEN"]}
            cookie = browser.post("/v1/session", json=token, headers={"Origin": page}).cookies["srtm_session"]
            secrets.add(cookie)
            with browser.stream("GET", "/v1/watch") as stream:
                seen["the page's feed"] = next(stream.iter_bytes())
            for path in ("/", "/page.js", "/actions.js", "/v1/session"):
                seen[f"page {path}"] = browser.get(path).content
        read = ["options", "audit", "brokers", "topics", "topics/t", "topics/t/publishers", "tokens", "targets"]
        for path in ["/metrics", "/docs", "/openapi.json", "/debug", "/nodes", *(f"/v1/{each}" for each in read)]:
            answer = api.get(path)
            assert answer.status_code == 200, path
            seen[path] = answer.content
        assert b'"control_token":"(given)"' in seen["/v1/options"]
        assert b'"broker_token":"(given)"' in seen["/v1/options"]
        for each in api.get("/v1/brokers").json()["brokers"]:
            for path in ("/info", "/stats?format=json", "/metrics", "/config/nsqlookupd_tcp_addresses"):
                seen[f"{each['name']} {path}"] = httpx.get(each["http"] + path, verify=tls, trust_env=False).content

    processes = descendants(cluster.pid)
    assert len(processes) >= 4
    for number in processes:
        seen[f"command line of {number}"] = Path(f"/proc/{number}/cmdline").read_bytes()
    assert sum(b"--tls-key" in line for line in seen.values()) >= 3

    monkeypatch.setenv("SRTM_CA", authority)
    monkeypatch.setenv("SRTM_TOKEN", GIVEN["SRTM_TOKEN"])
    from srtm.cli.app import run

    bundle = folder / "bundle.tar.gz"
    logs = [part for name in ("out", "err") for part in ("--log", str(folder / name))]
    assert run(["debug", "bundle", "--controller", url, "--out", str(bundle), *logs]) == 0
    with tarfile.open(bundle) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            seen[f"bundle {member.name}"] = file.read() if file else b""
    for file_ in (folder / "out", folder / "err", *(folder / "data" / "controller").rglob("*")):
        seen[str(file_)] = file_.read_bytes()
    assert len(seen) > 40
    assert b"AUDIT(" in seen[str(folder / "err")]
    shown = [(place, secret) for place, content in seen.items() for secret in secrets if secret.encode() in content]
    assert shown == []
