"""`srtm pub`, `srtm sub` and `srtm load`, as programs against a real broker."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.broker.conftest import broker, start
from tests.broker.running import Running
from tests.client.controller import Controller, controlling
from tests.client.test_publisher import at

__all__ = ["broker", "start"]


def srtm(*arguments: str, said: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "srtm", *arguments], input=said, capture_output=True, check=False, timeout=60
    )


@pytest.mark.processes
def test_what_is_published_is_printed(broker: Running, tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"c\nd\r\n")
    done = srtm("pub", "t", "--broker", at(broker), said=b"a\n\nb\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"t: 2 messages published\n")
    assert srtm("pub", "t", "--broker", at(broker), "--file", str(tmp_path / "lines")).returncode == 0
    done = srtm("pub", "t", "--broker", at(broker), "--body", "e", "--count", "250", "--json")
    assert json.loads(done.stdout) == {"topic": "t", "published": 250}
    done = srtm("sub", "t", "--broker", at(broker), "--count", "4", "--channel", "c")
    assert (done.returncode, done.stdout) == (0, b"a\nb\nc\nd\n")
    done = srtm("sub", "t", "--broker", at(broker), "--count", "251", "--channel", "c", "--timeout", "1s", "--json")
    assert done.returncode == 1
    assert b"received 250 of 251 messages; none for 1s" in done.stderr
    (first, *others) = map(json.loads, done.stdout.splitlines())
    assert (first["body"], first["attempts"], first["broker"]) == ("e", 1, at(broker))
    assert len(others) == 249


@pytest.mark.processes
def test_through_a_controller(broker: Running) -> None:
    with controlling(Controller({"a": at(broker)})) as controller:
        assert srtm("pub", "t", "--controller", controller.url, "--body", "x", "--id", "p").returncode == 0
        assert controller.placed == {"p": "a"}
        assert srtm("sub", "t", "--controller", controller.url, "--count", "1").stdout == b"x\n"


@pytest.mark.processes
def test_load_creates_its_topic_and_reports(broker: Running) -> None:
    arguments = ["--publishers", "20", "--rate", "50", "--duration", "1.2s", "--group-size", "5", "--slo-p99", "2ms"]
    with controlling(Controller({"a": at(broker)})) as controller:
        done = srtm("load", "t", "--controller", controller.url, *arguments, "--json")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["received"] == report["sent"] > 0
        assert (report["lost"], report["doubled"]) == (0, 0)
        assert set(report["total_ms"]) == {"p50", "p95", "p99"}
        assert b"own lateness p99" in done.stderr
        created = controller.topics["t"]
        assert (created["slo_ms"], created["policy"]) == (2.0, "srtm")
        assert 1000 < created["r"] < 1500
        assert created["b"] >= 10
        done = srtm("load", "t", "--broker", at(broker), *arguments)
        assert done.returncode == 0
        assert b"20 publishers, 1 brokers" in done.stdout
        done = srtm("load", "u", "--controller", controller.url, *arguments, "--no-create")
        assert done.returncode == 0
        assert "u" not in controller.topics


def stopped_once(broker: Running, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """The command, to which Ctrl-C came when the broker had messages of it."""
    with subprocess.Popen(
        [sys.executable, "-m", "srtm", *arguments, "--broker", at(broker)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            broker.wait_until(lambda b: "t" in b.topics and b.topics["t"].messages > 100)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


@pytest.mark.processes
def test_ctrl_c_of_a_load_prints_its_report(broker: Running) -> None:
    done = stopped_once(broker, "load", "t", "--publishers", "20", "--duration", "600s", "--json")
    report = json.loads(done.stdout)
    assert report["stopped"]
    assert report["received"] == report["sent"] > 0
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == b"srtm: stopped"


@pytest.mark.processes
def test_ctrl_c_of_pub_is_one_line(broker: Running) -> None:
    broker.post("/topic/limit?topic=t&r=1000&b=1")
    done = stopped_once(broker, "pub", "t", "--body", "x", "--count", "1000000")
    assert (done.returncode, done.stderr) == (1, b"srtm: stopped\n")


@pytest.mark.processes
def test_load_says_what_was_refused(broker: Running) -> None:
    arguments = ["--publishers", "2", "--rate", "2", "--batch", "1", "--duration", "1s", "--size", "1100000"]
    done = srtm("load", "t", "--broker", at(broker), *arguments)
    assert done.returncode == 1
    assert b"messages were refused: E_BAD_MESSAGE" in done.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pub", "t", "--body", "x", "--file", "y"], "exclude each other"),
        (["pub", "t", "--count", "2"], "stdin can only be read once"),
        (["pub", "t", "--body", ""], "at least one byte"),
        (["pub", "a b", "--body", "x"], "invalid topic or channel name"),
        (["sub", "t", "--broker", "a:1", "--lookupd-http-address", "b:1"], "exclude each other"),
        (["load", "t", "--policy", "magic"], "known policies: lb, conc, max_min, srtm"),
        (["load", "t", "--process", "magic"], "poisson or periodic"),
        (["load", "t", "--broker", "a:1", "--size", "1"], "size = 1"),
    ],
)
def test_bad_usage(arguments: list[str], words: str) -> None:
    done = srtm(*arguments)
    assert done.returncode == 2
    assert words in done.stderr.decode()


@pytest.mark.processes
def test_nobody_there() -> None:
    done = srtm("load", "t", "--controller", "http://127.0.0.1:1", "--duration", "1s")
    assert done.returncode == 1
    assert b"no controller answers" in done.stderr
