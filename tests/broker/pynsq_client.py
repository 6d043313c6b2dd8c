"""A program for test_interop.py: the official Python client against an address, its story as JSON on stdout.

It publishes bodies in every way it knows, and consumes them: the first body is requeued once, the second touched for
longer than its time-out, the third left to time out once. Run in a process of its own, because it brings a loop,
signals and deprecations of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from contextlib import suppress
from typing import Any

import nsq


async def tell(address: str, bodies: list[str], options: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    answers: list[Any] = []
    messages: list[dict[str, Any]] = []
    done = asyncio.Event()

    async def published(send: Any, *args: Any) -> None:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        send("t", *args, callback=lambda _, data: answer.set_result(data))
        data = await asyncio.wait_for(answer, timeout_s)
        answers.append(data.decode() if isinstance(data, bytes) else repr(data))

    def handle(message: Any) -> bool:
        body, attempts = message.body.decode(), message.attempts
        messages.append({"body": body, "attempts": attempts, "at": time.monotonic()})
        message.enable_async()
        if body == bodies[0] and attempts == 1:
            message.requeue(delay=0, backoff=False)
        elif body == bodies[1]:
            asyncio.get_running_loop().create_task(slowly(message))
        elif body != bodies[2] or attempts > 1:
            message.finish()
            finished.add(body)
        if finished == set(bodies):
            done.set()
        return True

    async def slowly(message: Any) -> None:
        for _ in range(4):
            await asyncio.sleep(0.6)
            message.touch()
        message.finish()
        finished.add(bodies[1])
        if finished == set(bodies):
            done.set()

    finished: set[str] = set()
    common = {"nsqd_tcp_addresses": [address], **options}
    writer = nsq.Writer(**common)
    reader = nsq.Reader(
        topic="t",
        channel="c",
        message_handler=handle,
        max_in_flight=50,
        msg_timeout=2,
        lookupd_poll_interval=1,
        **common,
    )
    for _ in range(100):
        if writer.conns and next(iter(writer.conns.values())).state == "CONNECTED":
            break
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.2)
    await published(writer.pub, bodies[0].encode())
    await published(writer.mpub, [body.encode() for body in bodies[1:-1]])
    await published(writer.dpub, 200, bodies[-1].encode())
    with suppress(TimeoutError):
        await asyncio.wait_for(done.wait(), timeout_s)
    await asyncio.sleep(0.2)
    reader.close()
    return {"answers": answers, "messages": messages, "finished": sorted(finished)}


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asked = json.loads(sys.argv[1])
    print(json.dumps(asyncio.run(tell(**asked))))
