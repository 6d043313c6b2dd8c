"""`srtm broker`: what its flags do, and what they refuse."""

from __future__ import annotations

import subprocess
import sys

import pytest

from srtm.protocol import client as say
from tests.broker.running import PATIENCE_S, Client

BROKER = [sys.executable, "-m", "srtm", "broker", "--tcp-port", "0", "--http-port", "0"]


@pytest.mark.processes
def test_limits_are_set_by_flags() -> None:
    flags = ["--max-msg-size", "100", "--max-body-size", "150", "--msg-timeout", "1500ms", "--max-held-messages", "5"]
    with subprocess.Popen([*BROKER, *flags], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = ("127.0.0.1", int(process.stdout.readline().split(", ")[0].rpartition(":")[2]))
            with Client(address, client_id="c") as client:
                assert client.settled["msg_timeout"] == 1500
                client.publish("t", b"x" * 100)
                client.send(say.pub("t", b"x" * 101))
                assert client.error().startswith(b"E_BAD_MESSAGE PUB message too big 101 > 100")
            with Client(address) as client:
                client.send(say.mpub("t", [b"x" * 90] * 2))
                assert client.error().startswith(b"E_BAD_BODY MPUB body too big 192 > 150")
            with Client(address) as client:
                client.subscribe("u", "c", ready=0)
                client.publish("u", *[b"x"] * 5)
                client.send(say.pub("u", b"x"))
                assert client.error() == b"E_PUB_FAILED PUB failed topic is full"
        finally:
            process.terminate()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        (["--msg-timeout", "1h"], "must not exceed --max-msg-timeout, but 3600s is more than 900s"),
        (["--client-timeout", "0s"], "--client-timeout must be between 1ms and 24h, not '0s'"),
        (["--retain-age", "0s", "--data-path", "x"], "such as 36h, not '0s'"),
        (["--retain-bytes", "9"], "--data-path"),
    ],
)
def test_flags_that_cannot_be(flags: list[str], remedy: str) -> None:
    done = subprocess.run([*BROKER, *flags], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode
    assert remedy in done.stderr
    assert "Traceback" not in done.stderr
