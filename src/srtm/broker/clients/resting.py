"""Busy consumers are read now and then instead of at each FIN, as network drivers do with interrupts.

While a consumer finishes messages faster than every REST_S, a wake-up and a read per message are saved. It rests only
while it may be sent many more messages; if messages wait that it cannot take, the channel attends to it at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.broker.clients.verbs import REST_S

if TYPE_CHECKING:
    from srtm.broker.clients.connection import Connection
    from srtm.broker.poller import Poller
    from srtm.broker.turn import Turn


class Resting:
    """Connections that the poller does not watch for a moment."""

    __slots__ = ("_poller", "_resting", "_turn")

    def __init__(self, turn: Turn, poller: Poller) -> None:
        self._turn = turn
        self._poller = poller
        self._resting: dict[Connection, None] = {}

    def rest(self, connection: Connection) -> None:
        """Read a busy consumer after a while."""
        if not self._resting:
            self._turn.loop.call_later(REST_S, self._read)
        self._resting[connection] = None
        connection.resting = True
        self._poller.remove(connection.sock)

    def end(self, connection: Connection) -> None:
        """Read it again as soon as it says something."""
        connection.resting = False
        self._resting.pop(connection, None)
        if not connection.holds and not connection.closed:
            self._poller.add(connection.sock, connection.readable)

    def forget(self, connection: Connection) -> None:
        """It is closed."""
        self._resting.pop(connection, None)

    def _read(self) -> None:
        for connection in list(self._resting):
            heard_ns = connection.heard_ns
            if not connection.holds:
                connection.read(connection.keeper.buffers.whole)
            if connection.resting and (connection.heard_ns == heard_ns or connection.speaker.hungry()):
                self.end(connection)
        self._turn.end()
        if self._resting:
            self._turn.loop.call_later(REST_S, self._read)
