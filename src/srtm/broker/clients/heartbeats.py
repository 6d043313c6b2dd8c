"""Heartbeats: every client is asked for a sign of life once an interval, and closed if it is silent for two."""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING, Final

from srtm.protocol import frames
from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    from srtm.broker.clients.connection import Connection
    from srtm.broker.turn import Turn

# Clients that came together must not stop the loop together: a few are asked, then the loop turns.
_AT_ONCE: Final = 8
_BREAK_S: Final = 0.001


class Heartbeats:
    """The clients of a broker, by when they must be asked next."""

    __slots__ = ("_beating", "_current", "_due", "_order", "_turn")

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._due: list[tuple[int, int, Connection, bool]] = []  # True if it was asked before
        self._current: dict[Connection, int] = {}  # which of a client's entries counts: the last that was expected
        self._order = count()
        self._beating = False

    def expect(self, connection: Connection) -> None:
        """Ask a client when its interval is over; called again, with the interval that it has then."""
        interval_ns = connection.protocol.identity.heartbeat_ms * NS_PER_MS
        beat = self._current[connection] = next(self._order)
        if interval_ns:
            heapq.heappush(self._due, (self._turn.now_ns() + interval_ns, beat, connection, False))

    def forget(self, connection: Connection) -> None:
        """Ask it no more."""
        self._current.pop(connection, None)

    def tick(self) -> None:
        """Ask those whose interval is over."""
        if not self._beating:
            self._beat()

    def _beat(self) -> None:
        now_ns = self._turn.now_ns()
        for _ in range(_AT_ONCE):
            self._beating = bool(self._due) and self._due[0][0] <= now_ns
            if not self._beating:
                break
            due_ns, beat, connection, asked = heapq.heappop(self._due)
            if self._current.get(connection) != beat:
                continue
            interval_ns = connection.protocol.identity.heartbeat_ms * NS_PER_MS
            silent = asked and now_ns - connection.heard_ns > 2 * interval_ns  # a late tick asks first
            if silent and (connection.choked or not connection.holds):
                connection.close()
                continue
            connection.send(frames.HEARTBEAT)
            next_ns = (due_ns if due_ns + interval_ns > now_ns else now_ns) + interval_ns  # time to answer
            heapq.heappush(self._due, (next_ns, beat, connection, True))
        self._turn.wake()
        if self._beating:
            self._turn.loop.call_later(_BREAK_S, self._beat)
