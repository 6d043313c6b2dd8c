"""Subscriptions of one subscriber: a link for each place that delivers its topic, and the messages that it brings.

In: an address. Out: messages and problems, told to the subscriber. A link connects and checks whatever leaves no trace
at the server (`_prepare`), waits for its turn, and only then subscribes: an ephemeral channel that is created and left
at once would take the messages of its topic with it. A link reconnects when it loses its connection, and ends when its
place is no longer listed.
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

_SIGNPOST_S = 15.0  # before a broker that delivers elsewhere is asked again

# The state of a link: the place has not answered yet; it is ready; SUB is under way; subscribed; the place does not
# answer; it refuses; it delivers at another place.
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
        """A broker delivers through an engine at another place."""

    def lost(self) -> None:
        """A connection ended."""

    def left(self, link: Link) -> None:
        """A link ended for good."""

    def deliver(self, message: Message) -> None:
        """A message came."""

    def settled(self) -> None:
        """A link has nothing in flight."""


class Message:
    """A message of a channel: `finish` or `requeue` it; `touch` it if that takes longer than its timeout."""

    __slots__ = ("_link", "attempts", "body", "id", "timestamp_ns")

    def __init__(self, message: say.Message, link: Link) -> None:
        self.timestamp_ns, self.attempts, self.id, self.body = message
        self._link: Link | None = link

    @property
    def broker(self) -> str | None:
        """The address of the broker or engine that delivered it; None once it is finished or requeued."""
        return self._link.address if self._link else None

    @property
    def held(self) -> bool:
        """Whether it still awaits an answer over a live connection."""
        return self._link is not None and self._link.held.get(self.id) is self

    async def finish(self) -> None:
        """Acknowledge the message; if its connection was lost meanwhile, it is delivered again all the same."""
        self.finish_nowait()

    def finish_nowait(self) -> None:
        """Acknowledge the message, from code that cannot await."""
        self._answering().finish(self)

    async def requeue(self, delay_s: float = 0.0) -> None:
        """Have the message delivered again, to any subscriber, after a delay."""
        self._answering().requeue(self, delay_s)

    async def touch(self) -> None:
        """Restart the message's timeout."""
        if self._link is None:
            raise ClientError("the message is already finished or requeued")
        self._link.touch(self)

    @property
    def answered(self) -> bool:
        """Whether it is finished or requeued."""
        return self._link is None

    def _answering(self) -> Link:
        link, self._link = self._link, None
        if link is None:
            raise ClientError("the message is already finished or requeued")
        return link

    def __repr__(self) -> str:
        return f"Message({self.body[:32]!r}, attempts={self.attempts})"


class Link(ABC):
    """The subscription at one place, connected or connecting."""

    def __init__(self, hub: Hub, address: str) -> None:
        self.address = address
        self.listed = True
        self.standing: Standing = "asking"
        self.ready = 0  # the RDY count sent last
        self.lately = 0  # messages since the last look
        self.idle = 0  # looks in a row without any
        self.held: dict[bytes, Message] = {}  # delivered, and not answered
        self._hub = hub
        self._over: asyncio.Future[None] | None = None
        self.task = asyncio.create_task(self._run())

    @property
    def subscribed(self) -> bool:
        """Whether messages may come."""
        return self.standing == "subscribed"

    @abstractmethod
    async def _prepare(self) -> bool:
        """Connect and check what needs no subscription; return False if the place delivers elsewhere."""

    @abstractmethod
    async def _subscribe(self) -> None:
        """Subscribe at a prepared place."""

    @abstractmethod
    def _hang_up(self) -> None:
        """Close the connection."""

    @abstractmethod
    def set_ready(self, count: int) -> None:
        """Accept up to this many messages in flight."""

    @abstractmethod
    def finish(self, message: Message) -> None:
        """Acknowledge a message."""

    @abstractmethod
    def requeue(self, message: Message, delay_s: float) -> None:
        """Have a message delivered again."""

    @abstractmethod
    def touch(self, message: Message) -> None:
        """Restart a message's timeout."""

    @abstractmethod
    async def close(self) -> None:
        """Accept no more messages."""

    async def leave(self) -> None:  # noqa: B027 - not every place needs it
        """Clean up at the server once all messages are answered."""

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
        """The connection ended."""
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    def _delivered(self, message: say.Message) -> None:
        self.lately += 1
        found = self.held[message.id] = Message(message, self)
        self._hub.deliver(found)

    def _release(self, message: Message) -> bool:
        """Stop holding a message that is answered; return False if its connection is gone."""
        if self.held.get(message.id) is not message:
            return False
        del self.held[message.id]
        if not self.held:
            self._hub.settled()
        return True


class BrokerLink(Link):
    """The subscription at a broker or an nsqd."""

    def __init__(self, hub: Hub, address: str, options: ConnectionOptions, *, nsqd: bool = False) -> None:
        self.connection: Connection | None = None
        self.limit = 1  # the largest RDY that this broker accepts
        self._options = options
        self._nsqd = nsqd  # known to be an engine
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
            raise _explained(problem, self.address) from None

    async def ask(self, data: bytes) -> bytes:
        """Send a command, and return its answer."""
        if self.connection is None or self.connection.closed:
            raise ClientError(f"{self.address} closed the connection")
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        self.connection.say(data)
        return await answer

    def _tell(self, data: bytes) -> None:
        """Send something, if subscribed."""
        if self.subscribed:
            self.connection.say(data)  # type: ignore[union-attr]

    def _hang_up(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self._answers.clear()

    def set_ready(self, count: int) -> None:
        """Accept up to this many messages in flight."""
        count = min(count, self.limit)
        if count != self.ready and self.subscribed:
            self.ready = count
            self._tell(say.rdy(count))

    def finish(self, message: Message) -> None:
        """Acknowledge a message, unless its connection is gone."""
        if self._release(message):
            self._tell(say.fin(message.id))

    def requeue(self, message: Message, delay_s: float) -> None:
        """Have a message delivered again."""
        if self._release(message):
            self._tell(say.req(message.id, round(delay_s * 1000)))

    def touch(self, message: Message) -> None:
        """Restart a message's timeout."""
        self._tell(say.touch(message.id))

    async def close(self) -> None:
        """Accept no more messages."""
        self.listed = False
        if self.subscribed:
            await self.ask(say.cls())

    def answered(self, data: bytes) -> None:
        """The oldest command was answered."""
        if self._answers:
            self._answers.popleft().set_result(data)

    def refused(self, problem: ProtocolError) -> None:
        """A command was refused."""
        if problem.fatal and self._answers:
            self._answers.popleft().set_exception(problem)
        elif not problem.fatal:
            log.warning("%s: %s", self.address, problem)

    def delivered(self, message: say.Message) -> None:
        """A message of the channel arrived."""
        self._delivered(message)

    def ordered(self, connection: Connection, order: Order) -> None:
        """Ignore an order: those are for publishers."""

    def writable(self) -> None:
        """Do nothing: messages in flight bound what a subscriber sends."""

    def ended(self, connection: Connection, problem: Exception | None) -> None:
        """The server closed the connection, or it broke."""
        del connection
        self.held.clear()  # the broker delivers them elsewhere
        self.ready = 0
        lost = ClientError(f"{self.address} closed the connection{f': {problem}' if problem else ''}")
        while self._answers:
            self._answers.popleft().set_exception(lost)
        self._ended()
        self._hub.settled()


def engine_at(connection: Connection) -> str | None:
    """Return the engine that delivers a broker's messages; None for a broker that delivers itself, or an nsqd."""
    ours: Any = connection.settled.get("srtm")
    engine = ours.get("engine") if isinstance(ours, dict) else None
    return engine if isinstance(engine, str) else None


def check_login(connection: Connection, options: ConnectionOptions, *, nsqd: bool) -> None:
    """Raise the ProtocolError that SUB would cause if the server requires AUTH and there is no secret."""
    if connection.settled.get("auth_required") and options.auth_secret is None:
        remedy = "put its secret into SRTM_ENGINE, as in nsqd://secret@host" if nsqd else "pass auth_secret"
        raise ProtocolError("E_AUTH_FIRST", f"{connection.address} requires AUTH: {remedy}")


def _explained(problem: ProtocolError, address: str) -> ProtocolError:
    """Say what a refused SUB means, and the remedy."""
    if "TLS required" in problem.text:
        return ProtocolError(
            problem.code, f"{address} requires TLS: pass tls, or set SRTM_ENGINE, as in nsqd+tls://host"
        )
    return problem
