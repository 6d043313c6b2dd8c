"""`/topic/*` and `/channel/*`: create, delete, empty, pause and limit, as an operator asks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from srtm.broker.http.request import Pages, Refused, query, whole
from srtm.broker.options import retained_ns
from srtm.errors import BrokerError, InputError, LogError
from srtm.model.bucket import TokenBucket

if TYPE_CHECKING:
    from starlette.requests import Request

    from srtm.broker.topic import Topic

_DECIMAL = re.compile(r"[0-9]{1,30}(?:\.[0-9]{0,30})?(?:[eE][+-]?[0-9]{1,2})?")


class Administration(Pages):
    """Endpoints that change topics and channels."""

    async def topic_create(self, request: Request) -> Response:
        """Create a topic; ?durability=disk stores its messages before they are answered.

        A disk topic takes a retention, now or later: &retain_bytes=…&retain_age=…&retain_acknowledged=….
        """
        asked = query(request).get("durability")
        durability = asked or "memory"
        retention = _retention(query(request))
        if durability not in ("memory", "disk"):
            raise Refused(400, f"INVALID_DURABILITY: must be memory or disk, not {durability!r}")
        topic = self.made_topic(request)
        if durability == "disk" and topic.durable is None:
            if self.broker.durable is None:
                raise Refused(400, "INVALID_DURABILITY: this broker has no disk; start it with --data-path")
            if topic.messages or topic.ephemeral:
                raise Refused(400, "INVALID_DURABILITY: the topic is ephemeral, or has messages in memory")
            self.broker.durable.adopt(topic)
        if asked == "memory" and topic.durable is not None:
            raise Refused(400, "INVALID_DURABILITY: the topic is on disk; delete it before you create it in memory")
        if retention and topic.durable is None:
            raise Refused(400, "INVALID_RETENTION: only disk topics retain messages; add durability=disk")
        if topic.durable is not None and self.broker.durable is not None:
            try:
                await self.broker.durable.keep(topic, **retention)
            except LogError as problem:
                raise Refused(503, f"CREATE_FAILED: {problem}") from None
        return Response()

    async def topic_delete(self, request: Request) -> Response:
        """Delete a topic with its messages and channels; its consumers are disconnected."""
        topic = self.named_topic(request, None)
        self.broker.topics.delete(topic)
        return await self._noted(topic)

    async def topic_empty(self, request: Request) -> Response:
        """Delete the messages that no channel has yet."""
        topic = self.named_topic(request, "INVALID_TOPIC")
        if topic.durable is not None and self.broker.durable is not None:
            try:
                await self.broker.durable.empty(topic)
            except LogError as problem:
                raise Refused(503, f"EMPTY_FAILED: {problem}") from None
        topic.empty(self.broker.turn.now_ns())
        if self.broker.topics.alive(topic):
            self.broker.turn.touch(topic)  # publishers that leave no longer wait for these messages
        return Response()

    async def topic_pause(self, request: Request) -> Response:
        """Stop passing messages to channels."""
        topic = self.named_topic(request, None)
        topic.pause(self.broker.turn.now_ns(), on=True)
        return await self._noted(topic)

    async def topic_unpause(self, request: Request) -> Response:
        """Resume passing messages to channels."""
        topic = self.named_topic(request, None)
        topic.pause(self.broker.turn.now_ns(), on=False)
        self.broker.turn.touch(topic)
        return await self._noted(topic)

    async def topic_limit(self, request: Request) -> Response:
        """Set the topic's bucket: ?topic=…&r=…&b=…; without r and b, remove it."""
        r, b = (query(request).get(name) for name in "rb")
        try:
            bucket = TokenBucket.of(_decimal(r), _decimal(b)) if r is not None and b is not None else None
        except InputError as problem:
            raise Refused(400, f"INVALID_BUCKET: {problem}") from None
        if (r is None) != (b is None):
            raise Refused(400, "INVALID_BUCKET: give both r and b, or neither")
        topic = self.made_topic(request)
        if self.broker.control.holds(topic.name):
            raise Refused(409, "UNDER_CONTRACT: the controller sets (r, b) of this topic; change its contract there")
        topic.gate.by_hand = bucket
        topic.gate.limit(bucket, self.broker.turn.now_ns())
        self.broker.turn.touch(topic)
        return await self._noted(topic)

    async def channel_create(self, request: Request) -> Response:
        """Create a channel."""
        topic, name = self.topic_for_channel(request)
        try:
            self.broker.topics.channel(topic, name)
        except BrokerError as problem:
            raise Refused(409, f"NO_CHANNELS: {problem}") from None
        self.broker.turn.wake()
        return Response()

    async def channel_delete(self, request: Request) -> Response:
        """Delete a channel with its messages; its consumers are disconnected."""
        topic, channel = self.named_channel(request)
        self.broker.topics.delete_channel(topic, channel)
        return await self._noted(topic)

    async def channel_empty(self, request: Request) -> Response:
        """Delete a channel's messages."""
        self.named_channel(request)[1].empty()
        return Response()

    async def channel_pause(self, request: Request) -> Response:
        """Stop delivering to the channel's consumers."""
        topic, channel = self.named_channel(request)
        channel.paused = True
        return await self._noted(topic)

    async def channel_unpause(self, request: Request) -> Response:
        """Resume delivery to the channel's consumers."""
        topic, channel = self.named_channel(request)
        channel.paused = False
        self.broker.turn.pump(channel)
        return await self._noted(topic)

    async def _noted(self, topic: Topic) -> Response:
        """Answer once the change, which is in force already, also survives a restart."""
        if self.broker.durable is not None:
            try:
                await self.broker.durable.noted(topic)
            except LogError as problem:
                raise Refused(503, f"NOT_SAVED: the change is in force until the broker stops, but {problem}") from None
        return Response()


def _retention(asked: dict[str, str]) -> dict[str, Any]:
    """The fields of a `Retention` that a request names; `none` removes a limit."""
    fields: dict[str, Any] = {}
    size, age, finished = (asked.get(f"retain_{name}") for name in ("bytes", "age", "acknowledged"))
    if size is not None:
        fields["max_bytes"] = None if size == "none" else whole(size)
        if size != "none" and not fields["max_bytes"]:
            raise Refused(400, f"INVALID_RETAIN_BYTES: must be a whole number of at least 1, or none, not {size!r}")
    if age is not None:
        try:
            fields["max_age_ns"] = None if age == "none" else retained_ns(age)
        except InputError as problem:
            raise Refused(400, f"INVALID_RETAIN_AGE: {problem}") from None
    if finished is not None:
        if finished not in ("true", "false"):
            raise Refused(400, f"INVALID_RETAIN_ACKNOWLEDGED: must be true or false, not {finished!r}")
        fields["acknowledged"] = finished == "false"
    return fields


def _decimal(text: str) -> str:
    """The text, if it is a decimal number of tokens."""
    if _DECIMAL.fullmatch(text) is None:
        raise InputError(f"a number of tokens must look like 2.5 or 1e3, not {text!r}", value=text)
    return text
