"""What may stand between a client's socket and its commands: TLS, raw deflate, or snappy in frames.

In: bytes as a read brought them, with the read's kernel time beside them. Out: the bytes of the protocol; and the other
way round, one write a turn. The socket stays the broker's, so arrival times are the kernel's here, too.

IDENTIFY settles what is wanted. Its answer goes out in the clear, then each layer is begun with an OK of its own, TLS
after its handshake, as in nsqd.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from srtm.net.compression import BadStream, Codec, Deflate, Snappy
from srtm.net.tls import HANDSHAKE_S, Tls
from srtm.protocol import frames

if TYPE_CHECKING:
    import asyncio
    import ssl

    from srtm.broker.connection import Connection
    from srtm.protocol.identify import Identity


class Transport:
    """The layers of one connection, from its IDENTIFY on."""

    __slots__ = ("_codec", "_connection", "_identity", "_timer", "_wire", "tls")

    def __init__(self, connection: Connection, identity: Identity, context: ssl.SSLContext | None) -> None:
        self._connection = connection
        self._identity = identity
        self._codec: Codec | None = None
        # What is to be written next. It begins with what was said in the clear.
        self._wire = bytearray(connection.out)
        connection.out.clear()
        loop = connection.broker.loop
        if connection.writing:
            loop.add_writer(connection.sock, self._writable)
        self.tls: Tls | None = None
        self._timer: asyncio.TimerHandle | None = None
        if identity.tls_v1:
            assert context is not None
            self.tls = Tls(context)
            self._timer = loop.call_later(HANDSHAKE_S, connection.broker.close, connection)
        else:
            self._compress()
        connection.broker.to_flush.append(connection)

    @property
    def more(self) -> bool:
        """Whether a read holds more than one turn takes; `receive(b"")` gives it."""
        return self._codec is not None and self._codec.more

    @property
    def ended(self) -> bool:
        """Whether the client said, in the words of TLS, that it sends no more."""
        return self.tls is not None and self.tls.ended

    @property
    def _ready(self) -> bool:
        return self.tls is None or self.tls.ready

    def receive(self, data: bytes | memoryview) -> bytes:
        """Bytes of the protocol; where a client breaks its layer, none, and its connection is closed."""
        connection, tls = self._connection, self.tls
        plain = bytes(data)
        try:
            if tls is not None:
                shaking = not tls.ready
                plain = tls.decode(plain)
                if shaking and tls.ready:
                    self._shaken(tls)
                self._wire += tls.pending()
            if self._codec is not None:
                plain = self._codec.decode(plain)
        except BadStream:
            with suppress(OSError):
                if tls is not None and not connection.writing:
                    connection.sock.send(self._wire + tls.pending())  # an alert says why
            connection.broker.close(connection)
            return b""
        if self._wire:
            connection.broker.to_flush.append(connection)
        return plain

    def _shaken(self, tls: Tls) -> None:
        connection = self._connection
        self.close()
        connection.protocol.tls = True
        self._wire += tls.pending() + tls.encode(frames.OK)
        self._compress()

    def _compress(self) -> None:
        """Begin the compression that was settled, if any; what waited in the clear goes out through it."""
        identity = self._identity
        if identity.snappy:
            self._codec = Snappy()
        elif identity.deflate:
            self._codec = Deflate(identity.deflate_level)
        if self._codec is not None:
            self._connection.out[:0] = frames.OK

    def flush(self) -> None:
        """One write of all that there is. What the kernel does not take yet is kept, and no more made of the rest."""
        connection = self._connection
        if connection.writing:
            return
        if connection.out and self._ready:
            data = bytes(connection.out)
            connection.out.clear()
            if self._codec is not None:
                data = self._codec.encode(data)
            self._wire += self.tls.encode(data) if self.tls else data
        if self._wire and not self._push():
            connection.writing = True
            connection.broker.loop.add_writer(connection.sock, self._writable)
            return
        connection.flushed()

    def _push(self) -> bool:
        """Write; gives whether all is written, or there is nobody any more to write to."""
        try:
            sent = self._connection.sock.send(self._wire)
        except BlockingIOError:
            return False
        except OSError:
            self._connection.broker.close(self._connection)
            self._wire.clear()
            return True
        del self._wire[:sent]
        return not self._wire

    def _writable(self) -> None:
        if self._push():
            self._connection.written()

    def close(self) -> None:
        """Wait for no handshake any more."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
