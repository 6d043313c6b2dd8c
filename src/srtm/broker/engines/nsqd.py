"""The engine `nsqd`: MPUBs over one connection, as many as the window allows, answered in order.

NSQ does not recognise messages that are sent again, so it may have those in flight twice after a broken connection.
"""

from __future__ import annotations

from collections import deque
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar

import srtm
from srtm.broker.engines.engine import Engine
from srtm.broker.engines.lane import Lane
from srtm.broker.engines.probe import NsqdProbe
from srtm.errors import ProtocolError
from srtm.protocol import client as say
from srtm.protocol import greeting
from srtm.protocol.client import ClientProtocol, Error, Heartbeat, Response
from srtm.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Generator

    from srtm.broker.message import Message
    from srtm.broker.options import BrokerOptions
    from srtm.broker.poller import Poller
    from srtm.broker.turn import Turn
    from srtm.protocol.engine import EngineAddress

_NEVER = frozenset({"E_BAD_MESSAGE", "E_BAD_BODY", "E_BAD_TOPIC"})  # a retry cannot succeed
_FORBIDDEN = "E_UNAUTHORIZED"  # for one topic; the auth server may permit it later
_FORBIDDEN_NS = 5 * NS_PER_S  # before a retry: each costs the connection


class Nsqd(Engine):
    """One nsqd."""

    kind: ClassVar[str] = "nsqd"
    defers: ClassVar[bool] = True

    def __init__(self, address: EngineAddress, options: BrokerOptions, turn: Turn, poller: Poller) -> None:
        super().__init__(address, options, turn, poller)
        self._protocol = ClientProtocol()
        self._greeting: Generator[bytes, bytes, None] | None = None
        self._flights: deque[tuple[Lane, list[Message]]] = deque()  # one per command, in order of the answers

    def new_probe(self, lane: Lane) -> NsqdProbe:
        """Create a probe of a topic."""
        return NsqdProbe(lane.topic.name, self.link)

    def greet(self) -> None:
        """Begin a connection."""
        self._protocol = ClientProtocol()
        if self.address.tls:
            self._protocol.pause_after_response()  # ignore what else comes in the clear
        name = self._options.name
        fields = {
            "client_id": name,
            "hostname": name,
            "user_agent": f"srtm/{srtm.__version__}",
            "heartbeat_interval": 1_000,
        }
        self._greeting = greeting.nsqd(self.address, fields)
        self.link.out += next(self._greeting)

    def _agree(self, steps: Generator[bytes, bytes, None], answer: bytes) -> None:
        said = greeting.after(steps, answer)
        if said is None:
            self._greeting = None
            self._ready()
        elif said == greeting.BEGIN_TLS:
            self._protocol = ClientProtocol()
            self.link.secure()
        else:
            self.link.out += said

    def take(self, data: bytes) -> None:
        """Handle bytes from nsqd."""
        now_ns = self._turn.now_ns()
        for event in self._protocol.feed(data):
            if isinstance(event, Heartbeat):
                self.link.out += say.nop()
            elif isinstance(event, Error):
                self._refused(event.problem, now_ns)
            elif isinstance(event, ProtocolError):
                raise event
            elif self._greeting is not None and isinstance(event, Response):
                self._agree(self._greeting, event.data)
            else:
                self._acknowledge(*self._flights.popleft(), now_ns)

    def _enter(self, lane: Lane) -> None:
        if self._turn.now_ns() >= lane.retry_ns:
            super()._enter(lane)

    def _look(self, now_ns: int) -> None:
        for lane in self.lanes.values():
            if not lane.ready and now_ns >= lane.retry_ns:
                lane.open(now_ns)

    def _refused(self, problem: ProtocolError, now_ns: int) -> None:
        """A command failed, so nsqd closes the connection; refuse its message, or find out which by sending singly."""
        if self._greeting is not None:
            raise greeting.nsqd_refuses(problem)
        if not self._flights:
            raise problem
        lane, messages = self._flights[0]
        too_long = problem.code == "E_INVALID" and any(message.delay_ns for message in messages)
        if problem.code in _NEVER or too_long:
            if len(messages) == 1:
                self._flights.popleft()
                self._refuse(lane, messages, str(problem))
            else:
                lane.singly = len(messages)
        elif problem.code == _FORBIDDEN:
            lane.fail(f"topic {lane.topic.name}: {problem}")
            lane.retry_ns = now_ns + _FORBIDDEN_NS
        raise problem

    def _send(self, lane: Lane, messages: list[Message]) -> None:
        name = lane.topic.name
        for delay_ns, together in groupby(messages, lambda message: message.delay_ns):
            batch = list(together)
            if not delay_ns:
                self._flights.append((lane, batch))
                self.link.out += say.mpub(name, [message.body for message in batch])
                continue
            for message in batch:
                left_ns = max(0, message.arrival_ns + delay_ns - self._turn.now_ns())
                self._flights.append((lane, [message]))
                self.link.out += say.dpub(name, left_ns // NS_PER_MS, message.body)

    def _take_back(self) -> None:
        lost: dict[Lane, list[Message]] = {}
        for lane, messages in self._flights:
            lost.setdefault(lane, []).extend(messages)
        self._flights.clear()
        for lane, messages in lost.items():
            lane.back(messages)
