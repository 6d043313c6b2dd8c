"""A broker: its parts, put together, and the loop that turns them.

A turn begins with the reads that the poller found ready. Each read is stamped by the kernel and parsed whole; the
intake puts its messages before their topics with that stamp. When all reads are done, `Turn.end` lets every touched
topic release what has tokens. docs/adr/0011-arrival-times.md says which stamp a read gets, and how a connection is read
after a stall; a read without a stamp gets the time of reading, and `/stats` counts it.

Loop, clock, poller, turns and sockets are arguments: `listen` serves a TCP port, `clients.add` any object that behaves
like a non-blocking socket.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from srtm.broker.clients.clients import Clients
from srtm.broker.control import Control
from srtm.broker.engines.kinds import engine_of
from srtm.broker.intake import Intake
from srtm.broker.lending.links import Links
from srtm.broker.listener import Listener, sockets_of
from srtm.broker.message import Ids
from srtm.broker.options import settled
from srtm.broker.poller import Poller
from srtm.broker.statistics import BrokerStatistics
from srtm.broker.ticks import Ticks
from srtm.broker.topics import Topics
from srtm.broker.turn import Turn
from srtm.net.alarm import Alarm

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from srtm.broker.disk.durable import Durable
    from srtm.broker.engines.engine import Engine
    from srtm.broker.options import BrokerOptions
    from srtm.broker.turn import Clock

_LATE_NS: Final = 2_000_000  # a message that was read later than this after its arrival was not read in time
_STOPPED_NS: Final = 5_000_000  # longer than a turn reads


class Broker:
    """A broker at work: listens, serves, and stops."""

    def __init__(
        self,
        options: BrokerOptions,
        loop: asyncio.AbstractEventLoop,
        clock: Clock = time,
        poller: Callable[..., Poller] = Poller,
        alarm: Callable[..., Alarm] = Alarm,
        turns: Callable[..., Turn] = Turn,
    ) -> None:
        self.options = options = settled(options)
        self.clock = clock
        self.started_ns = clock.time_ns()
        self.tcp_port = self.http_port = self.https_port = 0
        self.turn = turn = turns(loop, clock.time_ns, alarm)
        self.poller = poller(loop, self._take_turn, clock.time_ns)
        engine = engine_of(options, turn, self.poller)
        self.topics = Topics(
            turn, engine, options.max_held_messages, options.max_held_bytes, options.max_channel_consumers
        )
        groups: dict[str, str | None] = {}
        self.durable: Durable | None = None
        if options.data_path:
            from srtm.broker.disk.durable import Durable

            self.durable = Durable(Path(options.data_path), options, self.topics, turn, groups)
        self.control = Control(options, self.topics, turn, groups, self.started_ns)
        self.intake = Intake(self.topics, turn, Ids(secrets.randbits(62)), self.durable)
        self.clients = Clients(options, turn, self.poller, self.topics, self.intake, self.control)
        if options.controller is not None:
            links = Links(options, self.started_ns, turn, self.poller, self.control.lenders)
            self.control.lenders.wire, self.clients.lend = links, links.welcome
        self._ticks = Ticks(turn, clock, self.topics, self.control, self.clients.heartbeats)
        self._listeners: list[Listener] = []
        turn.engine, turn.disk = engine, self.durable
        self.topics.disk, self.topics.contracts = self.durable, self.control

    @property
    def engine(self) -> Engine | None:
        """The delivery engine; None if the broker's own channels deliver."""
        return self.topics.engine

    def listen(self) -> int:
        """Accept clients from now on; returns the port."""
        sockets = sockets_of(self.options)
        self._listeners = [Listener(sock, self.turn, self.clients.add) for sock in sockets]
        self.tcp_port = int(sockets[0].getsockname()[1])
        self.start()
        for listener in self._listeners:
            listener.start()
        return self.tcp_port

    def start(self) -> None:
        """Connect to the engine, bring back what the disk has, and begin to tick."""
        if self.engine is not None:
            self.engine.start(self.tcp_port)
        if self.durable is not None:
            self.durable.recover(self.started_ns)
        self._ticks.start()

    def _take_turn(self, more: bool) -> None:  # noqa: FBT001
        """Do what follows from what clients said; `more` of them are read at once."""
        turn, poller = self.turn, self.poller
        if more and self._stood_still():
            return
        late = turn.now_ns() - poller.began_ns > _STOPPED_NS
        if late and any(topic.limiter for topic in turn.to_drain):
            # Stopped while it read: a client that was read since may have spoken later than one that is ready now.
            poller.read_again()
        if self.control.lenders.inbox:  # after all reads: messages that came before tokens do not count as later
            self.control.hear_peers(turn.now_ns(), self.clock.monotonic_ns())
        turn.end(more=more)

    def _stood_still(self) -> bool:
        """Whether messages waited to be read for a while: others that came before them may not be read yet."""
        late_ns = self.poller.began_ns - _LATE_NS
        return any(
            topic.limiter is not None and any(message.arrival_ns < late_ns for message in topic.gate.arrived)
            for topic in self.turn.to_drain
        )

    def statistics(self, topic: str | None = None, *, clients: bool = False) -> BrokerStatistics:
        """A snapshot, of all topics or of one; with `clients`, it lists publishers, and channels list consumers."""
        now_ns, engine, connections = self.turn.now_ns(), self.topics.engine, self.clients.connections
        topics = [each for name, each in sorted(self.topics.items()) if topic in (None, name)]
        publishers = [each for each in connections.values() if each.published] if clients else []
        return BrokerStatistics(
            self.started_ns,
            len(connections),
            self.clients.buffers.unstamped,
            self.turn.lag_ns,
            self.control.busy,
            engine.statistics() if engine else None,
            tuple(each.statistics(now_ns, clients=clients) for each in topics),
            tuple(each.statistics() for each in publishers) if clients else None,
            self.durable.problem if self.durable else None,
        )

    def stop(self) -> None:
        """Accept no more clients, close every connection, and save what is not finished."""
        self._ticks.stop()
        for listener in self._listeners:
            listener.close()
        self.clients.close()
        self.control.lenders.close()
        if self.engine is not None:
            self.engine.stop()
        self.turn.close()
        self.poller.close()
        if self.durable is not None:
            self.durable.close()
