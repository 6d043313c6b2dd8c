"""TLS and compression between a client's socket and its protocol: compression runs inside TLS.

In: bytes of the socket, or of the protocol. Out: bytes of the other side. A layer starts right after a server's answer,
and a read may hold both, so `rest` takes bytes that follow the answer through the new layer alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from srtm.net.compression import Codec
    from srtm.net.tls import Tls


class Layers:
    """The layers of one connection; BadStream if the peer breaks one."""

    __slots__ = ("_codec", "_new", "_tls")

    def __init__(self) -> None:
        self._tls: Tls | None = None
        self._codec: Codec | None = None
        self._new: Tls | Codec | None = None  # started, and nothing was read through it yet

    @property
    def plain(self) -> bool:
        """Whether the protocol uses the socket directly."""
        return self._tls is None and self._codec is None

    def start_tls(self, tls: Tls) -> None:
        """Encrypt from now on; `pending` begins the handshake."""
        self._tls = self._new = tls
        tls.decode(b"")

    def start_codec(self, codec: Codec) -> None:
        """Compress from now on."""
        self._codec = self._new = codec

    def rest(self, data: bytes) -> bytes:
        """Decode bytes that came in one read with the answer that started the newest layer."""
        layer, self._new = self._new, None
        if layer is None or not data:
            return data
        return layer.decode(data) if layer is self._tls else self._inflated(data)

    def decode(self, data: bytes) -> bytes:
        """Return the bytes of the protocol in a read."""
        if self._tls is not None:
            data = self._tls.decode(data)
        return data if self._codec is None else self._inflated(data)

    def encode(self, data: bytes) -> bytes:
        """Return bytes for the socket."""
        if self._codec is not None:
            data = self._codec.encode(data)
        return data if self._tls is None else self._tls.encode(data)

    def pending(self) -> bytes:
        """Return what TLS itself has to send: handshakes, tickets, alerts."""
        return b"" if self._tls is None else self._tls.pending()

    def end(self) -> bytes:
        """Return the bytes that announce the end of our side."""
        return b"" if self._tls is None else self._tls.end()

    def _inflated(self, data: bytes) -> bytes:
        codec = self._codec
        assert codec is not None
        found = codec.decode(data)
        while codec.more:
            found += codec.decode(b"")
        return found
