"""The page with 100 topics on 20 brokers: what a second costs the controller, the wire and the browser.

`python -m bench.page [--topics N --brokers N --seconds N]`. A controller is filled with reports as brokers would send
them, each topic on every broker, all numbers new each second; a real Chromium looks at its page.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from playwright.async_api import async_playwright

from srtm.control.api.feed import Feed
from srtm.control.api.schema import member_out, topic_out
from srtm.control.clock import now_ns
from srtm.control.controller import Controller
from srtm.control.discovery.registry import Registry
from srtm.control.members import Condition, DeclaredPublisher
from srtm.control.options import ControllerOptions
from srtm.control.run import app
from srtm.control.service import Service
from srtm.control.store import Store
from srtm.model.latency import Sketch
from srtm.model.split import split
from srtm.model.transfer import Transfer
from srtm.net.site import Site
from srtm.protocol.exchange import Contract, Second
from srtm.units import NS_PER_MS
from srtm.web import page

_TOKEN = 10**9
_PUBLISHERS = 100


def crowded(topics: int, brokers: int) -> Controller:
    """A controller with so many topics, each on all of so many brokers."""
    rng = random.Random(1)
    controller = Controller(ControllerOptions(), Store(), now_ns())
    names = [f"broker-{number + 1}" for number in range(brokers)]
    for number, name in enumerate(names):
        controller.joined(name, "127.0.0.1", 10_000 + number, 20_000 + number, now_ns())
        controller.members[name].status = "alive"
    for number in range(topics):
        topic = controller.create(f"topic-{number + 1}", Contract(1_000_000, 200 * _TOKEN), now_ns())
        topic.opened = True
        shares = dict(zip(names, split(topic.contract.bucket, [str(1 + rng.random()) for _ in names]), strict=True))
        topic.transfer = Transfer(topic.contract.bucket, shares, shares)
        for publisher in range(_PUBLISHERS):
            topic.layout.publishers[f"p{publisher}"] = DeclaredPublisher(f"p{publisher}", 10.0)
        places = {f"p{publisher}": names[publisher % brokers] for publisher in range(_PUBLISHERS)}
        topic.layout.place.assign(places, "registered")
    return controller


def report(controller: Controller, number: int, seed: int = 1) -> None:
    """A second of every topic at every broker, as their answers would bring it."""
    rng = np.random.default_rng((seed, number))
    for member in controller.members.values():
        member.condition = Condition(int(rng.integers(4_000, 6_000)), lag_ns=int(rng.integers(10**5, 10**6)))
        member.status, member.link.stamp_heard_ns = "alive", now_ns()
    for topic in controller.topics.values():
        for name in controller.members:
            access = (rng.exponential(0.05, 60) * (rng.random(60) < 0.1) * NS_PER_MS).astype(np.int64)
            processing = (rng.gamma(4, 0.08, 60) * NS_PER_MS).astype(np.int64)
            parts = [Sketch.of(values).flat for values in (access, access + processing, processing)]
            seen = topic.layout.seen[name]
            seen.waiting, seen.publishers = int(rng.integers(0, 3)), _PUBLISHERS // len(controller.members)
            seen.hear(Second(number, int(rng.integers(40, 60)), _TOKEN, 1, 60, 0, *parts), now_ns(), 10)


@asynccontextmanager
async def served(controller: Controller, sizes: list[int]) -> AsyncIterator[str]:
    """The page of a controller that hears of a new second every second; notes how large the events of its feed are."""
    service = Service(controller, Registry(300, 45))
    site = Site(page(app(service)), "127.0.0.1", 0)
    site.start()
    tasks = [
        asyncio.create_task(work) for work in (service.feed.run(), _report(controller), _count(service.feed, sizes))
    ]
    try:
        yield f"http://127.0.0.1:{site.port}/"
    finally:
        service.feed.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await site.stop()


async def _report(controller: Controller) -> None:
    number = 10
    while True:
        number += 1
        report(controller, number)
        await asyncio.sleep(1)


async def measured(options: argparse.Namespace) -> dict[str, float]:
    """Figures of one run."""
    controller = crowded(options.topics, options.brokers)
    for number in range(1, 11):
        report(controller, number)
    began = time.process_time()
    cluster = controller.statistics(now_ns())
    for topic in cluster.topics:
        topic_out(topic)
    for member in cluster.brokers:
        member_out(member)
    computing_ms = (time.process_time() - began) * 1000

    sizes: list[int] = []
    async with served(controller, sizes) as url:
        figures = await _looked_at(url, len(controller.topics), options.seconds)
    return {
        "controller: CPU for one document, ms": computing_ms,
        "snapshot, kB": sizes[0] / 1000,
        "patch a second, kB": float(np.median(sizes[1:])) / 1000,
        **figures,
    }


async def _count(feed: Feed, sizes: list[int]) -> None:
    async for event in feed.events():
        sizes += [len(event)]


async def _looked_at(url: str, topics: int, seconds: int) -> dict[str, float]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        looking = await browser.new_page(viewport={"width": 1360, "height": 900})
        await looking.goto(f"{url}#topic=topic-1")
        await looking.wait_for_function(f"document.querySelectorAll('#topics tbody tr').length === {topics}")
        await looking.evaluate(_WATCH_FRAMES)
        session = await looking.context.new_cdp_session(looking)
        await session.send("Performance.enable")
        before = await _metrics(session)
        await asyncio.sleep(seconds)
        after = await _metrics(session)
        frames = await looking.evaluate("frames_")
        await browser.close()
    spent = {name: (after[name] - before[name]) / seconds * 1000 for name in before}
    return {
        "browser: script a second, ms": spent["ScriptDuration"],
        "browser: style and layout a second, ms": spent["RecalcStyleDuration"] + spent["LayoutDuration"],
        "browser: all of its main thread a second, ms": spent["TaskDuration"],
        "browser: longest gap between two frames, ms": max(frames),
        "browser: heap, MB": after["JSHeapUsedSize"] / 1e6,
    }


_WATCH_FRAMES = """() => {
  window.frames_ = []
  let last = performance.now()
  const frame = (now) => { frames_.push(now - last); last = now; requestAnimationFrame(frame) }
  requestAnimationFrame(frame)
}"""


async def _metrics(session: Any) -> dict[str, float]:
    return {each["name"]: each["value"] for each in (await session.send("Performance.getMetrics"))["metrics"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--brokers", type=int, default=20)
    parser.add_argument("--seconds", type=int, default=20)
    options = parser.parse_args()
    print(f"{options.topics} topics on {options.brokers} brokers each, {options.seconds} s")
    for name, value in asyncio.run(measured(options)).items():
        print(f"{name:48} {value:10,.1f}")


if __name__ == "__main__":
    main()
