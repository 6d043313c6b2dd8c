"""`/pub` and `/mpub`: publish over HTTP, through the topic's bucket, at the time of the request."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from starlette.responses import PlainTextResponse

from srtm.broker.http.request import Pages, Refused, read_body, whole
from srtm.errors import PublishRefused
from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from srtm.broker.receipts import Receipt
    from srtm.broker.topic import Topic

_REFUSALS: dict[str, Callable[[PublishRefused], tuple[int, str]]] = {
    "full": lambda _: (503, "TOPIC_FULL"),
    "defer": lambda problem: (400, f"INVALID_DEFER: {problem}"),
    "size": lambda problem: (413, f"MSG_TOO_BIG: {problem}"),
}


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
        """Give messages to the intake, and wait until they are safe."""
        broker = self.broker
        publisher = f"{request.client.host}:{request.client.port}" if request.client else "http"
        sender = HttpSender(publisher, broker.turn.loop.create_future())
        try:
            receipt = broker.intake.publish(sender, topic.name, bodies, broker.turn.now_ns(), delay_ns)
        except PublishRefused as problem:
            raise Refused(*_REFUSALS[problem.facts["reason"]](problem)) from None
        broker.turn.wake()
        if receipt is not None and (failure := await sender.answer):
            raise Refused(503, f"PUB_FAILED: {failure}")

    def _delay_ns(self, request: Request) -> int:
        delay_ms = whole(request.query_params.get("defer", "0"))
        if delay_ms is None or delay_ms > self.broker.options.settings.max_req_timeout_ms:
            raise Refused(400, "INVALID_DEFER")
        return delay_ms * NS_PER_MS


class HttpSender:
    """A request that publishes. It cannot be made to wait: a crowded topic refuses it."""

    def __init__(self, publisher: str, answer: asyncio.Future[str | None]) -> None:
        """`answer` becomes None when the messages are safe, or the reason why they never will be."""
        self.publisher = publisher
        self.too_full: Callable[[Topic], bool] | None = attrgetter("crowded")
        self.answer = answer

    def settle(self) -> None:
        """The messages are safe."""
        if not self.answer.done():
            self.answer.set_result(None)

    def refused(self, _receipt: Receipt, problem: str) -> None:
        """They never will be."""
        if not self.answer.done():
            self.answer.set_result(problem)

    def block(self, _topic: Topic) -> bool:
        """Do not wait."""
        return False

    def unblock(self, topic: Topic) -> None:
        """Nothing was blocked."""

    def hold(self) -> None:
        """A request has said everything."""

    def release(self) -> None:
        """A request has said everything."""

    def slow(self) -> None:
        """A request has said everything."""


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
