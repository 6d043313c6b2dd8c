"""Subscriptions of one subscriber: a link for each place that delivers its topic, and the messages that come over it.

In: an address. Out: messages, told to the subscriber; what a place says against it. A link connects and settles what
can be settled without a trace at the server (`_prepare`), waits for its turn, and only then subscribes: an ephemeral
channel that is made and left at once takes the messages of its topic with it. It stays until it is no longer listed,
and begins anew when its connection is lost.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any, Literal, Protocol

from srtm.client.connection import Connection, ConnectionOptions
from srtm.errors import ClientError, InputError, ProtocolError, SRTMError
from srtm.net.backoff import Backoff
from srtm.protocol import client as say

if TYPE_CHECKING:
    from srtm.protocol.orders import Order

log = logging.getLogger(__name__)

_SIGNPOST_S = 15.0  # after which a broker that delivers elsewhere is asked again

# How a link stands to its place: it has not answered yet; it could be subscribed to; is being; is; does not answer;
# refuses; delivers at another place.
Standing = Literal["asking", "waiting", "subscribing", "subscribed", "away", "refused", "elsewhere"]


class Hub(Protocol):
    """The subscriber, as its links see it."""

    topic: str
    channel: str

    async def turn(self, link: Link) -> None:
        """Wait until the link may subscribe."""

    def agreed(self, link: Link) -> None:
        """The link is subscribed."""

    def problem(self, link: Link, problem: SRTMError) -> None:
        """A place cannot be reached, or refuses."""

    def elsewhere(self, link: Link, place: str) -> None:
        """A broker delivers through an engine."""

    def lost(self) -> None:
        """A connection ended."""

    def left(self, link: Link) -> None:
        """A link ended for good."""

    def deliver(self, message: Message) -> None:
        """A message came."""

    def settled(self) -> None:
        """A link has nothing in flight any more."""


class Message:
    """A message of a channel: `finish` it, or `requeue` it; `touch` it where that takes longer than its time-out."""

    __slots__ = ("_link", "attempts", "body", "id", "timestamp_ns")

    def __init__(self, message: say.Message, link: Link) -> None:
        self.timestamp_ns, self.attempts, self.id, self.body = message
        self._link: Link | None = link

    @property
    def broker(self) -> str | None:
        """The address of the broker that it came from, or of the engine; None once it was finished or requeued."""
        return self._link.address if self._link else None

    @property
    def held(self) -> bool:
        """Whether it is to be answered here, and its connection stands."""
        return self._link is not None and self._link.held.get(self.id) is self

    async def finish(self) -> None:
        """It is done. If its connection was lost meanwhile, it will be delivered again all the same."""
        self.finish_nowait()

    def finish_nowait(self) -> None:
        """The same, for code that does not wait."""
        self._answering().finish(self)

    async def requeue(self, delay_s: float = 0.0) -> None:
        """Deliver it again, to anybody, after a while."""
        self._answering().requeue(self, delay_s)

    async def touch(self) -> None:
        """It takes longer: begin its time-out anew."""
        if self._link is None:
            raise ClientError("the message was finished or requeued already")
        self._link.touch(self)

    @property
    def answered(self) -> bool:
        """Whether it was finished or requeued."""
        return self._link is None

    def _answering(self) -> Link:
        link, self._link = self._link, None
        if link is None:
            raise ClientError("the message was finished or requeued already")
        return link

    def __repr__(self) -> str:
        return f"Message({self.body[:32]!r}, attempts={self.attempts})"


class Link(ABC):
    """The subscription at one place: connected, or about to be."""

    def __init__(self, hub: Hub, address: str) -> None:
        self.address = address
        self.listed = True
        self.standing: Standing = "asking"
        self.ready = 0  # what it was told last
        self.lately = 0  # messages since the last look
        self.idle = 0  # looks without any
        self.held: dict[bytes, Message] = {}  # delivered, and not finished
        self._hub = hub
        self._over: asyncio.Future[None] | None = None
        self.task = asyncio.create_task(self._run())

    @property
    def subscribed(self) -> bool:
        """Whether messages may come."""
        return self.standing == "subscribed"

    @abstractmethod
    async def _prepare(self) -> bool:
        """Connect, and settle all that can be without subscribing; False where the place is only a signpost."""

    @abstractmethod
    async def _subscribe(self) -> None:
        """Subscribe, at a place that is prepared."""

    @abstractmethod
    def _hang_up(self) -> None:
        """Be gone from there."""

    @abstractmethod
    def set_ready(self, count: int) -> None:
        """Take so many messages in flight."""

    @abstractmethod
    def finish(self, message: Message) -> None:
        """A message is done."""

    @abstractmethod
    def requeue(self, message: Message, delay_s: float) -> None:
        """A message shall come again."""

    @abstractmethod
    def touch(self, message: Message) -> None:
        """A message takes longer."""

    @abstractmethod
    async def close(self) -> None:
        """Take no more messages."""

    async def leave(self) -> None:  # noqa: B027 - not every place needs it
        """All messages are answered: leave nothing behind that nobody needs."""

    async def _run(self) -> None:
        backoff = Backoff()
        try:
            while self.listed:
                self._over = asyncio.get_running_loop().create_future()
                try:
                    if not await self._prepare():
                        self._hang_up()
                        self.standing = "elsewhere"
                        self._hub.lost()
                        await asyncio.sleep(_SIGNPOST_S)
                        continue
                    self.standing = "waiting"
                    await self._hub.turn(self)
                    self.standing = "subscribing"
                    await self._subscribe()
                except (ClientError, ProtocolError, InputError) as problem:
                    self._hang_up()
                    self._hub.problem(self, problem)
                    await asyncio.sleep(backoff.next_s())
                    continue
                backoff = Backoff()
                self.standing = "subscribed"
                self._hub.agreed(self)
                await self._over
                self.standing = "away"
                self._hub.lost()
        finally:
            self.standing = "away"
            self._hang_up()
            self._hub.left(self)

    def _ended(self) -> None:
        """The connection is over."""
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    def _delivered(self, message: say.Message) -> None:
        self.lately += 1
        found = self.held[message.id] = Message(message, self)
        self._hub.deliver(found)

    def _release(self, message: Message) -> bool:
        """A message is answered; False if it came over a connection that is no more."""
        if self.held.get(message.id) is not message:
            return False
        del self.held[message.id]
        if not self.held:
            self._hub.settled()
        return True


class BrokerLink(Link):
    """The subscription at a broker, or at an nsqd."""

    def __init__(self, hub: Hub, address: str, options: ConnectionOptions, *, nsqd: bool = False) -> None:
        self.connection: Connection | None = None
        self.limit = 1  # of RDY, at this broker
        self._options = options
        self._nsqd = nsqd  # an engine, as far as is known
        self._answers: deque[asyncio.Future[bytes]] = deque()
        super().__init__(hub, address)

    @property
    def subscribed(self) -> bool:
        """Whether messages may come."""
        return super().subscribed and self.connection is not None and not self.connection.closed

    async def _prepare(self) -> bool:
        self.connection = connection = await Connection.open(self.address, self, self._options)
        self.ready = 0
        self.limit = connection.settled.get("max_rdy_count", 2500)
        if (engine := engine_at(connection)) is not None:
            self._hub.elsewhere(self, engine)
            return False
        check_login(connection, self._options, nsqd=self._nsqd)
        return True

    async def _subscribe(self) -> None:
        try:
            await self.ask(say.sub(self._hub.topic, self._hub.channel))
        except ProtocolError as problem:
            raise explained(problem, self.address) from None

    async def ask(self, data: bytes) -> bytes:
        """The answer to a command."""
        if self.connection is None or self.connection.closed:
            raise ClientError(f"{self.address} closed the connection")
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        self.connection.say(data)
        return await answer

    def _tell(self, data: bytes) -> None:
        """Say something, if there is anybody who hears it."""
        if self.subscribed:
            self.connection.say(data)  # type: ignore[union-attr]

    def _hang_up(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self._answers.clear()

    def set_ready(self, count: int) -> None:
        """Take so many messages in flight."""
        count = min(count, self.limit)
        if count != self.ready and self.subscribed:
            self.ready = count
            self._tell(say.rdy(count))

    def finish(self, message: Message) -> None:
        """A message is done; nobody is told if it came over a connection that is no more."""
        if self._release(message):
            self._tell(say.fin(message.id))

    def requeue(self, message: Message, delay_s: float) -> None:
        """A message shall come again."""
        if self._release(message):
            self._tell(say.req(message.id, round(delay_s * 1000)))

    def touch(self, message: Message) -> None:
        """A message takes longer."""
        self._tell(say.touch(message.id))

    async def close(self) -> None:
        """Take no more messages."""
        self.listed = False
        if self.subscribed:
            await self.ask(say.cls())

    def answered(self, data: bytes) -> None:
        """To the oldest question."""
        if self._answers:
            self._answers.popleft().set_result(data)

    def refused(self, problem: ProtocolError) -> None:
        """A command was."""
        if problem.fatal and self._answers:
            self._answers.popleft().set_exception(problem)
        elif not problem.fatal:
            log.warning("%s: %s", self.address, problem)

    def delivered(self, message: say.Message) -> None:
        """A message of the channel."""
        self._delivered(message)

    def ordered(self, connection: Connection, order: Order) -> None:
        """Orders are for publishers."""

    def writable(self) -> None:
        """What a subscriber says is bounded by what it has in flight."""

    def ended(self, connection: Connection, problem: Exception | None) -> None:
        """The server closed the connection, or it broke."""
        del connection
        self.held.clear()  # the broker gives them to others
        self.ready = 0
        lost = ClientError(f"{self.address} closed the connection{f': {problem}' if problem else ''}")
        while self._answers:
            self._answers.popleft().set_exception(lost)
        self._ended()
        self._hub.settled()


def engine_at(connection: Connection) -> str | None:
    """The engine that delivers a broker's messages; None where it does so itself, or is an nsqd."""
    ours: Any = connection.settled.get("srtm")
    engine = ours.get("engine") if isinstance(ours, dict) else None
    return engine if isinstance(engine, str) else None


def check_login(connection: Connection, options: ConnectionOptions, *, nsqd: bool) -> None:
    """ProtocolError, in the words of SUB's, where AUTH is missing."""
    if connection.settled.get("auth_required") and options.auth_secret is None:
        remedy = "give its secret by SRTM_ENGINE, as in nsqd://secret@host" if nsqd else "give auth_secret"
        raise ProtocolError("E_AUTH_FIRST", f"{connection.address} wants AUTH: {remedy}")


def explained(problem: ProtocolError, address: str) -> ProtocolError:
    """What a refused SUB means, and what to do."""
    if "TLS required" in problem.text:
        return ProtocolError(problem.code, f"{address} wants TLS: give tls, or SRTM_ENGINE, as in nsqd+tls://host")
    return problem
