"""The facade for code without a loop."""

from __future__ import annotations

import subprocess
import sys

import pytest

from srtm.client.sync import Publisher, Subscriber
from tests.broker.running import Running
from tests.client.test_publisher import at


def test_publishes_and_subscribes(broker: Running) -> None:
    with Publisher("t", broker=at(broker)) as publisher:
        publisher.publish(b"one")
        publisher.publish_many([b"two"])
        assert publisher.address == at(broker)
        answers = [publisher.publish_later([b"three"])]
        assert [answer.result(10) for answer in answers] == [None]
    with Subscriber("t", "c", brokers=[at(broker)]) as subscriber:
        found = []
        for message in subscriber:
            if message.body == b"one" and message.attempts == 1:
                message.touch()
                message.requeue()
                continue
            message.finish()
            found.append(message.body)
            if len(found) == 3:
                break
        assert subscriber.get(timeout_s=0.1) is None
    assert found == [b"two", b"three", b"one"]


@pytest.mark.processes
def test_a_fork_has_a_loop_of_its_own(broker: Running) -> None:
    code = f"""
import os, sys
from srtm.client.sync import Publisher
def publish(body):
    with Publisher("t", broker={at(broker)!r}) as publisher:
        publisher.publish(body)
publish(b"parent")
child = os.fork()
if not child:
    publish(b"child")
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)
    assert broker.do(lambda: broker.broker.topics["t"].messages) == 2


@pytest.mark.processes
def test_a_missing_httpx_is_named_with_its_remedy() -> None:
    code = "import sys; sys.modules['httpx'] = None; import srtm.client"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "srtm.client needs httpx: pip install 'srtm[client]'" in done.stderr


@pytest.mark.processes
def test_neither_spark_nor_uvloop_nor_a_compiler_is_imported() -> None:
    code = (
        "import sys, srtm.client.sync; sys.exit(bool({'pyspark', 'uvloop', 'numba', 'uvicorn'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
