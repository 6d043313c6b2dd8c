"""What viewers get: the same document for all, by patches, whatever they leave unread."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from srtm.control import statistics
from srtm.control.api import feed as module
from srtm.control.api.feed import Feed, difference
from srtm.control.api.schema import topic_out
from srtm.control.controller import Controller
from srtm.control.members import DeclaredPublisher
from srtm.control.options import ControllerOptions
from srtm.control.reports import Seen
from srtm.control.store import Store
from srtm.model.latency import Sketch
from srtm.model.transfer import Transfer
from srtm.protocol.exchange import Contract, Second
from srtm.units import NS_PER_S

TOKEN = 10**9
LEAVES = st.none() | st.integers() | st.text() | st.lists(st.integers(), max_size=2)
DOCUMENTS = st.dictionaries(
    st.sampled_from("abcd"),
    st.recursive(LEAVES, lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3), max_leaves=8),
)


def merged(target: Any, patch: Any) -> Any:
    """RFC 7396, word for word."""
    if not isinstance(patch, dict):
        return patch
    if not isinstance(target, dict):
        target = {}
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        else:
            target[name] = merged(target.get(name), value)
    return target


def without_nulls(document: Any) -> Any:
    if not isinstance(document, dict):
        return document
    return {name: without_nulls(value) for name, value in document.items() if value is not None}


@given(DOCUMENTS, DOCUMENTS)
def test_a_patch_makes_one_document_of_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    patch = json.loads(json.dumps(difference(before, after)))
    assert merged(without_nulls(json.loads(json.dumps(before))), patch) == without_nulls(after)
    assert difference(after, after) == {}


def filled() -> Controller:
    """A controller with a topic that is split over two brokers, and latencies of 1 to 100 ms at each."""
    controller = Controller(ControllerOptions(), Store(), 1)
    topic = controller.create("t", Contract(1_000_000, 100 * TOKEN, 5_000_000), 1)
    topic.transfer = Transfer(
        topic.contract.bucket, halves := dict(zip("ab", _halves(topic.contract), strict=True)), halves
    )
    for name in "ab":
        controller.joined(name, "127.0.0.1", 1, 2, 1)
        topic.layout.seen[name].hear(second(7), 1, 10)
    return controller


def _halves(contract: Contract) -> list[Any]:
    whole = contract.bucket
    return [type(whole)(whole.r_mtps // 2, whole.b_ntok // 2)] * 2


def second(number: int) -> Second:
    values = np.arange(1, 101) * 1_000_000
    flat = Sketch.of(values).flat
    return Second(number, 100, TOKEN, 1, 100, 95, flat, flat, flat)


async def next_event(events: Any) -> tuple[str, dict[str, Any]]:
    async with asyncio.timeout(10):
        kind, data = (await anext(events)).decode().strip().split("\n")
    return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_viewers_get_a_snapshot_then_patches_and_who_does_not_read_a_snapshot_again() -> None:
    async def story() -> None:
        controller = filled()
        feed = Feed(controller)
        task = asyncio.create_task(feed.run())
        try:
            events, sleeper = feed.events(), feed.events()
            waiting = asyncio.create_task(next_event(sleeper))
            kind, document = await next_event(events)
            assert kind == "snapshot"
            assert (await waiting)[0] == "snapshot"
            assert document["topics"]["t"]["brokers"].keys() == {"a", "b"}
            for number in range(8, 8 + 2 * module._UNREAD):
                controller.topics["t"].layout.seen["a"].hear(second(number), number, 10)
                feed._woken.set()
                kind, patch = await next_event(events)
                assert kind == "patch"
                document = merged(document, patch)
            now = json.loads(json.dumps(topic_out(statistics.of_topic(controller.state, controller.topics["t"], 1))))
            parts = document["topics"]["t"]["brokers"].values()
            seen = {**document["topics"]["t"], "brokers": [without_nulls(each) for each in parts]}
            now["brokers"] = [
                without_nulls({k: v for k, v in each.items() if k != "broker"}) for each in now["brokers"]
            ]
            assert without_nulls({**seen, "opening_s": 0}) == without_nulls({**now, "opening_s": 0})
            kinds = []
            while "snapshot" not in kinds:
                kinds.append((await next_event(sleeper))[0])
            feed.close()
            assert [event async for event in events] == []
        finally:
            task.cancel()

    asyncio.run(story())


def test_ten_minutes_are_remembered(monkeypatch: Any) -> None:
    now = 10**18

    async def story() -> None:
        nonlocal now
        controller = filled()
        feed = Feed(controller)
        for _ in range(200):
            await feed._once(now)
            now += NS_PER_S * module.STEP_S
        points = feed.history("t")
        assert len(points) == module.HISTORY_S // module.STEP_S
        assert points[-1]["at_ms"] - points[0]["at_ms"] == 1000 * (module.HISTORY_S - module.STEP_S)
        assert points[-1]["total_ms"]["p50"] > points[-1]["rate"] / 100
        controller.remove("t", 0)
        await feed._once(now)
        assert feed.history("t") == []

    monkeypatch.setattr(module, "now_ns", lambda: now)
    asyncio.run(story())


def test_the_penalty_is_what_one_bucket_would_not_have_made_them_wait() -> None:
    controller = filled()
    topic = controller.topics["t"]

    def penalty_ms() -> float | None:
        return statistics.of_topic(controller.state, topic, 1).penalty_ms

    assert penalty_ms() is None  # nobody has asked the model yet
    topic.one_bucket = (0, 9_000_000)
    access_ms = statistics.of_topic(controller.state, topic, 1).access_ms
    assert access_ms is not None
    measured = access_ms.p99
    assert 99 <= measured <= 99 * 33 / 32
    assert penalty_ms() == measured - 9
    topic.one_bucket = (0, 10**12)
    assert penalty_ms() == 0
    topic.transfer = Transfer(topic.contract.bucket, {}, {}, pool_ntok=topic.contract.b_ntok)
    assert penalty_ms() == 0  # not split


def test_the_model_is_asked_once_publishers_have_declared_themselves(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 0.01)

    async def story() -> None:
        controller = Controller(ControllerOptions(), Store(), 1)
        topic = controller.create("t", Contract(100_000, 10 * TOKEN), 1)
        crowd = [DeclaredPublisher(f"p{number}", 10.0, group="g", batch=10) for number in range(8)]
        controller.register("t", crowd, 1)
        task = asyncio.create_task(Feed(controller).predict())
        try:
            async with asyncio.timeout(30):
                while topic.one_bucket is None:
                    await asyncio.sleep(0.01)
        finally:
            task.cancel()
        # 80 messages at once find 10 tokens, and the rest come at 100 a second.
        assert topic.one_bucket[0] == topic.layout.roster
        assert topic.one_bucket[1] is not None
        assert topic.one_bucket[1] >= 0.7 * NS_PER_S * 0.98

    asyncio.run(story())


@given(st.lists(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=5), max_size=30))
def test_a_window_is_the_sum_of_the_seconds_that_are_remembered(sketches: list[list[tuple[int, int]]]) -> None:
    seen = Seen()
    for number, pairs in enumerate(sketches, 1):
        flat = [value for pair in dict(pairs).items() for value in pair]
        seen.hear(Second(number, 0, 0, 0, 0, 0, flat, flat, flat), number, 10)
    whole = Sketch()
    for kept in seen.seconds:
        whole.add(Sketch.read(kept.total))
    expected = {bin_: count for bin_, count in whole.counts.items() if count}
    for window in (seen.total, seen.access, seen.processing):
        assert {bin_: count for bin_, count in window.counts.items() if count} == expected
        assert window.quantiles_ns(("0.5", "0.99")) == [whole.quantile_ns("0.5"), whole.quantile_ns("0.99")]
