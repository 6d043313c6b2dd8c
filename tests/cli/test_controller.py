"""`srtm controller` as a program: ready in a line, stopped in order, and clear about what it cannot do."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from srtm.cli.app import run
from srtm.control.options import ControllerOptions
from srtm.errors import InputError
from srtm.net.sockets import listen
from srtm.options import flags
from tests.broker.running import PATIENCE_S
from tests.programs import ask, post

READY = r"controller: TCP 127\.0\.0\.1:(\d+), HTTP 127\.0\.0\.1:(\d+), page 127\.0\.0\.1:(\d+)\n"
FREE = ["--tcp-port", "0", "--http-port", "0", "--web-port", "0"]


@contextmanager
def controller(*flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "srtm", "controller", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_told_to_stop(number: signal.Signals) -> None:
    with controller(*FREE) as process:
        assert process.stdout
        found = re.fullmatch(READY, process.stdout.readline())
        assert found
        tcp, http = int(found[1]), int(found[2])
        assert post(http, "/topic/create?topic=t") == 200
        assert ask(http, "/topics") == {"topics": ["t"]}
        process.send_signal(number)
        assert process.communicate(timeout=PATIENCE_S) == ("", "")
        assert process.returncode == 0
        for port in (tcp, http, int(found[3])):
            listen("127.0.0.1", port).close()


@pytest.mark.processes
def test_who_is_watching_does_not_hold_it_up_and_is_no_error() -> None:
    with controller(*FREE) as process:
        assert process.stdout
        found = re.fullmatch(READY, process.stdout.readline())
        assert found
        with httpx.stream("GET", f"http://127.0.0.1:{found[2]}/v1/topics/t/watch", trust_env=False) as watching:
            chunks = watching.iter_raw()  # which closes the stream when it is let go
            next(chunks)
            process.terminate()
            assert process.communicate(timeout=PATIENCE_S) == ("", "")
    assert process.returncode == 0


def test_a_port_that_is_taken(capfd: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert run(["controller", "--tcp-port", "0", "--http-port", str(port)]) == 1
    assert f"srtm: cannot listen on 127.0.0.1:0, :{port} and :4171: Address already in use" in capfd.readouterr().err


@pytest.mark.processes
def test_without_the_page() -> None:
    with controller(*FREE, "--web-port", "none") as process:
        assert process.stdout
        assert "page" not in process.stdout.readline()


def test_all_that_is_wrong_is_said_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["controller", "--tcp-port", "70000", "--lease-s", "0", "--exchange-s", "nan", "--safe-share", "2"]) == 2
    said = capfd.readouterr().err
    for name, value in {
        "--tcp-port": "70000",
        "--lease-s": "0.0",
        "--exchange-s": "nan",
        "--safe-share": "2.0",
    }.items():
        assert re.search(rf"{name} must be .*?, not {value}", said), said
    with pytest.raises(InputError, match="--http-port"):
        ControllerOptions(http_port=-1)


def test_there_is_a_flag_for_every_option(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["controller", "--help"]) == 0
    said = capfd.readouterr().out
    for each in flags(ControllerOptions):
        assert f"{each.name} " in said
        assert not each.secret or each.name.endswith("-file")  # command lines are public


def test_where_others_reach_it() -> None:
    assert ControllerOptions().address == "127.0.0.1"
    assert ControllerOptions("0.0.0.0").address not in ("", "0.0.0.0")
    assert ControllerOptions("0.0.0.0", broadcast_address="c.example").address == "c.example"
