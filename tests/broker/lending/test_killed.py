"""Broker processes that lend: one is killed, or stopped, while the other borrows."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from srtm.model.timeline import Timeline, largest_excess
from srtm.protocol.exchange import Answer, Exchange, read, write
from tests.broker.lending.running import NOBODY, Lending
from tests.broker.running import Client, Running
from tests.control.processes import Program, until


class Process(Running):
    """A broker in a process of its own, as `Lending` uses it."""

    def __init__(self, name: str, folder: Path) -> None:
        flags = ["--name", name, "--tcp-port", "0", "--http-port", "0", "--controller", NOBODY]
        self.program = Program("broker", *flags, "--trace-folder", str(folder))
        self.address = ("127.0.0.1", self.program.tcp)
        self.url = f"http://127.0.0.1:{self.program.http}"
        first = Exchange(epoch=1, number=0, incarnation=0, echo=None, lease_ns=10**12, safe_percent=50, version=0)
        answer = read(self.post("/srtm/exchange", write(first))[1], Answer)
        self.broker: Any = SimpleNamespace(
            options=SimpleNamespace(name=name),
            tcp_port=self.program.tcp,
            started_ns=answer.incarnation,
            clock=SimpleNamespace(monotonic_ns=lambda: 0),
        )

    def do(self, action: Any) -> Any:
        """Nothing is done in the process."""
        return action()


@pytest.mark.processes
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lender_that_is_killed_or_stopped_leaves_its_peer_its_own_share(how: signal.Signals, tmp_path: Path) -> None:
    brokers = [Process(f"broker-{number}", tmp_path) for number in range(2)]
    borrower, lender = brokers
    try:
        lending = Lending(brokers, 200, 10, "when_waiting")
        assert borrower.post("/srtm/trace/start?file=borrower.parquet")[0] == 200
        with Client(borrower.address) as client:

            def burst() -> int:
                client.publish("t", *[b"x"] * 14)
                time.sleep(0.1)
                return lending.lent(borrower).borrowed_ntok

            until(burst)  # as soon as they have met
            for _ in range(5):
                burst()
            lender.program.process.send_signal(how)
            before = lending.lent(borrower)
            for _ in range(10):
                burst()
            after = lending.lent(borrower)
            assert after.asks > before.asks
            assert after.borrowed_ntok - before.borrowed_ntok <= 4 * 10**9  # what was on its way
            until(lambda: borrower.get("/stats?format=json&topic=t")["topics"][0]["srtm"]["waiting"] == 0)
        assert borrower.post("/srtm/trace/stop")[0] == 200
        trace = pq.read_table(tmp_path / "borrower.parquet")
        released = np.sort(trace["release_ns"].to_numpy())
        assert len(released) >= 16 * 14
        assert largest_excess(released, Timeline(lending.contract.bucket, ())).tokens <= 0
    finally:
        for broker in brokers:
            broker.program.kill()
