"""`/pub` and `/mpub`: publish over HTTP, through the topic's bucket, at the time of the request."""

from __future__ import annotations

import re
from operator import attrgetter
from typing import TYPE_CHECKING

from starlette.responses import PlainTextResponse

from srtm.broker.http.request import TRUTHS, Pages, Refused, check_length, query, read_body
from srtm.errors import ProtocolError, PublishRefused
from srtm.net.site import CERTIFIED
from srtm.protocol.mpub import MpubBody
from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from srtm.broker.receipts import Receipt
    from srtm.broker.topic import Topic
    from srtm.protocol.names import Settings

_DELAY = re.compile(r"\+?[0-9]{1,18}|-0+")  # what Go reads as a number of milliseconds that is not negative
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
        if not body:
            raise Refused(400, "MSG_EMPTY")
        topic = self.made_topic(request)
        await self._publish(topic, [body], self._delay_ns(request), request)
        return PlainTextResponse("OK")

    async def mpub(self, request: Request) -> Response:
        """Publish each line of the body, or, with ?binary=true, each of its length-prefixed messages."""
        settings = self.broker.options.settings
        check_length(request, settings.max_body_size, "BODY_TOO_BIG")
        topic = self.made_topic(request)
        kind = query(request).get("binary", "false")
        body = await read_body(request, settings.max_body_size, "BODY_TOO_BIG")
        # Anything that nsqd does not know as false is true: framed messages must not become one of garbage.
        bodies = _framed(body, settings) if TRUTHS.get(kind, True) else _lines(body, settings)
        if bodies:
            await self._publish(topic, bodies, 0, request)
        return PlainTextResponse("OK")

    async def _publish(self, topic: Topic, bodies: list[bytes], delay_ns: int, request: Request) -> None:
        """Give messages to the intake, and wait until they are safe."""
        broker = self.broker
        identities: frozenset[str] = request.scope.get(CERTIFIED, frozenset())
        if why := broker.topics.permissions.refusal("PUB", topic.name, identities):
            raise Refused(403, f"UNAUTHORIZED: {why}")
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
        text = query(request).get("defer", "0")
        if _DELAY.fullmatch(text) is None or int(text) > self.broker.options.settings.max_req_timeout_ms:
            raise Refused(400, "INVALID_DEFER")
        return int(text) * NS_PER_MS


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


def _lines(body: bytes, settings: Settings) -> list[bytes]:
    """The messages of a plain /mpub; empty lines are not messages."""
    lines = [line for line in body.split(b"\n") if line]
    if any(len(line) > settings.max_msg_size for line in lines):
        raise Refused(413, "MSG_TOO_BIG")
    return lines


def _framed(body: bytes, settings: Settings) -> list[bytes]:
    """The messages of a binary /mpub: an MPUB's body, but bytes after the last message are ignored, as in nsqd."""
    messages = MpubBody("", len(body), settings, exact=False)
    try:
        messages.read(body, 0)
    except ProtocolError as problem:
        raise Refused(413, problem.code.removeprefix("E_")) from None
    return messages.bodies
