"""The load against real brokers: what it counts, and that it is moved like any publisher."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import ExitStack

import numpy as np
import pytest
import uvloop

from srtm.client import Cluster
from srtm.client.load import Load, LoadOptions, LoadReport, Progress
from srtm.errors import ClientError, InputError
from srtm.model.latency import Distribution
from srtm.units import NS_PER_MS, NS_PER_S
from srtm.workload.publishers import Population, Workload
from tests.broker.running import Client, Running, running
from tests.client.controller import Controller, controlling
from tests.client.test_publisher import at, managed, migrate


def workload(publishers: int = 50, seconds: float = 1.0, **more: object) -> Workload:
    population = Population(publishers, **{"rate_mps": 20.0, "batch": 5, "group_size": 10, **more})  # type: ignore[arg-type]
    return Workload((population,), round(seconds * NS_PER_S), 7)


def run(options: LoadOptions) -> tuple[LoadReport, list[Progress]]:
    shown: list[Progress] = []
    return uvloop.run(Load(options, None).go(shown.append)), shown


def complete(report: LoadReport, work: Workload) -> None:
    expected = len(work.arrivals().times_ns)
    assert (report.sent, report.acknowledged, report.received) == (expected, expected, expected)
    assert (report.lost, report.doubled, report.refused) == (0, 0, 0)


@pytest.mark.parametrize("batch", [1, 5])
def test_everything_is_sent_received_and_measured_from_its_schedule(batch: int, broker: Running) -> None:
    work = workload(seconds=1.5, batch=batch)
    began_ns = time.time_ns()
    with Client(broker.address) as other:
        other.publish("t", b"of somebody else", b"x" * 64)  # one of another size, one of the same
    report, shown = run(LoadOptions("t", work, brokers=(at(broker),)))
    complete(report, work)
    assert report.foreign == 2
    assert report.brokers == [at(broker)]
    assert report.total is not None
    assert report.lateness is not None
    assert 0 < report.lateness.p50 <= report.total.p50 <= time.time_ns() - began_ns
    assert [second.second for second in shown] == list(range(1, len(shown) + 1))
    assert len(shown) >= 1
    broker.wait_until(lambda b: not b.topics["t"].channels)  # the ephemeral one went with the load
    assert broker.do(lambda: dict(broker.broker.control.groups))["p00"] == "p-g0"


def test_latency_counts_the_time_that_messages_wait_for_tokens(broker: Running) -> None:
    broker.post("/topic/limit?topic=t&r=500&b=1")
    work = workload(seconds=1.0)  # 1,000 messages a second
    report, _ = run(LoadOptions("t", work, brokers=(at(broker),)))
    complete(report, work)
    assert report.total is not None
    waited_ns = report.sent / 500 * NS_PER_S - work.duration_ns  # of the last one, about
    assert report.total.p99 > 0.9 * waited_ns


def test_two_loads_on_one_topic_count_their_own(broker: Running) -> None:
    works = [workload(seconds=1.0, prefix=prefix) for prefix in "pq"]

    async def both() -> list[LoadReport]:
        loads = [Load(LoadOptions("t", work, brokers=(at(broker),)), None) for work in works]
        return await asyncio.gather(*(load.go(lambda _: None) for load in loads))

    for report, work in zip(uvloop.run(both()), works, strict=True):
        complete(report, work)


def test_what_is_refused_is_counted_and_explained() -> None:
    with running(max_msg_size=100) as broker:
        work = workload(3, 1.0, batch=1)
        report, _ = run(LoadOptions("t", work, 101, brokers=(at(broker),)))
        assert (report.refused, report.received, report.lost, report.unanswered) == (report.sent, 0, 0, 0)
        assert "E_BAD_MESSAGE" in str(report.problem)
        assert report.facts()["problem"] == report.problem


def test_a_broker_that_dies_leaves_messages_without_an_answer() -> None:
    async def story(address: str, ending: ExitStack) -> LoadReport:
        options = LoadOptions("t", workload(5, 2.0), brokers=(address,), settle_s=0.1)
        return await Load(options, None).go(lambda _: ending.close())  # after a second

    with ExitStack() as stack:
        broker = stack.enter_context(running())
        report = uvloop.run(story(at(broker), stack))
        assert report.unanswered > 0
        assert report.received > 0
        assert report.problem is not None


def test_it_gives_up_where_nobody_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nowhere = f"127.0.0.1:{taken.getsockname()[1]}"
    options = LoadOptions("t", workload(), brokers=(nowhere,), patience_s=0.5)
    with pytest.raises(ClientError, match=r"within 0.5 s: cannot connect to"):
        run(options)


def test_one_that_is_stopped_reports_what_it_sent(broker: Running) -> None:
    load = Load(LoadOptions("t", workload(seconds=600.0), brokers=(at(broker),)), None)

    def stop(_: Progress) -> None:
        load.stop()

    report = uvloop.run(load.go(stop))  # after a second
    assert report.stopped
    assert 0 < report.received == report.acknowledged == report.sent < load.schedule.messages
    assert report.lost == 0
    assert report.rate > 200  # by the time that it had


def test_without_a_channel_it_goes_by_answers(broker: Running) -> None:
    work = workload(seconds=1.0)
    report, _ = run(LoadOptions("t", work, channel=None, brokers=(at(broker),)))
    complete(report, work)
    assert report.total is not None
    assert report.brokers == [at(broker)]
    assert not broker.do(lambda: broker.broker.topics["t"].channels)


def test_publishers_are_registered_at_once_and_move_without_loss() -> None:
    work = workload(200, 2.0)

    async def story(a: Running, controller: Controller) -> LoadReport:
        async with Cluster(controller.url) as cluster:
            loading = asyncio.create_task(Load(LoadOptions("t", work), cluster).go(lambda _: None))
            while not a.broker.topics.get("t") or a.broker.topics["t"].messages < 500:
                await asyncio.sleep(0.02)
            controller.target = "b"
            controller.placed = dict.fromkeys(controller.placed, "b")
            assert len(controller.requests) == 1
            controller.change()
            await asyncio.to_thread(migrate, a, controller.placed)  # to whom the controller says
            return await loading

    with managed() as a, running() as b, controlling(Controller({"a": at(a), "b": at(b)})) as controller:
        report = asyncio.run(story(a, controller))
        complete(report, work)
        assert report.migrations == 200
        assert sorted(report.brokers) == sorted([at(a), at(b)])
        assert len(controller.requests[0]["publishers"]) == 200
        assert controller.specs["p000"] == {
            "id": "p000", "group": "p-g0", "rate": 20.0, "process": "poisson", "batch": 5, "jitter_ms": 0.0,
        }  # fmt: skip


def test_a_load_that_was_late_says_so() -> None:
    def report(total_ms: int, late_ms: float) -> LoadReport:
        total, late = (Distribution.of(np.array([round(ms * NS_PER_MS)], np.int64)) for ms in (total_ms, late_ms))
        return LoadReport("t", 1, [], 1.0, 1, 1, 1, 0, 0, 0, 0, 1.0, total, late, 1.0, 0.1, 0, 0, 0)

    assert report(10, 5).bottleneck
    assert not report(10, 1).bottleneck
    assert not report(0, 0.05).bottleneck
    facts = json.loads(json.dumps(report(10, 5).facts()))
    assert (facts["total_ms"]["p99"], facts["lateness_ms"]["p50"], facts["bottleneck"]) == (10, 5, True)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="size = 3"):
        LoadOptions("t", workload(), 3)
    with pytest.raises(InputError, match="exceed the limit"):
        LoadOptions("t", workload(100_000, 1000.0))
    with pytest.raises(InputError, match="write host:port"):
        LoadOptions("t", workload(), brokers=("nowhere",))
    with pytest.raises(InputError, match="schedule is empty"):
        Load(LoadOptions("t", workload(1, 1e-6)), None)
