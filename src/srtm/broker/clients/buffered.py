"""A subscription whose messages are written together, because its client asked for that.

A broker writes messages at the end of the turn that delivers them. A client that asks for an `output_buffer_timeout`
longer than the broker's default prefers few large writes to low latency: its messages wait until that time has passed,
until they fill its `output_buffer_size`, or until it may get no more of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.broker.clients.subscription import Subscription

if TYPE_CHECKING:
    import asyncio

    from srtm.broker.channel import Channel
    from srtm.broker.clients.connection import Connection
    from srtm.broker.message import Message
    from srtm.broker.topic import Topic


class BufferedSubscription(Subscription):
    """One consumer that is written to now and then."""

    __slots__ = ("_bytes", "_held", "_size", "_timeout_s", "_timer")

    def __init__(self, connection: Connection, topic: Topic, channel: Channel, max_unsent: int) -> None:
        super().__init__(connection, topic, channel, max_unsent)
        identity = connection.protocol.identity
        self._size = identity.output_buffer_size
        self._timeout_s = identity.output_buffer_timeout_ms / 1000
        self._held: list[Message] = []
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def deliver(self, messages: list[Message]) -> None:
        """Keep messages for the next write."""
        self._held += messages
        self._bytes += sum(len(message.body) for message in messages)
        if self._bytes >= self._size or len(self.flights) >= self.ready:
            self._write()
        elif self._timer is None:
            self._timer = self._turn.loop.call_later(self._timeout_s, self._due)

    def _due(self) -> None:
        if not self._connection.closed:
            self._write()
            self._turn.wake()

    def _write(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # A message that was given to another consumer meanwhile, or was emptied, is not sent.
        held, self._held, self._bytes = self._held, [], 0
        super().deliver([message for message in held if message.id in self.flights])


def subscription(connection: Connection, topic: Topic, channel: Channel, max_unsent: int) -> Subscription:
    """Return a client's place in a channel, buffered if the client asked for that."""
    protocol = connection.protocol
    buffers = protocol.identity.output_buffer_timeout_ms > protocol.settings.output_buffer_timeout_ms
    return (BufferedSubscription if buffers else Subscription)(connection, topic, channel, max_unsent)
