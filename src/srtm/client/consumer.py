"""A channel of a topic at JetStream: a consumer that the channel's subscribers share.

The consumer of channel `c` of topic `t` is called `c@t`, with `=` for each dot, and belongs to the stream that has the
topic as a subject.

A new channel begins as in NSQ, whose topics keep what no channel has had: the first channel begins with those messages,
others with the next message. A consumer that nobody pulls from, `@t`, remembers what channels that are gone have
finished: the next first channel begins there. An ephemeral channel ends with its last subscriber, or half a minute
after that one was lost; the stream keeps what it did not finish for the next channel.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from srtm.client.nats import NatsConnection, Refused
from srtm.errors import ClientError, InputError
from srtm.protocol.names import ephemeral
from srtm.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from srtm.protocol.engine import EngineAddress

_IDLE_S: Final = 30  # after which JetStream deletes an ephemeral channel without subscribers
_NOT_FOUND: Final = 404
_SETTLE_S: Final = 1.0  # for JetStream to count acknowledgements


class Consumer:
    """One channel's consumer, reached over one connection."""

    def __init__(self, connection: NatsConnection, topic: str, channel: str, stream: str, *, keeps: bool) -> None:
        self.ephemeral = ephemeral(channel)
        self._connection = connection
        self._topic = topic
        self._channel = channel
        self._stream = stream
        self._keeps = keeps  # the stream keeps acknowledged messages
        self._mark = f"@{_dotless(topic)}"
        self._name = f"{_dotless(channel)}{self._mark}"

    @classmethod
    async def find(cls, connection: NatsConnection, engine: EngineAddress, topic: str, channel: str) -> Consumer:
        """Return the consumer at the topic's stream; ClientError if there is no stream, InputError if it refuses."""
        try:
            names = (await connection.ask("$JS.API.STREAM.NAMES", subject=topic)).get("streams")
            if not names:
                raise ClientError(f"{engine} has no stream for topic {topic!r} yet")
            stream = str(names[0])
            found = await connection.ask(f"$JS.API.STREAM.INFO.{stream}")
        except Refused as problem:
            if problem.code == _NOT_FOUND:  # it was listed a moment ago: the cluster is electing a leader
                raise ClientError(f"{engine} has lost the stream of topic {topic!r}, or moves it") from None
            raise InputError(f"{engine} refuses topic {topic!r}: {problem}") from None
        return cls(connection, topic, channel, stream, keeps=found["config"]["retention"] == "limits")

    @property
    def pulls(self) -> bytes:
        """The subject that takes requests for messages."""
        return f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._name}".encode()

    async def exists(self) -> bool:
        """Whether JetStream has the consumer."""
        return await self._info(self._name) is not None

    async def create(self, timeout_ms: int, resume_at: int) -> None:
        """Create the consumer, beginning at `resume_at` if that is not 0; subscribers may race to do so."""
        wanted: dict[str, Any] = {
            "durable_name": self._name,
            "description": f"channel {self._channel} of topic {self._topic}",
            "ack_policy": "explicit",
            "ack_wait": timeout_ms * NS_PER_MS,
            "max_deliver": -1,
            "max_ack_pending": -1,
            **await self._begin(resume_at),
        }
        if self.ephemeral:
            wanted["inactive_threshold"] = _IDLE_S * NS_PER_S
        try:
            await self._create(self._name, wanted)
        except Refused:
            if not await self.exists():
                raise

    async def delete(self, *, pending: int) -> None:
        """Delete the consumer if this subscriber is its last; `pending` counts messages that it did not finish."""
        info = await self._alone(pending)
        if info is None:
            return
        await self._connection.ask(f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._name}")
        if not self._keeps or await self._channels():
            return
        begin, before = int(info["ack_floor"]["stream_seq"]) + 1, await self._unheard_from()
        if begin > max(1, before):
            if before:
                await self._connection.ask(f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._mark}")
            about = f"where the next first channel of topic {self._topic} begins; nobody pulls from it"
            wanted = {"durable_name": self._mark, "description": about, "ack_policy": "none"}
            await self._create(self._mark, {**wanted, **_from(begin)})

    async def _begin(self, resume_at: int) -> dict[str, Any]:
        """Return where the channel begins, as fields of a consumer."""
        if not self._keeps:
            return {"deliver_policy": "all"}
        if resume_at:  # the channel was ours and is gone: only we know how far it was
            return _from(resume_at)
        if await self._channels():
            return {"deliver_policy": "new"}
        if begin := await self._unheard_from():
            return _from(begin)
        return {"deliver_policy": "all"}

    async def _create(self, name: str, wanted: dict[str, Any]) -> None:
        config = {"filter_subject": self._topic, "replay_policy": "instant", **wanted}
        await self._connection.ask(
            f"$JS.API.CONSUMER.DURABLE.CREATE.{self._stream}.{name}", stream_name=self._stream, config=config
        )

    async def _info(self, name: str) -> dict[str, Any] | None:
        try:
            return await self._connection.ask(f"$JS.API.CONSUMER.INFO.{self._stream}.{name}")
        except Refused as problem:
            if problem.code == _NOT_FOUND:
                return None
            raise

    async def _channels(self) -> list[str]:
        """Return the consumers that are channels of this topic."""
        found, offset = list[str](), 0
        while True:
            answer = await self._connection.ask(f"$JS.API.CONSUMER.NAMES.{self._stream}", offset=offset)
            names = answer.get("consumers") or []
            found += [name for name in names if name.endswith(self._mark) and name != self._mark]
            offset += len(names)
            if not names or offset >= answer["total"]:
                return found

    async def _unheard_from(self) -> int:
        """Return the first message that no channel is known to have finished; 0 if unknown."""
        info = await self._info(self._mark)
        return 0 if info is None else int(info["config"].get("opt_start_seq", 0))

    async def _alone(self, pending: int) -> dict[str, Any] | None:
        """Return the channel's state once our answers count; None if it has other subscribers."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _SETTLE_S
        while (info := await self._info(self._name)) is not None:
            if info.get("num_waiting"):
                return None
            if info["num_ack_pending"] <= pending:
                return info
            if loop.time() > until:
                return None
            await asyncio.sleep(0.02)
        return None


def _dotless(name: str) -> str:
    """Return a name as part of a consumer's name."""
    return name.replace(".", "=")


def _from(sequence: int) -> dict[str, Any]:
    """Return the fields of a consumer that begins with this message."""
    return {"deliver_policy": "by_start_sequence", "opt_start_seq": sequence}
