"""Reading a request: its query, its body, its numbers, and the topic and channel it names.

A request that cannot be carried out raises `Refused`, which becomes nsqd's error: `{"message": "INVALID_TOPIC"}`.
Errors have nsqd's names and come in nsqd's order.
"""

from __future__ import annotations

import hmac
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote_plus

from srtm.errors import BrokerError
from srtm.protocol.names import valid_name

if TYPE_CHECKING:
    from starlette.requests import Request

    from srtm.broker.broker import Broker
    from srtm.broker.channel import Channel
    from srtm.broker.topic import Topic

TRUTHS = {"true": True, "1": True, "false": False, "0": False}  # as nsqd reads a switch
_BROKEN = re.compile(r";|%(?![0-9a-fA-F]{2})")


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

    def made_topic(self, request: Request) -> Topic:
        """The topic a request names; a new one if the broker does not have it."""
        name = _named(request, "topic", "INVALID_TOPIC")
        try:
            return self.broker.topics.get(name) or self.broker.topics.touch(name)
        except BrokerError as problem:
            raise Refused(400, f"INVALID_TOPIC: {problem}") from None

    def named_topic(self, request: Request, invalid: str | None = "INVALID_ARG_TOPIC") -> Topic:
        """The topic a request names. An invalid name is refused as `invalid`; if that is None, as unknown."""
        return self._known(_named(request, "topic", invalid))

    def named_channel(self, request: Request) -> tuple[Topic, Channel]:
        """The channel a request names, and its topic."""
        topic, name = self.topic_for_channel(request)
        if name not in topic.channels:
            raise Refused(404, "CHANNEL_NOT_FOUND")
        return topic, topic.channels[name]

    def topic_for_channel(self, request: Request) -> tuple[Topic, str]:
        """The topic a request names, and the name of a channel that it may have."""
        topic = _named(request, "topic", "INVALID_ARG_TOPIC")
        channel = _named(request, "channel", "INVALID_ARG_CHANNEL")
        return self._known(topic), channel

    def _known(self, name: str) -> Topic:
        topic = self.broker.topics.get(name)
        if topic is None:
            raise Refused(404, "TOPIC_NOT_FOUND")
        return topic


def _named(request: Request, kind: str, invalid: str | None) -> str:
    name = query(request).get(kind)
    if name is None:
        raise Refused(400, f"MISSING_ARG_{kind.upper()}")
    if invalid is not None and not valid_name(name):
        raise Refused(400, invalid)
    return name


def query(request: Request) -> dict[str, str]:
    """The parameters of a request; the first of several with one name counts, as in nsqd."""
    raw: str = request.scope["query_string"].decode("latin-1")
    if _BROKEN.search(raw):
        raise Refused(400, "INVALID_REQUEST")
    found: dict[str, str] = {}
    for part in raw.split("&"):
        if part:
            name, _, value = part.partition("=")
            found.setdefault(_plain(name), _plain(value))
    return found


def _plain(text: str) -> str:
    return unquote_plus(text, errors="surrogateescape")


async def read_body(request: Request, limit: int, problem: str) -> bytes:
    """The body of a request. One larger than `limit` is refused at once; the rest of it is dropped."""
    check_length(request, limit, problem)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise Refused(413, problem)
    return bytes(body)


def check_length(request: Request, limit: int, problem: str) -> None:
    """Refuse a body that says itself that it is too large."""
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told) > limit:
        raise Refused(413, problem)


def number(request: Request, name: str, default: int | None = None) -> int:
    """A whole number of the query."""
    text = query(request).get(name, "" if default is None else str(default))
    found = whole(text)
    if found is None:
        raise Refused(400, f"INVALID_{name.upper()}: must be a whole number, not {text!r}")
    return found


def flag(request: Request, name: str, *, default: bool) -> bool:
    """A parameter of the query that is true or false."""
    text = query(request).get(name, "true" if default else "false")
    if text not in ("true", "false"):
        raise Refused(400, f"INVALID_{name.upper()}: must be true or false, not {text!r}")
    return text == "true"


def whole(text: str) -> int | None:
    """A whole number that fits 64 bits, or None. Signs, underscores and digits of other scripts are not accepted."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def bears(request: Request, token: str) -> bool:
    """Whether a request shows a token, as in `Authorization: Bearer …`."""
    shown = request.headers.get("authorization", "")
    return hmac.compare_digest(shown.encode(), f"Bearer {token}".encode())
