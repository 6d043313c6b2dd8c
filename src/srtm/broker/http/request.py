"""Reading a request: its body, its numbers, and the topic and channel it names.

A request that cannot be carried out raises `Refused`, which becomes nsqd's error: `{"message": "INVALID_TOPIC"}`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.errors import BrokerError
from srtm.protocol.names import valid_name

if TYPE_CHECKING:
    from starlette.requests import Request

    from srtm.broker.broker import Broker
    from srtm.broker.channel import Channel
    from srtm.broker.topic import Topic


class Refused(Exception):
    """A request that is answered with nsqd's error, and a code beside it for programs that tell refusals apart."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Pages:
    """Endpoints of one kind, one method each."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    def named_topic(self, request: Request, *, make: bool = False) -> Topic:
        """The topic a request names; with `make`, a new one if the broker does not have it."""
        name = request.query_params.get("topic")
        if not name:
            raise Refused(400, "MISSING_ARG_TOPIC")
        if not valid_name(name):
            raise Refused(400, "INVALID_TOPIC" if make else "INVALID_ARG_TOPIC")
        topic = self.broker.topics.get(name)
        if topic is None and not make:
            raise Refused(404, "TOPIC_NOT_FOUND")
        try:
            return topic or self.broker.topics.touch(name)
        except BrokerError as problem:
            raise Refused(400, f"INVALID_TOPIC: {problem}") from None

    def named_channel(self, request: Request) -> tuple[Topic, Channel]:
        """The channel a request names, and its topic."""
        name, topic = channel_name(request), self.named_topic(request)
        if name not in topic.channels:
            raise Refused(404, "CHANNEL_NOT_FOUND")
        return topic, topic.channels[name]


def channel_name(request: Request) -> str:
    """The channel's name in a request."""
    name = request.query_params.get("channel")
    if not name:
        raise Refused(400, "MISSING_ARG_CHANNEL")
    if not valid_name(name):
        raise Refused(400, "INVALID_ARG_CHANNEL")
    return name


async def read_body(request: Request, limit: int, problem: str) -> bytes:
    """The body of a request. One larger than `limit` is refused at once; the rest of it is dropped."""
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told) > limit:
        raise Refused(413, problem)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise Refused(413, problem)
    return bytes(body)


def number(request: Request, name: str, default: int | None = None) -> int:
    """A whole number of the query."""
    text = request.query_params.get(name, "" if default is None else str(default))
    found = whole(text)
    if found is None:
        raise Refused(400, f"INVALID_{name.upper()}: must be a whole number, not {text!r}")
    return found


def flag(request: Request, name: str, *, default: bool) -> bool:
    """A parameter of the query that is true or false."""
    text = request.query_params.get(name, "true" if default else "false")
    if text not in ("true", "false"):
        raise Refused(400, f"INVALID_{name.upper()}: must be true or false, not {text!r}")
    return text == "true"


def whole(text: str) -> int | None:
    """A whole number that fits 64 bits, or None. Signs, underscores and digits of other scripts are not accepted."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None
