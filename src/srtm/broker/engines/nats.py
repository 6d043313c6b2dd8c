"""The engine `nats`: messages to JetStream, each with its own id, acknowledged one by one.

A topic is the subject of the same name. If no stream has that subject, the broker creates one, named like the topic
with `=` for each dot, because names of streams have no dots. After a broken connection, and for a topic on disk after a
crash of the broker, unacknowledged messages are sent again with the same ids: JetStream stores each once, within
DUPLICATES_S.

A stream that has lost its leader answers "no responders", or nothing. Its lane is then shut, and its oldest message is
sent again, with back-off, until it is acknowledged. Other topics continue.
"""

from __future__ import annotations

import secrets
from ipaddress import ip_address
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec

import srtm
from srtm.broker.engines.engine import Engine
from srtm.broker.engines.lane import Lane
from srtm.broker.engines.probe import NatsProbe
from srtm.errors import InputError, ProtocolError
from srtm.protocol import greeting
from srtm.protocol import nats as say
from srtm.protocol.engine import server
from srtm.protocol.nats import NO_RESPONDERS, Err, Info, Msg, NatsProtocol, Ping, Pong
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from srtm.broker.message import Message
    from srtm.broker.options import BrokerOptions
    from srtm.broker.poller import Poller
    from srtm.broker.turn import Turn
    from srtm.protocol.engine import EngineAddress

DUPLICATES_S = 120  # how long a stream that we create remembers ids
_LATE_NS = 1 * NS_PER_S  # after which a missing acknowledgement counts as lost
_HEAD = 64  # bytes of a message beside its body and the lines of its origin
_IN_USE, _OVERLAP = 10058, 10065  # JetStream's codes: the stream exists already
_NEVER = frozenset({10054, 10097})  # message or header too large: a retry cannot succeed
_OF_A_SUBJECT = "Permissions Violation"  # after which a server does not close the connection


class _Refusal(NamedTuple):
    code: int  # JetStream's
    text: str
    passing: bool  # a retry may succeed


class Nats(Engine):
    """JetStream, on one server or a cluster."""

    kind: ClassVar[str] = "nats"

    def __init__(self, address: EngineAddress, options: BrokerOptions, turn: Turn, poller: Poller) -> None:
        super().__init__(address, options, turn, poller)
        self._protocol = NatsProtocol()
        self._max_payload = 0
        # Other brokers publish to the same stream, and their message ids may be the same as ours.
        self.prefix = secrets.token_hex(6).encode()
        self._inbox = b"_INBOX.%b." % self.prefix
        self._number = 0
        self._flights: dict[int, tuple[Lane, Message, int]] = {}  # with the time of sending, in that order
        self._made: set[Lane] = set()  # lanes whose stream exists
        self._asked: dict[int, Lane] = {}  # lanes that requested a stream
        self._probes: set[Lane] = set()  # shut lanes that test the engine with one message

    def new_probe(self, lane: Lane) -> NatsProbe:
        """Create a probe of a topic."""
        return NatsProbe(lane.topic.name, self.link, self._prefix(lane))

    def greet(self) -> None:
        """Begin a connection."""
        self._protocol = NatsProtocol()
        if self.address.handshake_first:
            self.link.secure()

    def take(self, data: bytes) -> None:
        """Handle bytes from the server."""
        now_ns = self._turn.now_ns()
        acknowledged: dict[Lane, list[Message]] = {}
        try:
            self._understand(data, acknowledged, now_ns)
        finally:
            for lane, messages in acknowledged.items():
                self._acknowledge(lane, messages, now_ns)
                self._go_on(lane, now_ns)

    def _understand(self, data: bytes, acknowledged: dict[Lane, list[Message]], now_ns: int) -> None:
        for event in self._protocol.feed(data):
            if isinstance(event, Msg):
                self._answered(event, acknowledged, now_ns)
            elif isinstance(event, Ping):
                self.link.out += say.PONG
            elif isinstance(event, Info):
                if self._told(event.fields):
                    break  # ignore what else came in the clear
            elif isinstance(event, Err) and event.text.startswith(_OF_A_SUBJECT):
                self.problem = event.text  # its topic gets no acknowledgements
            elif isinstance(event, Err):
                raise ProtocolError("E_INVALID", event.text)
            elif isinstance(event, Pong) and not self.connected:
                self._ready()

    def _told(self, fields: dict[str, Any]) -> bool:
        """Read INFO, and answer the first with CONNECT; return whether TLS begins now."""
        self._max_payload = int(fields.get("max_payload", 0))
        self._learn(fields.get("connect_urls") or ())
        if self.connected:
            return False
        begins = self.link.tls is None and greeting.nats_tls(self.address, fields)
        if begins:
            self._protocol = NatsProtocol()
            self.link.secure()
        self.link.out += say.connect(
            verbose=False,
            pedantic=False,
            tls_required=self.address.tls,
            name=f"srtm {self._options.name}",
            lang="python",
            version=srtm.__version__,
            protocol=1,
            headers=True,
            no_responders=True,
            **self.link.credentials.login(str(fields.get("nonce", ""))),
        )
        self.link.out += say.subscribe(self._inbox + b"*", 1) + say.PING
        return begins

    def _learn(self, places: Iterable[object]) -> None:
        """Add other servers of the cluster; one given by IP address must have the certificate of this server's name.

        Host names that came in the clear are ignored if TLS is required: anyone with a certificate could send them.
        """
        clear = self.address.tls and self.link.tls is None
        for place in places:
            try:
                found = server(str(place), self.kind)
            except InputError:
                continue
            number = _is_number(found[0])
            if found not in self.link.servers and (number or not clear):
                self.link.servers[found] = self.link.server_name if number else found[0]

    def hint(self) -> str:
        """Return that TLS may have to begin first, if the server has not said INFO."""
        return greeting.nats_silence(self.address) if self.link.tls is None else ""

    def _ask(self) -> None:
        self.link.out += say.PING

    def _enter(self, lane: Lane) -> None:
        if lane in self._made:
            lane.open(self._turn.now_ns())
        else:
            self._make(lane)

    def _make(self, lane: Lane) -> None:
        """Request the stream of a topic; the answer that it exists already counts as success."""
        if lane.overdue and lane in self._asked.values():
            lane.fail("no answer to the request for its stream: JetStream is off, or forbids $JS.API.STREAM.CREATE")
        self._number += 1
        self._asked = {number: each for number, each in self._asked.items() if each is not lane}
        self._asked[self._number] = lane
        name = lane.topic.name
        wanted = {
            "name": stream_of(name),
            "subjects": [name],
            "num_replicas": self.address.replicas,
            "retention": "limits",
            "storage": "file",
            "discard": "old",
            "duplicate_window": DUPLICATES_S * NS_PER_S,
        }
        subject = b"$JS.API.STREAM.CREATE.%b" % stream_of(name).encode()
        self.link.out += say.publish(subject, b"%b%d" % (self._inbox, self._number), msgspec.json.encode(wanted))
        lane.later(self._turn.now_ns())

    def _answered(self, answer: Msg, acknowledged: dict[Lane, list[Message]], now_ns: int) -> None:
        number = int(answer.subject[len(self._inbox) :])
        flight = self._flights.get(number)
        if flight is None:
            self._stream_made(number, answer, now_ns)
            return
        lane, message, _ = flight
        refusal = _refusal(answer)
        if refusal is not None and refusal.passing:
            if not refusal.code:
                self._made.discard(lane)  # the stream may have been deleted
            self._close(lane, refusal.text, now_ns)
            return
        del self._flights[number]
        if refusal is None:
            acknowledged.setdefault(lane, []).append(message)
        else:
            self._refuse(lane, [message], refusal.text)
            self._go_on(lane, now_ns)

    def _go_on(self, lane: Lane, now_ns: int) -> None:
        """A stream has answered: open its lane, if this was a test."""
        if lane in self._probes:
            self._probes.discard(lane)
            lane.open(now_ns)

    def _stream_made(self, number: int, answer: Msg, now_ns: int) -> None:
        lane = self._asked.pop(number, None)
        if lane is None:  # an answer to a message that was sent again meanwhile
            return
        refusal = _refusal(answer)
        if refusal is not None and refusal.code not in (_IN_USE, _OVERLAP):
            lane.fail(f"no stream for topic {lane.topic.name}: {refusal.text}")
            lane.later(now_ns)
            return
        self._made.add(lane)
        if lane.queue:
            lane.retry_ns = 0  # test it with a message next
        else:
            lane.open(now_ns)

    def _close(self, lane: Lane, problem: str, now_ns: int) -> None:
        """A stream accepts nothing for now: take back its unacknowledged messages."""
        self._probes.discard(lane)
        numbers = [number for number, (each, _, _) in self._flights.items() if each is lane]
        messages = [self._flights.pop(number)[1] for number in numbers]
        self.flying -= len(messages)
        self.flying_bytes -= sum(len(message.body) for message in messages)
        self.resent += len(messages)
        lane.back(messages)
        lane.fail(f"topic {lane.topic.name}: {problem}")
        lane.shut(now_ns)
        lane.later(now_ns)

    def _look(self, now_ns: int) -> None:
        late = takewhile(lambda flight: now_ns - flight[2] > _LATE_NS, self._flights.values())
        for lane in {lane for lane, _, _ in late}:
            self._close(lane, "no acknowledgement", now_ns)
        for lane in self.lanes.values():
            if lane.ready or now_ns < lane.retry_ns or lane in self._probes:
                continue
            if lane not in self._made:
                self._make(lane)
            elif lane.queue:
                self._probes.add(lane)
                lane.singly = 1
                self._send_slice(lane)
            else:
                lane.open(now_ns)

    def _send(self, lane: Lane, messages: list[Message]) -> None:
        now_ns, subject = self._turn.now_ns(), lane.topic.name.encode()
        inbox, number, flights = self._inbox, self._number, self._flights
        prefix, name = self._prefix(lane), self._options.name
        for message in messages:
            lines = say.origin(name, message.publisher, message.arrival_ns)
            if problem := self._excess(lines, message.body):  # the server would close the connection
                self._refuse(lane, [message], problem)
                self._go_on(lane, now_ns)
                continue
            number += 1
            flights[number] = lane, message, now_ns
            reply = b"%b%d" % (inbox, number)
            self.link.out += say.publish_once(subject, reply, b"%b-%b" % (prefix, message.id), message.body, lines)
        self._number = number

    def objection(self, publisher: str, body: bytes) -> str | None:
        """Return that a message is too large, once a server has stated its limit."""
        return self._excess(say.origin(self._options.name, publisher, self._turn.now_ns()), body)

    def _excess(self, lines: bytes, body: bytes) -> str | None:
        if not 0 < self._max_payload < len(body) + len(lines) + _HEAD:
            return None
        return f"a message may have at most {self._max_payload} bytes, header and body"

    def _prefix(self, lane: Lane) -> bytes:
        """Return the prefix of a topic's message ids; on disk, it survives restarts."""
        spool = lane.spool
        return self.prefix if spool is None else spool.prefix

    def _take_back(self) -> None:
        lost: dict[Lane, list[Message]] = {}
        for lane, message, _ in self._flights.values():
            lost.setdefault(lane, []).append(message)
        self._flights.clear()
        self._asked.clear()
        self._probes.clear()
        for lane, messages in lost.items():
            lane.back(messages)

    def forget(self, topic: Any) -> None:
        """Drop the lane of a deleted topic; its stream stays."""
        lane = self.lanes.get(topic.name)
        super().forget(topic)
        if lane is not None:
            self._made.discard(lane)
            self._probes.discard(lane)
            self._asked = {number: each for number, each in self._asked.items() if each is not lane}


def stream_of(topic: str) -> str:
    """Return the name of the stream that the broker creates for a topic."""
    return topic.replace(".", "=")


def _is_number(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _refusal(answer: Msg) -> _Refusal | None:
    """Return why JetStream refused a message or stream; None if it did not."""
    if answer.status == NO_RESPONDERS:
        return _Refusal(
            0, "no stream answers: it has no leader or other subjects, or JetStream is disabled", passing=True
        )
    if b'"error"' not in answer.body:
        return None
    error = say.fields(answer.body).get("error")
    if not isinstance(error, dict):
        return None
    code, text = error.get("err_code", 0), error.get("description", "unknown error")
    return _Refusal(code, f"{text} ({code})", passing=code not in _NEVER)
