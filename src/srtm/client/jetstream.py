"""A channel of a topic at JetStream: a consumer that the channel's subscribers share and pull from.

In: an address of NATS. Out: messages. The consumer of channel `c` of topic `t` is called `c@t`, with `=` for each dot,
and belongs to the stream that has the topic as a subject. `finish` acknowledges, `requeue` acknowledges negatively with
a delay, `touch` reports work in progress, and the RDY count bounds what the link pulls.

A new channel begins as in NSQ, whose topics keep what no channel has had: the first channel begins with those messages,
others with the next message. A consumer that nobody pulls from, `@t`, remembers what channels that are gone have
finished: the next first channel begins there. An ephemeral channel ends with its last subscriber, or half a minute
after that one was lost; the stream keeps what it did not finish for the next channel.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from srtm.client.links import Hub, Link, Message
from srtm.client.nats import NatsConnection, Refused
from srtm.errors import ClientError, InputError
from srtm.protocol import client as say
from srtm.protocol import nats
from srtm.protocol.names import ephemeral
from srtm.protocol.nats import Delivered, Msg
from srtm.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from srtm.protocol.engine import EngineAddress

log = logging.getLogger(__name__)

_TIMEOUT_MS: Final = 60_000  # of a message, as nsqd has it
_IDLE_S: Final = 30  # after which JetStream deletes an ephemeral channel without subscribers
_EXPIRES_S, _HEARTBEAT_S, _LOST_S = 10, 2, 7  # of a pull; and how long a pull may stay silent
_PASSED, _IDLE = 408, 100  # statuses: a pull ended; a pull is alive
_NOT_FOUND: Final = 404
_PULLED, _PULLS = "pulled", 2  # subject and subscription of pulled messages
_SETTLE_S: Final = 1.0  # for JetStream to count acknowledgements
_ACK, _NAK, _WORKING = b"+ACK", b"-NAK", b"+WPI"


class StreamLink(Link):
    """The subscription at a stream of JetStream."""

    def __init__(self, hub: Hub, address: EngineAddress, timeout_ms: int | None) -> None:
        self._engine = address
        self._timeout_ms = timeout_ms or _TIMEOUT_MS
        self._topic = hub.topic
        self._consumer = f"{_dotless(hub.channel)}@{_dotless(hub.topic)}"
        self._ephemeral = ephemeral(hub.channel)
        self._connection: NatsConnection | None = None
        self._stream = ""
        self._keeps = True  # the stream keeps acknowledged messages
        self._replies: dict[bytes, bytes] = {}  # reply subjects by message id
        self._back: set[int] = set()  # requeued, and not delivered again yet
        self._next = 0  # the sequence after the newest message
        self._asked = 0  # messages pulled, and not delivered yet
        self._requests = 0
        self._sign_s = 0.0  # when a pull last gave a sign of life
        self._unsaid: list[bytes] = []  # answers that wait for a connection
        self._closing = False
        super().__init__(hub, str(address))

    @property
    def subscribed(self) -> bool:
        """Whether messages may come."""
        return super().subscribed and self._connection is not None and not self._connection.closed

    async def _prepare(self) -> bool:
        self._connection = connection = await NatsConnection.open(self._engine, self)
        try:
            names = (await connection.ask("$JS.API.STREAM.NAMES", subject=self._topic)).get("streams")
            if not names:
                raise ClientError(f"{self._engine} has no stream for topic {self._topic!r} yet")
            self._stream = str(names[0])
            found = await connection.ask(f"$JS.API.STREAM.INFO.{self._stream}")
        except Refused as problem:
            if problem.code == _NOT_FOUND:  # it was listed a moment ago: the cluster is electing a leader
                raise ClientError(f"{self._engine} has lost the stream of topic {self._topic!r}, or moves it") from None
            raise InputError(f"{self._engine} refuses topic {self._topic!r}: {problem}") from None
        self._keeps = found["config"]["retention"] == "limits"
        return True

    async def _subscribe(self) -> None:
        try:
            if await self._consumer_info(self._consumer) is None:
                await self._make()
        except Refused as problem:
            raise InputError(f"{self._engine} refuses channel {self._hub.channel!r}: {problem}") from None
        self._asked, self.ready = 0, 0
        assert self._connection is not None
        # A subscription apart from answers: when a subscriber ends it, the server knows that its pulls are void.
        self._connection.say(nats.subscribe(f"{self._connection.inbox}.{_PULLED}.*".encode(), _PULLS))
        for data in self._unsaid:
            self._connection.say(data)
        self._unsaid.clear()
        self._watch(self._connection)

    async def _make(self) -> None:
        """Create the channel; another subscriber may do so at the same time."""
        wanted: dict[str, Any] = {
            "durable_name": self._consumer,
            "description": f"channel {self._hub.channel} of topic {self._topic}",
            "ack_policy": "explicit",
            "ack_wait": self._timeout_ms * NS_PER_MS,
            "max_deliver": -1,
            "max_ack_pending": -1,
            **await self._begin(),
        }
        if self._ephemeral:
            wanted["inactive_threshold"] = _IDLE_S * NS_PER_S
        try:
            await self._create(self._consumer, wanted)
        except Refused:
            if await self._consumer_info(self._consumer) is None:
                raise

    async def _begin(self) -> dict[str, Any]:
        """Return where the channel begins, as fields of a consumer."""
        if not self._keeps:
            return {"deliver_policy": "all"}
        if self._next:  # the channel was ours and is gone: only we know how far it was
            waiting = [*(int(number) for number in self.held), *self._back]
            return {"deliver_policy": "by_start_sequence", "opt_start_seq": min(waiting, default=self._next)}
        if await self._channels():
            return {"deliver_policy": "new"}
        if begin := await self._unheard_from():
            return {"deliver_policy": "by_start_sequence", "opt_start_seq": begin}
        return {"deliver_policy": "all"}

    async def _create(self, name: str, wanted: dict[str, Any]) -> None:
        assert self._connection is not None
        config = {"filter_subject": self._topic, "replay_policy": "instant", **wanted}
        await self._connection.ask(
            f"$JS.API.CONSUMER.DURABLE.CREATE.{self._stream}.{name}", stream_name=self._stream, config=config
        )

    async def _consumer_info(self, name: str) -> dict[str, Any] | None:
        assert self._connection is not None
        try:
            return await self._connection.ask(f"$JS.API.CONSUMER.INFO.{self._stream}.{name}")
        except Refused as problem:
            if problem.code == _NOT_FOUND:
                return None
            raise

    async def _channels(self) -> list[str]:
        """Return the consumers that are channels of this topic."""
        assert self._connection is not None
        end, found, offset = f"@{_dotless(self._topic)}", list[str](), 0
        while True:
            answer = await self._connection.ask(f"$JS.API.CONSUMER.NAMES.{self._stream}", offset=offset)
            names = answer.get("consumers") or []
            found += [name for name in names if name.endswith(end) and name != end]
            offset += len(names)
            if not names or offset >= answer["total"]:
                return found

    async def _unheard_from(self) -> int:
        """Return the first message that no channel is known to have finished; 0 if unknown."""
        info = await self._consumer_info(f"@{_dotless(self._topic)}")
        return 0 if info is None else int(info["config"].get("opt_start_seq", 0))

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()

    # Pulling.

    def set_ready(self, count: int) -> None:
        """Accept up to this many messages in flight."""
        if self.subscribed:
            self.ready = count
            self._pull()

    def _pull(self) -> None:
        """Pull more if there is room, but not for every single message."""
        room = self.ready - len(self.held) - self._asked
        if self._closing or not self.subscribed or room <= 0 or (self._asked and room <= self.ready // 2):
            return
        assert self._connection is not None
        self._requests += 1
        self._asked += room
        wanted = {"batch": room, "expires": _EXPIRES_S * NS_PER_S, "idle_heartbeat": _HEARTBEAT_S * NS_PER_S}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        reply = f"{self._connection.inbox}.{_PULLED}.{self._requests}"
        self._connection.say(nats.publish(subject.encode(), reply.encode(), msgspec.json.encode(wanted)))
        self._sign_s = asyncio.get_running_loop().time()

    def came(self, message: Msg) -> None:
        """A message arrived, or the status of a pull."""
        self._sign_s = asyncio.get_running_loop().time()
        if message.reply.startswith(nats.ACK_PREFIX):
            self._take(message)
        elif message.status == _PASSED:
            left = message.value(b"Nats-Pending-Messages")
            self._asked = max(0, self._asked - int(left)) if left.isdigit() else 0
            self._pull()
        elif message.status and message.status != _IDLE:  # the consumer or its leader is gone: reconnect
            self._again(f"status {message.status}")

    def _take(self, message: Msg) -> None:
        told = Delivered.by(message.reply)
        self._asked = max(0, self._asked - 1)
        self._next = max(self._next, told.sequence + 1)
        self._back.discard(told.sequence)
        said = message.value(nats.ARRIVAL)
        arrival_ns = int(said) if said.isdigit() else told.stored_ns
        identity = b"%d" % told.sequence
        self._replies[identity] = message.reply
        self._delivered(say.Message(arrival_ns, told.times, identity, message.body))
        self._pull()

    def _watch(self, connection: NatsConnection) -> None:
        """Reconnect if a pull stays silent."""
        if connection.closed:
            return
        loop = asyncio.get_running_loop()
        if self._asked and loop.time() - self._sign_s > _LOST_S:
            self._again("silence")
        else:
            loop.call_later(1.0, self._watch, connection)

    def _again(self, why: str) -> None:
        log.info("%s/%s: reconnecting after %s", self._topic, self._hub.channel, why)
        self._hang_up()
        self.ready = 0
        self._ended()

    def ended(self, problem: ClientError) -> None:
        """The connection ended; messages may still be answered over the next."""
        log.info("%s/%s: %s", self._topic, self._hub.channel, problem)
        self.ready = 0
        self._ended()

    # Answers.

    def finish(self, message: Message) -> None:
        """Acknowledge a message."""
        self._answer(message, _ACK)

    def requeue(self, message: Message, delay_s: float) -> None:
        """Have a message delivered again."""
        if self.held.get(message.id) is message:
            self._back.add(int(message.id))
        self._answer(message, b'%b {"delay": %d}' % (_NAK, round(delay_s * NS_PER_S)) if delay_s > 0 else _NAK)

    def touch(self, message: Message) -> None:
        """Restart a message's timeout."""
        if (reply := self._replies.get(message.id)) is not None:
            self._tell(nats.tell(reply, _WORKING))

    def _answer(self, message: Message, word: bytes) -> None:
        reply = self._replies.get(message.id)
        if self._release(message) and reply is not None:
            del self._replies[message.id]
            self._tell(nats.tell(reply, word))
        self._pull()

    def _tell(self, data: bytes) -> None:
        if self._connection is not None and not self._connection.closed:
            self._connection.say(data)
        else:
            self._unsaid.append(data)

    # The end.

    async def close(self) -> None:
        """Accept no more messages."""
        self._closing = True
        self.listed = False
        if self.subscribed:
            assert self._connection is not None
            self._connection.say(nats.unsubscribe(_PULLS))
            await self._connection.flush()

    async def leave(self) -> None:
        """Send all answers; the last subscriber deletes an ephemeral channel."""
        if not self.subscribed:
            return
        assert self._connection is not None
        await self._connection.flush()
        if self._ephemeral:
            with suppress(Refused):
                await self._end_channel()

    async def _end_channel(self) -> None:
        assert self._connection is not None
        info = await self._alone()
        if info is None:
            return
        await self._connection.ask(f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._consumer}")
        if not self._keeps or await self._channels():
            return
        begin, before = int(info["ack_floor"]["stream_seq"]) + 1, await self._unheard_from()
        if begin > max(1, before):
            mark = f"@{_dotless(self._topic)}"
            if before:
                await self._connection.ask(f"$JS.API.CONSUMER.DELETE.{self._stream}.{mark}")
            about = f"where the next first channel of topic {self._topic} begins; nobody pulls from it"
            wanted = {"durable_name": mark, "description": about, "ack_policy": "none"}
            await self._create(mark, {**wanted, "deliver_policy": "by_start_sequence", "opt_start_seq": begin})

    async def _alone(self) -> dict[str, Any] | None:
        """Return the channel's state once our answers count; None if it has other subscribers."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _SETTLE_S
        while (info := await self._consumer_info(self._consumer)) is not None:
            if info.get("num_waiting"):
                return None
            if info["num_ack_pending"] <= len(self._back):
                return info
            if loop.time() > until:
                return None
            await asyncio.sleep(0.02)
        return None


def _dotless(name: str) -> str:
    """Return a name as part of a consumer's name."""
    return name.replace(".", "=")
