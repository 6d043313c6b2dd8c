"""The link of a subscriber to JetStream: pulls, answers, reconnections.

In: an address of NATS. Out: messages. Subscribers of a channel share its consumer (`consumer`) and pull from it.
`finish` acknowledges, `requeue` acknowledges negatively with a delay, `touch` reports work in progress, and the RDY
count bounds what the link pulls.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from srtm.client.consumer import Consumer
from srtm.client.links import Hub, Link, Message
from srtm.client.nats import NatsConnection, Refused
from srtm.errors import ClientError, InputError
from srtm.protocol import client as say
from srtm.protocol import nats
from srtm.protocol.nats import Delivered, Msg
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from srtm.protocol.engine import EngineAddress

log = logging.getLogger(__name__)

_TIMEOUT_MS: Final = 60_000  # of a message, as nsqd has it
_EXPIRES_S, _HEARTBEAT_S, _LOST_S = 10, 2, 7  # of a pull; and how long a pull may stay silent
_PASSED, _IDLE = 408, 100  # statuses: a pull ended; a pull is alive
_PULLED, _PULLS = "pulled", 2  # subject and subscription of pulled messages
_ACK, _NAK, _WORKING = b"+ACK", b"-NAK", b"+WPI"


class StreamLink(Link):
    """The subscription at a stream of JetStream."""

    def __init__(self, hub: Hub, address: EngineAddress, timeout_ms: int | None) -> None:
        self._engine = address
        self._timeout_ms = timeout_ms or _TIMEOUT_MS
        self._connection: NatsConnection | None = None
        self._consumer: Consumer | None = None
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
        self._consumer = await Consumer.find(connection, self._engine, self._hub.topic, self._hub.channel)
        return True

    async def _subscribe(self) -> None:
        assert self._connection is not None
        assert self._consumer is not None
        try:
            if not await self._consumer.exists():
                await self._consumer.create(self._timeout_ms, self._resume_at())
        except Refused as problem:
            raise InputError(f"{self._engine} refuses channel {self._hub.channel!r}: {problem}") from None
        self._asked, self.ready = 0, 0
        # A subscription apart from answers: when a subscriber ends it, the server knows that its pulls are void.
        self._connection.say(nats.subscribe(f"{self._connection.inbox}.{_PULLED}.*".encode(), _PULLS))
        for data in self._unsaid:
            self._connection.say(data)
        self._unsaid.clear()
        self._watch(self._connection)

    def _resume_at(self) -> int:
        """Return the first message that this link still needs; 0 if it has had none yet."""
        return min((*(int(number) for number in self.held), *self._back), default=self._next) if self._next else 0

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
        assert self._consumer is not None
        self._requests += 1
        self._asked += room
        wanted = {"batch": room, "expires": _EXPIRES_S * NS_PER_S, "idle_heartbeat": _HEARTBEAT_S * NS_PER_S}
        reply = f"{self._connection.inbox}.{_PULLED}.{self._requests}"
        self._connection.say(nats.publish(self._consumer.pulls, reply.encode(), msgspec.json.encode(wanted)))
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
        log.info("%s/%s: reconnecting after %s", self._hub.topic, self._hub.channel, why)
        self._hang_up()
        self.ready = 0
        self._ended()

    def ended(self, problem: ClientError) -> None:
        """The connection ended; messages may still be answered over the next."""
        log.info("%s/%s: %s", self._hub.topic, self._hub.channel, problem)
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
        assert self._consumer is not None
        await self._connection.flush()
        if self._consumer.ephemeral:
            with suppress(Refused):
                await self._consumer.delete(pending=len(self._back))
