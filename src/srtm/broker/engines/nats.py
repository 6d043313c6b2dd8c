"""The engine `nats`: messages to JetStream, each with an id of its own, acknowledged one by one.

A topic is the subject of the same name. Where no stream has that subject yet, one is made, of the topic's name with `=`
for each dot, because a stream's name has none. What was not acknowledged when a connection broke, or, of a topic on
disk, when the broker died, is sent again with the same id, and JetStream stores it once, within DUPLICATES_S.

A stream that has lost its leader answers "no responders", or not at all; its lane is shut then, and its oldest message
is sent again and again, with pauses, until it is acknowledged. Other topics go on.
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

DUPLICATES_S = 120  # how long a stream that we make remembers ids
_LATE_NS = 1 * NS_PER_S  # after that, an acknowledgement is not to be expected any more
_HEAD = 64  # bytes of a message that are neither its body nor say where it comes from
_IN_USE, _OVERLAP = 10058, 10065  # JetStream's codes: the stream is there, made by somebody else
_NEVER = frozenset({10054, 10097})  # message, or its headers, too large: it would say the same again
_OF_A_SUBJECT = "Permissions Violation"  # after which a server does not close the connection


class _Refusal(NamedTuple):
    code: int  # JetStream's
    text: str
    passing: bool  # it may be over soon


class Nats(Engine):
    """JetStream, on one server or a cluster."""

    kind: ClassVar[str] = "nats"

    def __init__(self, address: EngineAddress, options: BrokerOptions, turn: Turn, poller: Poller) -> None:
        super().__init__(address, options, turn, poller)
        self._protocol = NatsProtocol()
        self._max_payload = 0
        # Other brokers publish to the same stream, and count their messages from about the same number.
        self.prefix = secrets.token_hex(6).encode()
        self._inbox = b"_INBOX.%b." % self.prefix
        self._number = 0
        self._flights: dict[int, tuple[Lane, Message, int]] = {}  # with the time they were sent, in that order
        self._made: set[Lane] = set()  # whose stream is there
        self._asked: dict[int, Lane] = {}  # for a stream
        self._probes: set[Lane] = set()  # that have one message under way, to see whether more may follow

    def new_probe(self, lane: Lane) -> NatsProbe:
        """A probe of a topic."""
        return NatsProbe(lane.topic.name, self.link, self._prefix(lane))

    def greet(self) -> None:
        """Begin a connection."""
        self._protocol = NatsProtocol()

    def take(self, data: bytes) -> None:
        """Understand what the engine says."""
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
                    break  # what came with it in the clear is nobody's
            elif isinstance(event, Err) and event.text.startswith(_OF_A_SUBJECT):
                self.problem = event.text  # the topic's messages will not be acknowledged
            elif isinstance(event, Err):
                raise ProtocolError("E_INVALID", event.text)
            elif isinstance(event, Pong) and not self.connected:
                self._ready()

    def _told(self, fields: dict[str, Any]) -> bool:
        """What the server is; the first time, say who we are. Gives whether TLS begins with it."""
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
        """Other servers of the cluster. They name each other by number; then the name is that of who says so.

        Names that were not said through TLS, where that is asked for, may be anybody's who has a certificate.
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

    def _ask(self) -> None:
        self.link.out += say.PING

    def _enter(self, lane: Lane) -> None:
        if lane in self._made:
            lane.open(self._turn.now_ns())
        else:
            self._make(lane)

    def _make(self, lane: Lane) -> None:
        """Ask for the stream of a topic; that it is there already is an answer, too."""
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
                self._made.discard(lane)  # somebody may have deleted the stream
            self._close(lane, refusal.text, now_ns)
            return
        del self._flights[number]
        if refusal is None:
            acknowledged.setdefault(lane, []).append(message)
        else:
            self._refuse(lane, [message], refusal.text)
            self._go_on(lane, now_ns)

    def _go_on(self, lane: Lane, now_ns: int) -> None:
        """A stream has answered; if that was asked for, more may follow."""
        if lane in self._probes:
            self._probes.discard(lane)
            lane.open(now_ns)

    def _stream_made(self, number: int, answer: Msg, now_ns: int) -> None:
        lane = self._asked.pop(number, None)
        if lane is None:  # of a message that was sent again meanwhile
            return
        refusal = _refusal(answer)
        if refusal is not None and refusal.code not in (_IN_USE, _OVERLAP):
            lane.fail(f"no stream for topic {lane.topic.name}: {refusal.text}")
            lane.later(now_ns)
            return
        self._made.add(lane)
        if lane.queue:
            lane.retry_ns = 0  # is asked with a message next
        else:
            lane.open(now_ns)

    def _close(self, lane: Lane, problem: str, now_ns: int) -> None:
        """A stream takes nothing for now: take back what it has not acknowledged."""
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
        """That it is too large, once a server has said what is."""
        return self._excess(say.origin(self._options.name, publisher, self._turn.now_ns()), body)

    def _excess(self, lines: bytes, body: bytes) -> str | None:
        if not 0 < self._max_payload < len(body) + len(lines) + _HEAD:
            return None
        return f"a message may have at most {self._max_payload} bytes, header and body"

    def _prefix(self, lane: Lane) -> bytes:
        """How ids of a topic's messages begin; on disk, as they began before a restart."""
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
        """A topic is gone; its stream stays."""
        lane = self.lanes.get(topic.name)
        super().forget(topic)
        if lane is not None:
            self._made.discard(lane)
            self._probes.discard(lane)
            self._asked = {number: each for number, each in self._asked.items() if each is not lane}


def stream_of(topic: str) -> str:
    """The name of the stream that is made for a topic."""
    return topic.replace(".", "=")


def _is_number(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _refusal(answer: Msg) -> _Refusal | None:
    """What JetStream has against a message or a stream; None where it has nothing."""
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
