"""Compression of a connection: raw deflate, or snappy in frames.

In: bytes of a read. Out: bytes of the protocol; and the reverse, one write at a time.
Always holds: one `decode` returns a bounded number of bytes, however well they were compressed; `more` says that there
is a rest.
"""

from __future__ import annotations

import zlib
from importlib.util import find_spec
from typing import Any, Protocol

HAS_SNAPPY = find_spec("cramjam") is not None
AT_ONCE = 256 * 1024  # bytes of the protocol that one `decode` returns, about


class BadStream(Exception):
    """The peer broke the rules of a layer."""


class Codec(Protocol):
    """A compression, in both directions."""

    more: bool  # whether `decode(b"")` would return more

    def decode(self, data: bytes) -> bytes:
        """Return bytes of the protocol, a part at a time if there are very many."""

    def encode(self, data: bytes) -> bytes:
        """Return bytes for the socket that the peer can decode completely."""


class Deflate:
    """Raw deflate, flushed at every write."""

    __slots__ = ("_deflate", "_inflate", "more")

    def __init__(self, level: int) -> None:
        self._deflate = zlib.compressobj(level, wbits=-zlib.MAX_WBITS)
        self._inflate = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
        self.more = False

    def decode(self, data: bytes) -> bytes:
        """Return bytes of the protocol."""
        inflate = self._inflate
        try:
            found = inflate.decompress(inflate.unconsumed_tail + data, AT_ONCE)
        except zlib.error as error:
            raise BadStream(f"deflate: {error}") from None
        if inflate.eof:
            raise BadStream("deflate: the peer ended its stream")
        self.more = len(found) == AT_ONCE
        return found

    def encode(self, data: bytes) -> bytes:
        """Return bytes for the socket."""
        return self._deflate.compress(data) + self._deflate.flush(zlib.Z_SYNC_FLUSH)


class Snappy:
    """Snappy's framing format: chunks of [type 1][size 3, little-endian][CRC32C 4][data].

    cramjam does the compression and the checksums; this class finds where chunks end.
    """

    __slots__ = ("_begun", "_pending", "_snappy", "more")

    _BEGIN = b"\xff\x06\x00\x00sNaPpY"
    _DATA = (0x00, 0x01)  # compressed, uncompressed
    _LONGEST = 76_490 + 4  # the worst case of 64 KiB, with its checksum
    _CHUNKS_AT_ONCE = AT_ONCE // 65_536

    def __init__(self) -> None:
        import cramjam

        self._snappy: Any = cramjam.snappy
        self._begun = False
        self._pending = bytearray()
        self.more = False

    def decode(self, data: bytes) -> bytes:
        """Return bytes of the protocol."""
        pending = self._pending
        pending += data
        chunks = bytearray(self._BEGIN)
        at = count = 0
        self.more = False
        while at + 4 <= len(pending):
            kind, size = pending[at], int.from_bytes(pending[at + 1 : at + 4], "little")
            if size > self._LONGEST or 0x02 <= kind <= 0x7F:
                raise BadStream(f"snappy: unexpected chunk of type {kind:#x} with {size} bytes")
            stop = at + 4 + size
            if stop > len(pending):
                break
            if kind in self._DATA:
                if count == self._CHUNKS_AT_ONCE:
                    self.more = True
                    break
                count += 1
                chunks += pending[at:stop]
            elif kind == self._BEGIN[0] and pending[at:stop] != self._BEGIN:
                raise BadStream("snappy: invalid stream identifier")
            at = stop
        del pending[:at]
        if not count:
            return b""
        try:
            return bytes(self._snappy.decompress(chunks))
        except Exception as error:  # cramjam's exceptions have no stable base
            raise BadStream(f"snappy: {error}") from None

    def encode(self, data: bytes) -> bytes:
        """Return bytes for the socket."""
        found = bytes(self._snappy.compress(data))
        if self._begun:
            return found[len(self._BEGIN) :]
        self._begun = True
        return found
