"""`/pub` and `/mpub`: publish over HTTP, through the topic's bucket, at the time of the request."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from starlette.responses import PlainTextResponse

from srtm.broker.engines.lane import Receipt, Tracked
from srtm.broker.http.request import Pages, Refused, read_body, whole
from srtm.broker.message import Message
from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    import asyncio

    from starlette.requests import Request
    from starlette.responses import Response

    from srtm.broker.topic import Topic
    from srtm.errors import LogError


class Publishing(Pages):
    """Endpoints that publish. The answer is OK when the message is as safe as its topic promises."""

    async def pub(self, request: Request) -> Response:
        """Publish the body as one message."""
        limit = self.broker.options.settings.max_msg_size
        body = await read_body(request, limit, "MSG_TOO_BIG")
        _check_size(len(body), limit, "MSG")
        topic = self.named_topic(request, make=True)
        await self._publish(topic, [body], self._delay_ns(request), request)
        return PlainTextResponse("OK")

    async def mpub(self, request: Request) -> Response:
        """Publish each line of the body, or, with ?binary=true, each of its length-prefixed messages."""
        settings = self.broker.options.settings
        body = await read_body(request, settings.max_body_size, "BODY_TOO_BIG")
        _check_size(len(body), settings.max_body_size, "BODY")
        topic = self.named_topic(request, make=True)
        if request.query_params.get("binary", "false").lower() in ("1", "true", ""):
            bodies = _prefixed(body)
        else:
            bodies = [line for line in body.split(b"\n") if line]
        for each in bodies:
            _check_size(len(each), settings.max_msg_size, "MSG")
        await self._publish(topic, bodies, 0, request)
        return PlainTextResponse("OK")

    async def _publish(self, topic: Topic, bodies: list[bytes], delay_ns: int, request: Request) -> None:
        if topic.crowded:
            raise Refused(503, "TOPIC_FULL")
        now_ns = time.time_ns()
        client = f"{request.client.host}:{request.client.port}" if request.client else "http"
        engine = topic.lane.engine if topic.lane is not None else None
        if engine is not None and delay_ns and not engine.defers:
            raise Refused(400, f"INVALID_DEFER: the engine {engine.kind} cannot defer messages")
        if engine is not None and topic.durable is None:
            answer = Answer(self.broker.loop.create_future())
            receipt, next_id = Receipt(answer, len(bodies)), self.broker.next_id
            topic.arrived += [Tracked(next_id(), now_ns, body, client, delay_ns, receipt) for body in bodies]
            topic.bytes += sum(map(len, bodies))
            self.broker.touch(topic.name)
            self.broker.wake()
            if problem := await answer.future:
                raise Refused(503, f"PUB_FAILED: {problem}")
            return
        messages = [Message(self.broker.next_id(), now_ns, body, client, delay_ns) for body in bodies]
        if topic.durable is not None:
            objections = (engine.objection(client, body) for body in bodies) if engine is not None else ()
            if objection := next(filter(None, objections), None):
                raise Refused(413, f"MSG_TOO_BIG: {objection}")
            stored: asyncio.Future[LogError | None] = self.broker.loop.create_future()
            topic.durable.publish(topic, messages, stored.set_result)
            if failure := await stored:
                raise Refused(503, f"PUB_FAILED: {failure}")
            return
        self.broker.touch(topic.name)
        topic.arrived += messages
        topic.bytes += sum(map(len, bodies))
        self.broker.wake()

    def _delay_ns(self, request: Request) -> int:
        delay_ms = whole(request.query_params.get("defer", "0"))
        if delay_ms is None or delay_ms > self.broker.options.settings.max_req_timeout_ms:
            raise Refused(400, "INVALID_DEFER")
        return delay_ms * NS_PER_MS


class Answer:
    """A request that waits until an engine has its messages; the future's result is None, or the refusal."""

    def __init__(self, future: asyncio.Future[str | None]) -> None:
        self.future = future

    def settle(self) -> None:
        """The engine has them."""
        if not self.future.done():
            self.future.set_result(None)

    def refused(self, problem: str) -> None:
        """The engine never will."""
        if not self.future.done():
            self.future.set_result(problem)


def _check_size(size: int, limit: int, part: str) -> None:
    if size > limit:
        raise Refused(413, f"{part}_TOO_BIG")
    if not size:
        raise Refused(400, f"{part}_EMPTY")


def _prefixed(body: bytes) -> list[bytes]:
    """The messages of a binary MPUB: [count 4]{[size 4][body]}…"""
    bodies, at = [], 4
    for _ in range(int.from_bytes(body[:4], "big")):
        size = int.from_bytes(body[at : at + 4], "big")
        if not 0 < size <= len(body) - at - 4:
            raise Refused(413, "BAD_MESSAGE")
        bodies.append(body[at + 4 : at + 4 + size])
        at += 4 + size
    if at != len(body) or not bodies:
        raise Refused(413, "BAD_BODY")
    return bodies
