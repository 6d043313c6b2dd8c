"""The verbs that a client says: one method a verb, named as on the wire, and one table that finds it.

In: commands of one read, in order, with its arrival time. Out: messages to the intake, changes of the client's
subscription, answers. Answers keep the order of commands: a command whose answer differs from OK waits until the
messages of those before it are safe.
"""

# ruff: noqa: N802 - methods are named as on the wire

from __future__ import annotations

from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from srtm.broker.backpressure import PARTING_S, resume, throttle
from srtm.broker.clients.buffered import subscription
from srtm.broker.clients.connection import Connection, Speaker
from srtm.broker.clients.reads import carry_out_evenly
from srtm.broker.receipts import Receipt
from srtm.broker.statistics import ClientStatistics
from srtm.errors import BrokerError, LogError, ProtocolError, PublishRefused
from srtm.protocol import frames
from srtm.protocol.commands import (
    NSQD_STATES,
    Auth,
    Cls,
    Dpub,
    Fin,
    Identify,
    Mpub,
    Nop,
    Pub,
    Rdy,
    Req,
    Sub,
    Touch,
)
from srtm.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from srtm.broker.clients.auth import Guard
    from srtm.broker.clients.subscription import Subscription
    from srtm.broker.intake import Intake
    from srtm.broker.topic import Topic
    from srtm.broker.topics import Topics
    from srtm.protocol.identify import Identity

REST_S: Final = 0.002  # how long a busy consumer may not be read
_REST_NS: Final = int(REST_S * NS_PER_S)
_OK: Final = frames.OK
_is_full: Final = attrgetter("full")


class Verbs(Speaker):
    """One client, as its commands make it: a publisher, a consumer, or both."""

    __slots__ = (
        "_intake",
        "_introduce",
        "_parting",
        "_pending",
        "_postponed",
        "_topics",
        "connected_ns",
        "connection",
        "guard",
        "published",
        "publisher",
        "subscription",
        "too_full",
    )

    def __init__(
        self,
        connection: Connection,
        intake: Intake,
        topics: Topics,
        introduce: Callable[[Verbs, Identity], bytes],
    ) -> None:
        """`introduce` makes an identity known and returns the answer to it."""
        self.connection, self.connected_ns = connection, connection.heard_ns
        self.guard: Guard | None = None
        self.publisher = connection.address
        self.published: dict[str, int] = {}  # messages by topic
        self.too_full: Callable[[Topic], bool] | None = None  # a consumer cannot wait: its FINs would, too
        self.subscription: Subscription | None = None
        self._intake, self._topics, self._introduce = intake, topics, introduce
        self._pending: deque[Receipt] = deque()  # commands whose messages are not safe yet, and those after them
        self._postponed: tuple[list[Any], int] | None = None  # commands that wait for the answers to these
        self._parting = False  # it is closed when these are answered

    def statistics(self) -> ClientStatistics:
        """A snapshot."""
        connection, subscription = self.connection, self.subscription
        identity, host = connection.protocol.identity, connection.address.rpartition(":")[0]
        tls = connection.transport.tls.ssl if connection.transport and connection.transport.tls else None
        permit = self.guard.permit if self.guard else None
        return ClientStatistics(
            identity.client_id or host,
            identity.hostname or host,
            connection.address,
            NSQD_STATES[connection.protocol.state],
            *(subscription.counts if subscription else (0,) * 5),
            tuple(self.published.items()),
            self.connected_ns,
            identity.msg_timeout_ms,
            identity.sample_rate,
            identity.deflate,
            identity.snappy,
            ((tls.cipher() or ("",))[0], tls.version() or "") if tls else None,
            identity.user_agent,
            (permit.identity, permit.identity_url) if permit else None,
        )

    def hear(self, events: list[Any], arrival_ns: int, gap_ns: int, late_since_ns: int = 0) -> None:
        """Carry out the commands of a read, as far as they may be."""
        if gap_ns < _REST_NS and self.subscription is not None:
            connection = self.connection
            if not connection.resting and self.subscription.may_rest(events):
                connection.keeper.rest(connection)
        if self.guard is not None:
            events = self.guard.admit(events, arrival_ns)
        if late_since_ns:
            carry_out_evenly(self, events, arrival_ns, late_since_ns)
        else:
            self.carry_out(events, arrival_ns)

    def carry_out(self, events: list[Any], arrival_ns: int) -> None:
        """Carry out commands, in order."""
        connection, pending, verbs = self.connection, self._pending, _VERBS
        if (permissions := self._topics.permissions).topics:
            events = permissions.allowed(events, self)
        for number, event in enumerate(events):
            kind = type(event)
            if kind is Pub:  # most of all: it spares itself the table
                self.PUB(event, arrival_ns)
            elif pending and kind in _ANSWERED_IN_TURN:
                self._postpone(events[number:], arrival_ns)
                break
            else:
                verbs[kind](self, event, arrival_ns)
            if connection.closing:
                break
        if (subscription := self.subscription) is not None and subscription.channel.queue:
            connection.keeper.turn.to_pump[subscription.channel] = None  # there may be room for more

    def _postpone(self, events: list[Any], arrival_ns: int) -> None:
        """Carry these out when everything before them is answered; until then, the client is not read."""
        self._postponed = events, arrival_ns
        self.connection.hold()

    # Publishing.

    def PUB(self, event: Pub, arrival_ns: int) -> None:
        """Publish one message."""
        name = event.topic
        try:
            receipt = self._intake.publish(self, name, [event.body], arrival_ns)
        except BrokerError as problem:
            self._refuse("PUB", problem, arrival_ns)
            return
        self.published[name] = self.published.get(name, 0) + 1
        if receipt is None and not self._pending:
            connection = self.connection
            if not connection.out:
                connection.keeper.turn.to_flush.append(connection)
            connection.out += _OK
        else:
            self._pending.append(receipt or Receipt(self, 0))

    def MPUB(self, event: Mpub, arrival_ns: int) -> None:
        """Publish several messages, all or none."""
        self._publish("MPUB", event.topic, event.bodies, arrival_ns, 0)

    def DPUB(self, event: Dpub, arrival_ns: int) -> None:
        """Publish one message, to be delivered after a while."""
        self._publish("DPUB", event.topic, [event.body], arrival_ns, event.delay_ms * NS_PER_MS)

    def _publish(self, verb: str, name: str, bodies: list[bytes], arrival_ns: int, delay_ns: int) -> None:
        """Publish; PUB, by which most messages come, spares itself these calls."""
        try:
            receipt = self._intake.publish(self, name, bodies, arrival_ns, delay_ns, verb)
        except BrokerError as problem:
            self._refuse(verb, problem, arrival_ns)
            return
        self.published[name] = self.published.get(name, 0) + len(bodies)
        if receipt is None and not self._pending:
            self.connection.send(_OK)
        else:
            self._pending.append(receipt or Receipt(self, 0))

    def _refuse(self, verb: str, problem: BrokerError, arrival_ns: int) -> None:
        error = ProtocolError("E_BAD_TOPIC", str(problem))
        if isinstance(problem, PublishRefused):
            hint = ": use PUB" if problem.facts["reason"] == "defer" else ""
            error = ProtocolError(f"E_{verb}_FAILED", f"{verb} failed {problem}{hint}")
        if self._pending:
            self._postpone([error], arrival_ns)
        else:
            self.connection.fail(error)

    def settle(self) -> None:
        """Answer commands whose messages are safe, as far as those before them are answered."""
        pending, answers, connection = self._pending, 0, self.connection
        while pending and not pending[0].left:
            pending.popleft()
            answers += 1
        if connection.closed:
            return
        if answers:
            connection.send(_OK * answers)
        if pending:
            return
        if self._postponed is not None:
            (events, arrival_ns), self._postponed = self._postponed, None
            self.carry_out(events, arrival_ns)
            connection.release()
        if self._parting and not pending:
            connection.end()

    def refused(self, receipt: Receipt, problem: str) -> None:
        """Close the connection with an error: there is no other answer to messages that are never accepted."""
        if not self.connection.closing and not self.connection.closed:
            self.connection.fail(ProtocolError(f"E_{receipt.verb}_FAILED", f"{receipt.verb} failed {problem}"))

    def hold(self) -> None:
        """Read no more until the disk has the messages of this read."""
        self.connection.hold()

    def release(self) -> None:
        """Read again."""
        self.connection.release()

    def slow(self) -> None:
        """Read little next time: the client's messages must wait for tokens anyway."""
        self.connection.read_into = self.connection.keeper.buffers.little

    def block(self, topic: Topic) -> bool:
        """Read no more until the topic has room; False for a consumer, which cannot wait."""
        # Messages to other topics would wait, too: a client of several is stopped by a full one only.
        if self.connection.closed or self.subscription is not None or (len(self.published) > 1 and not topic.full):
            return False
        if self.connection.protocol.identity.srtm is not None:
            self.connection.send(throttle(topic))
        self.connection.hold()
        return True

    def unblock(self, topic: Topic) -> None:
        """Read again."""
        if self.connection.protocol.identity.srtm is not None:
            self.connection.send(resume(topic))
        self.connection.release()

    # Subscribing.

    def SUB(self, event: Sub, _arrival_ns: int) -> None:
        """Take a place in a channel."""
        connection, topics, identity = self.connection, self._topics, self.connection.protocol.identity
        try:
            if identity.replay is None or topics.engine is not None:
                channel = topics.channel_for_consumer(event.topic, event.channel)
            else:
                channel = topics.replay(event.topic, event.channel, identity.replay, identity.replay_log)
        except (LogError, BrokerError) as problem:
            connection.fail(ProtocolError("E_SUB_FAILED", f"SUB failed {problem}"))
            return
        self.subscription = subscription(connection, topics.touch(event.topic), channel, connection.keeper.max_unsent)
        self.too_full = _is_full
        channel.consumers.append(self.subscription)
        connection.keeper.turn.to_pump[channel] = None
        connection.send(_OK)

    def RDY(self, event: Rdy, _arrival_ns: int) -> None:
        """Allow so many messages in flight."""
        subscription = self.subscription
        assert subscription is not None
        subscription.ready = event.ready
        self.connection.keeper.turn.to_pump[subscription.channel] = None

    def FIN(self, event: Fin, _arrival_ns: int) -> None:
        """Finish messages."""
        assert self.subscription is not None
        for problem in self.subscription.finish(event.ids):
            self.connection.send(frames.error(problem))

    def REQ(self, event: Req, _arrival_ns: int) -> None:
        """Give a message back, for later."""
        subscription, turn = self.subscription, self.connection.keeper.turn
        assert subscription is not None
        try:
            subscription.channel.requeue(subscription, event.id, event.delay_ms, turn.now_ns())
            subscription.requeued += 1
        except ProtocolError as problem:
            self.connection.send(frames.error(problem))
        turn.to_pump[subscription.channel] = None

    def TOUCH(self, event: Touch, _arrival_ns: int) -> None:
        """Allow a message more time."""
        subscription, turn = self.subscription, self.connection.keeper.turn
        assert subscription is not None
        longest_ns = self.connection.protocol.settings.max_msg_timeout_ms * NS_PER_MS
        try:
            subscription.channel.touch(subscription, event.id, turn.now_ns(), longest_ns)
        except ProtocolError as problem:
            self.connection.send(frames.error(problem))
        turn.to_pump[subscription.channel] = None

    def CLS(self, _event: Cls, _arrival_ns: int) -> None:
        """Send no more messages."""
        assert self.subscription is not None
        self.subscription.ready = 0
        self.connection.send(frames.CLOSE_WAIT)

    # The connection itself.

    def IDENTIFY(self, event: Identify, arrival_ns: int) -> None:
        """Learn who the client is, and begin the layers that it wants."""
        connection, identity = self.connection, event.identity
        if identity.srtm:
            self.publisher = identity.srtm.publisher
        connection.send(self._introduce(self, identity))
        if not identity.upgrades:
            return
        if connection.transport is None:
            connection.upgrade(identity, arrival_ns)
        else:
            connection.fail(ProtocolError("E_IDENTIFY_FAILED", "IDENTIFY failed a second upgrade"))

    def NOP(self, _event: Nop, _arrival_ns: int) -> None:
        """Do nothing: a sign of life."""

    def _error(self, problem: ProtocolError, _arrival_ns: int) -> None:
        self.connection.fail(problem)

    @property
    def identities(self) -> frozenset[str]:
        """The identities that an AUTH server and a certificate vouch for."""
        return self.connection.certified | (self.guard.identity if self.guard else frozenset())

    def hungry(self) -> bool:
        """Whether it must be read soon to be sent more messages."""
        return self.subscription is None or self.subscription.hungry

    def attentive(self) -> bool:
        """Whether more commands may follow: none before them waits for an answer or an authority."""
        return self._postponed is None and (self.guard is None or not self.guard.asking)

    def drained(self) -> None:
        """Everything is written: a consumer may be sent more."""
        if self.subscription is not None:
            self.connection.keeper.turn.pump(self.subscription.channel)

    def fell_silent(self, *, cut: bool) -> None:
        """Close the connection, of a declared publisher only after its messages have their tokens."""
        declared = self.connection.protocol.identity.srtm
        topic = self._topics.get(declared.topic) if declared and declared.topic else None
        if topic is not None and not cut:
            self.connection.keeper.turn.farewells.part(topic, self)
        else:
            self.end()

    def end(self) -> None:
        """Close the connection when all commands are answered, or after a while."""
        if self._pending:
            self._parting = True
            self.connection.keeper.turn.loop.call_later(PARTING_S, self.connection.close)
        else:
            self.connection.end()

    def leave(self) -> None:
        """Leave the channel; the client gets no more answers."""
        self._pending.clear()
        self._postponed = None
        if self.guard is not None:
            self.guard.close()
        left, self.subscription = self.subscription, None
        if left is not None:
            self._topics.leave(left.topic, left.channel, left)


# AUTH is not here: `auth.Guard` takes it before anything is carried out.
_VERBS: Final[dict[type, Callable[[Verbs, Any, int], None]]] = {
    Pub: Verbs.PUB,
    Mpub: Verbs.MPUB,
    Dpub: Verbs.DPUB,
    Sub: Verbs.SUB,
    Rdy: Verbs.RDY,
    Fin: Verbs.FIN,
    Req: Verbs.REQ,
    Touch: Verbs.TOUCH,
    Cls: Verbs.CLS,
    Nop: Verbs.NOP,
    Identify: Verbs.IDENTIFY,
    ProtocolError: Verbs._error,
}
# Commands whose answer is not OK, or that change what the client is: they wait for the answers before them.
_ANSWERED_IN_TURN: Final = frozenset({Identify, Auth, Sub, Cls, ProtocolError})
