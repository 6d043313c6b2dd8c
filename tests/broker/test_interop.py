"""Clients of other hands: pynsq, the official one for Python, and nsqjs, the one for Node.js."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from srtm.net import compression
from tests.broker.conftest import Start
from tests.broker.running import Running
from tests.conftest import PARTS, ROOT

PROGRAM = Path(__file__).with_name("pynsq_client.py")
BODIES = ["requeued", "touched", "timed out", *(f"plain {i}" for i in range(20)), "deferred"]

needs_pynsq = pytest.mark.skipif(find_spec("nsq") is None, reason="needs pynsq: pip install pynsq")
needs_trustme = pytest.mark.skipif(find_spec("trustme") is None, reason="needs trustme: pip install trustme")
needs_snappy = pytest.mark.skipif(
    not compression.HAS_SNAPPY or find_spec("snappy") is None, reason="needs both: pip install cramjam python-snappy"
)


def told(broker: Running, **options: Any) -> dict[str, Any]:
    asked = {"address": f"127.0.0.1:{broker.broker.tcp_port}", "bodies": BODIES, "options": options, "timeout_s": 8}
    done = subprocess.run(
        [sys.executable, "-P", str(PROGRAM), json.dumps(asked)], capture_output=True, text=True, timeout=40, check=False
    )
    assert done.returncode == 0, done.stderr
    story: dict[str, Any] = json.loads(done.stdout)
    story["log"] = done.stderr
    return story


def check(story: dict[str, Any], broker: Running) -> None:
    assert story["answers"] == ["OK", "OK", "OK"], story["log"]
    assert story["finished"] == sorted(BODIES), story["log"]
    attempts = dict.fromkeys(BODIES, 1) | {"requeued": 2, "timed out": 2}
    assert {each["body"]: each["attempts"] for each in story["messages"]} == attempts
    channel = broker.channel("t", "c")
    assert (channel["depth"], channel["in_flight_count"], channel["deferred_count"]) == (0, 0, 0)
    assert (channel["requeue_count"], channel["timeout_count"]) == (1, 1)


@pytest.mark.processes
@needs_pynsq
def test_pynsq(broker: Running) -> None:
    check(told(broker), broker)


@pytest.mark.processes
@needs_pynsq
def test_pynsq_with_deflate(broker: Running) -> None:
    check(told(broker, deflate=True), broker)


@pytest.mark.processes
@needs_pynsq
@needs_snappy
def test_pynsq_with_snappy(broker: Running) -> None:
    check(told(broker, snappy=True), broker)


@pytest.mark.processes
@needs_pynsq
@needs_trustme
@pytest.mark.parametrize("more", [{}, {"deflate": True}, pytest.param({"snappy": True}, marks=needs_snappy)])
def test_pynsq_with_tls(more: dict[str, Any], start: Start, tmp_path: Path) -> None:
    from tests.broker.test_transport import Certificates

    certificates = Certificates(tmp_path)
    broker = start(**certificates.options, tls_required=True, plain_http=True)
    check(told(broker, tls_v1=True, tls_options={"ca_certs": certificates.ca}, **more), broker)


@pytest.mark.processes
@needs_pynsq
def test_pynsq_with_auth(start: Start, authority: Any) -> None:
    broker = start(auth_http_addresses=(authority.address,))
    check(told(broker, auth_secret="s3cret"), broker)
    assert {each["secret"] for each in authority.asked} == {"s3cret"}


NSQJS = """
const nsq = require('nsqjs')
const [host, port, options] = [process.argv[2], Number(process.argv[3]), JSON.parse(process.argv[4])]
const bodies = Array.from({length: 50}, (_, i) => `body ${i}`)
const left = new Set(bodies), attempts = {}
const writer = new nsq.Writer(host, port, options)
const reader = new nsq.Reader('t', 'c', {nsqdTCPAddresses: [`${host}:${port}`], maxInFlight: 10, ...options})
const fail = (error) => { console.error(error); process.exit(1) }
writer.on('error', fail); reader.on('error', fail)
reader.on('message', (message) => {
  const body = message.body.toString()
  attempts[body] = message.attempts
  if (body === bodies[7] && message.attempts === 1) return message.requeue(0, false)
  message.finish(); left.delete(body)
  if (!left.size) { setTimeout(() => { console.log(JSON.stringify(attempts)); process.exit(0) }, 100) }
})
reader.connect()
writer.connect()
writer.on('ready', () => writer.publish('t', bodies.slice(0, 25), () => {
  for (const body of bodies.slice(25)) writer.publish('t', body)
}))
setTimeout(() => fail('time is over'), 10000)
"""


@pytest.fixture
def nsqjs(tmp_path: Path) -> Path:
    if not (ROOT / ".parts/node_modules/nsqjs").is_dir() and "NODE_PATH" not in os.environ:
        missing = "needs nsqjs: npm install --prefix .parts nsqjs"
        if os.environ.get("SRTM_REQUIRE_PARTS"):
            pytest.fail(missing)
        pytest.skip(missing)
    program = tmp_path / "client.js"
    program.write_text(NSQJS)
    return program


@pytest.mark.needs("node")
@pytest.mark.parametrize(
    "options", [{}, {"deflate": True}, pytest.param({"snappy": True}, marks=needs_snappy)], ids=str
)
def test_nsqjs(options: dict[str, Any], nsqjs: Path, broker: Running) -> None:
    command = [PARTS["node"].path or "", str(nsqjs), "127.0.0.1", str(broker.broker.tcp_port), json.dumps(options)]
    environment = {"NODE_PATH": str(ROOT / ".parts/node_modules"), **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {f"body {i}": 2 if i == 7 else 1 for i in range(50)}
    broker.wait_until(lambda b: b.topics["t"].channels["c"].finished == 50)
