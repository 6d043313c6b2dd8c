"""The layers between a client's socket and its commands: TLS, then raw deflate or snappy in frames.

In: bytes as a read brought them. Out: bytes of the protocol; and the other way round. Sockets stay with the connection,
so arrival times are the kernel's under TLS, too.

IDENTIFY settles the layers. Its answer goes out in the clear; then each layer begins with an OK of its own, TLS after
its handshake, as in nsqd.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.net.compression import Codec, Deflate, Snappy
from srtm.net.tls import Tls
from srtm.protocol import frames

if TYPE_CHECKING:
    import ssl

    from srtm.protocol.identify import Identity


class Transport:
    """The layers of one connection, from its IDENTIFY on. `wire` is what must be written next."""

    __slots__ = ("_begins", "_codec", "_identity", "tls", "wire")

    def __init__(self, identity: Identity, context: ssl.SSLContext | None, clear: bytes) -> None:
        """`clear` was said before the layers begin."""
        self._identity = identity
        self._codec: Codec | None = None
        self._begins = b""  # the OK of a compression that has not begun to write
        self.wire = bytearray(clear)
        self.tls: Tls | None = None
        if identity.tls_v1:
            assert context is not None
            self.tls = Tls(context)
        else:
            self._compress()

    @property
    def ready(self) -> bool:
        """Whether there is no handshake to wait for."""
        return self.tls is None or self.tls.ready

    @property
    def more(self) -> bool:
        """Whether a read holds more than one turn takes; `receive(b"")` gives it."""
        return self._codec is not None and self._codec.more

    @property
    def ended(self) -> bool:
        """Whether the client has closed its side of TLS."""
        return self.tls is not None and self.tls.ended

    def receive(self, data: bytes | memoryview) -> bytes:
        """Return bytes of the protocol; BadStream if the client breaks a layer, with TLS's alert on the wire."""
        tls, plain = self.tls, bytes(data)
        if tls is not None:
            shaking = not tls.ready
            try:
                plain = tls.decode(plain)
            finally:
                self.wire += tls.pending()
            if shaking and tls.ready:
                self.wire += tls.encode(frames.OK)
                self._compress()
        return plain if self._codec is None else self._codec.decode(plain)

    def _compress(self) -> None:
        """Begin the compression that was settled, if any; what waited in the clear goes out through it."""
        identity = self._identity
        if identity.snappy:
            self._codec = Snappy()
        elif identity.deflate:
            self._codec = Deflate(identity.deflate_level)
        if self._codec is not None:
            self._begins = frames.OK

    def encode(self, out: bytearray) -> bytearray:
        """Move bytes of the protocol through the layers, as soon as there are any; returns `wire`."""
        if (out or self._begins) and self.ready:
            data = self._begins + out
            self._begins = b""
            out.clear()
            if self._codec is not None:
                data = self._codec.encode(data)
            self.wire += self.tls.encode(data) if self.tls else data
        return self.wire
