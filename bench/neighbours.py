"""`python -m bench.neighbours`: two topics on one broker, one of which floods at 20 times its rate.

The quiet topic's latency, as the broker counts it (kernel arrival to written), in turns: alone, beside a topic that
keeps to its rate, and beside the flood; and whether every message of both that was answered has arrived. The broker
has one core, the clients another.
"""

from __future__ import annotations

import asyncio
import functools
import json
import statistics
import subprocess
import sys
import urllib.request
from contextlib import suppress

from bench import host, peers
from bench.measure import show
from srtm.protocol import client as say
from srtm.protocol.client import ClientProtocol, Message
from srtm.protocol.frames import OK
from srtm.protocol.names import MAGIC_V2

RATE_MPS = 500  # of both topics
FLOOD = 20
BUCKET = f"&r={RATE_MPS}&b=1000"
TURN_S = 6
TURNS = 4
BODY = bytes(100)


async def publish(port: int, http_port: int, topic: str, rate_mps: float, seconds: float) -> int:
    """Publish evenly; returns how many messages were answered, once there was no limit any more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(MAGIC_V2)
    loop = asyncio.get_running_loop()
    began, sent = loop.time(), 0
    while loop.time() - began < seconds:
        due = int((loop.time() - began) * rate_mps)
        if due > sent:
            writer.write(say.pub(topic, BODY) * (due - sent))
            sent = due
        with suppress(TimeoutError):  # it is pushed back, and goes on as fast as it may
            async with asyncio.timeout(0.002):
                await writer.drain()
        await asyncio.sleep(0.002)
    if rate_mps > RATE_MPS:
        limit(http_port, topic, "")  # what still waits, here and there, may go now
    answers = b""
    with suppress(TimeoutError):
        while len(answers) < sent * len(OK):
            async with asyncio.timeout(2):
                answers += await reader.read(65536)
    if rate_mps > RATE_MPS:
        limit(http_port, topic, BUCKET)
    writer.close()
    return len(answers) // len(OK)


async def consume(port: int, topic: str, counted: list[int]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(MAGIC_V2 + say.sub(topic, "c") + say.rdy(2500))
    protocol = ClientProtocol()
    while data := await reader.read(65536):
        messages = [event for event in protocol.feed(data) if isinstance(event, Message)]
        counted[0] += len(messages)
        writer.write(b"".join(say.fin(message.id) for message in messages))


def limit(http_port: int, topic: str, bucket: str) -> None:
    url = f"http://127.0.0.1:{http_port}/topic/limit?topic={topic}{bucket}"
    urllib.request.urlopen(urllib.request.Request(url, data=b"", method="POST")).close()


def p99_us(http_port: int, topic: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/stats?format=json&topic={topic}") as answer:
        (found,) = json.load(answer)["topics"]
    tails = [second["total_ns"]["p99"] for second in found["srtm"]["seconds"][-TURN_S + 1 :] if second["total_ns"]]
    return float(statistics.median(tails)) / 1_000


async def measure(port: int, http_port: int) -> None:
    counted = {topic: [0] for topic in ("quiet", "flood")}
    consumers = [asyncio.create_task(consume(port, topic, found)) for topic, found in counted.items()]
    answered = {"quiet": 0, "flood": 0}
    beside = {"alone": 0, "beside its like": RATE_MPS, "beside the flood": FLOOD * RATE_MPS}
    tails: dict[str, list[float]] = {name: [] for name in beside}
    for _ in range(TURNS):
        for name, rate_mps in beside.items():
            quiet = asyncio.create_task(publish(port, http_port, "quiet", RATE_MPS, TURN_S))
            flood = asyncio.create_task(publish(port, http_port, "flood", rate_mps, TURN_S + 0.5))
            answered["quiet"] += await quiet
            tails[name].append(p99_us(http_port, "quiet"))
            answered["flood"] += await flood
    for _ in range(60):
        if all(counted[topic][0] >= answered[topic] for topic in answered):
            break
        await asyncio.sleep(0.5)
    for task in consumers:
        task.cancel()
    rows = []
    for name, each in tails.items():
        rows.append([name, f"{statistics.median(each):.0f}", ", ".join(f"{tail:.0f}" for tail in each)])
    title = f"p99 of {RATE_MPS} msg/s beside a topic of {FLOOD * RATE_MPS} msg/s that may have {RATE_MPS}"
    show(title, ["", "µs", "turns"], rows)
    for topic, found in counted.items():
        print(f"{topic}: {answered[topic]:,} answered, {found[0]:,} arrived")


def main() -> None:
    print(host.describe(1))
    command = [sys.executable, "-m", "srtm", "broker", "--tcp-port", "0", "--http-port", "0"]
    realtime = peers.can_be_realtime()
    on_its_core = functools.partial(peers.settle, peers.BROKER_CORE, realtime=realtime)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=on_its_core) as process:
        try:
            assert process.stdout is not None
            ports = [int(part.rpartition(":")[2]) for part in process.stdout.readline().split(", ")]
            for topic in ("quiet", "flood"):
                limit(ports[1], topic, BUCKET)
            peers.settle(peers.LOAD_CORE, realtime=realtime)
            asyncio.run(measure(*ports))
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
