"""The engine `nsqd`: MPUB after MPUB over one connection, as many as the window allows, answered in order.

NSQ knows no ids of publishers, so what was on its way when a connection broke may be there twice.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar

import srtm
from srtm.broker.engine import Engine, Lane
from srtm.broker.probe import NsqdProbe
from srtm.errors import ProtocolError
from srtm.protocol import client as say
from srtm.protocol.client import ClientProtocol, Error, Heartbeat
from srtm.protocol.names import MAGIC_V2
from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    from srtm.broker.ioloop import Broker
    from srtm.broker.message import Message
    from srtm.protocol.engine import EngineAddress

_NEVER = frozenset({"E_BAD_MESSAGE", "E_BAD_BODY", "E_BAD_TOPIC"})  # it would say the same again


class Nsqd(Engine):
    """One nsqd."""

    kind: ClassVar[str] = "nsqd"
    defers: ClassVar[bool] = True

    def __init__(self, broker: Broker, address: EngineAddress) -> None:
        super().__init__(broker, address)
        self._protocol = ClientProtocol()
        self._flights: deque[tuple[Lane, list[Message]]] = deque()  # a command each, in the order of their answers

    def new_probe(self, lane: Lane) -> NsqdProbe:
        """A probe of a topic."""
        return NsqdProbe(lane)

    def _greet(self) -> None:
        self._protocol = ClientProtocol()
        name = self._broker.options.name
        fields = {
            "client_id": name,
            "hostname": name,
            "user_agent": f"srtm/{srtm.__version__}",
            "heartbeat_interval": 1_000,
        }
        self._out += MAGIC_V2 + say.identify(fields)

    def _take(self, data: bytes) -> None:
        now_ns = time.time_ns()
        for event in self._protocol.feed(data):
            if isinstance(event, Heartbeat):
                self._out += say.nop()
            elif isinstance(event, Error):
                self._refused(event.problem)
            elif isinstance(event, ProtocolError):
                raise event
            elif not self.connected:  # the answer to IDENTIFY
                self._ready()
            else:
                self._acknowledge(*self._flights.popleft(), now_ns)

    def _refused(self, problem: ProtocolError) -> None:
        """A command failed, and the connection ends: nsqd closes it. One message that it never takes goes alone."""
        lane, messages = self._flights[0] if self._flights else (None, [])
        deferred = problem.code == "E_INVALID" and any(message.delay_ns for message in messages)  # for too long
        if lane is not None and (problem.code in _NEVER or deferred):
            if len(messages) == 1:
                self._flights.popleft()
                self._refuse(lane, messages, str(problem))
            else:
                lane.singly = len(messages)
        raise problem

    def _send(self, lane: Lane, messages: list[Message]) -> None:
        name = lane.topic.name
        for delay_ns, together in groupby(messages, lambda message: message.delay_ns):
            batch = list(together)
            if not delay_ns:
                self._flights.append((lane, batch))
                self._out += say.mpub(name, [message.body for message in batch])
                continue
            for message in batch:
                left_ns = max(0, message.arrival_ns + delay_ns - time.time_ns())
                self._flights.append((lane, [message]))
                self._out += say.dpub(name, left_ns // NS_PER_MS, message.body)

    def _take_back(self) -> None:
        lost: dict[Lane, list[Message]] = {}
        for lane, messages in self._flights:
            lost.setdefault(lane, []).extend(messages)
        self._flights.clear()
        for lane, messages in lost.items():
            lane.back(messages)
