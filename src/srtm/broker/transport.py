"""What may stand between a client's socket and its commands: TLS, raw deflate, or snappy in frames.

In: bytes as a read brought them, with the read's kernel time beside them. Out: the bytes of the protocol; and the other
way round, one write a turn. The socket stays the broker's: OpenSSL works on memory, so that arrival times are the
kernel's here, too.

IDENTIFY settles what is wanted. Its answer goes out in the clear, then each layer is begun with an OK of its own, TLS
after its handshake, as in nsqd. A handshake that fails or takes longer than 5 s ends its connection and nothing else.
Invariant: what one read may turn into is bounded, however well it was compressed; the rest waits for the next turn.
"""

from __future__ import annotations

import ssl
import warnings
import zlib
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from srtm.broker.options import BrokerOptions, not_writable
from srtm.errors import BrokerError, InputError
from srtm.protocol import frames

if TYPE_CHECKING:
    import asyncio

    from srtm.broker.connection import Connection
    from srtm.protocol.identify import Identity

HANDSHAKE_S = 5.0
VERSIONS = {
    "tls1.0": ssl.TLSVersion.TLSv1,
    "tls1.1": ssl.TLSVersion.TLSv1_1,
    "tls1.2": ssl.TLSVersion.TLSv1_2,
    "tls1.3": ssl.TLSVersion.TLSv1_3,
}
POLICIES = ("", "require", "require-verify")
_AT_ONCE = 256 * 1024  # bytes of the protocol that one turn takes from one read

HAS_SNAPPY = find_spec("cramjam") is not None


class BadStream(Exception):
    """What the other side sent is not what its layer expects."""


def settled(options: BrokerOptions) -> BrokerOptions:
    """The options with what follows from them: a server offers what it can do."""
    problems = []
    if bool(options.tls_cert) != bool(options.tls_key):
        problems.append("give --tls-cert and --tls-key together")
    if options.tls_client_auth_policy not in POLICIES:
        problems.append(f"--tls-client-auth-policy is require or require-verify, not {options.tls_client_auth_policy}")
    if options.tls_client_auth_policy and not options.tls_root_ca_file:
        problems.append("clients' certificates are always verified: give --tls-root-ca-file")
    if options.tls_min_version not in VERSIONS:
        problems.append(f"--tls-min-version is one of {', '.join(VERSIONS)}, not {options.tls_min_version}")
    required = options.tls_required or bool(options.tls_client_auth_policy)
    if required and not options.tls_cert:
        problems.append("TLS can only be required with --tls-cert and --tls-key")
    if options.https_port is not None and not options.tls_cert:
        problems.append("HTTPS needs a certificate: give --tls-cert and --tls-key with --https-port")
    if options.plain_http and not required:
        problems.append("--plain-http takes HTTP from what --tls-required requires: give both, or neither")
    retained = options.retain_bytes is not None or options.retain_age_ns is not None or options.retain_acknowledged
    if retained and not options.data_path:
        problems.append("--retain-… is about topics on disk: give --data-path, too")
    problems += [
        f"--auth-http-address is HOST:PORT or a URL, not {address!r}"
        for address in options.auth_http_addresses
        if "://" not in address and not _is_place(address)
    ]
    for flag, path in (
        ("--tls-cert", options.tls_cert),
        ("--tls-key", options.tls_key),
        ("--tls-root-ca-file", options.tls_root_ca_file),
    ):
        if path and (why := _not_readable(path)):
            problems.append(f"{flag} {path}: {why}")
    if options.trace_folder and (why := not_writable(options.trace_folder)):
        problems.append(f"--trace-folder {options.trace_folder}: {why}; make it, or let this user write to it")
    if problems:
        raise BrokerError("; ".join(problems), problems=problems)
    settings = replace(
        options.settings,
        tls_v1=bool(options.tls_cert),
        tls_required=required,
        snappy=options.settings.snappy and HAS_SNAPPY,
        auth_required=bool(options.auth_http_addresses),
    )
    return replace(options, settings=settings)


def _is_place(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and int(port) < 1 << 16


def _not_readable(path: str) -> str | None:
    try:
        with Path(path).open("rb"):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _no_password() -> str:
    """OpenSSL would ask for it on the terminal, where nobody sits."""
    raise ssl.SSLError("the key is encrypted: write it without its password with `openssl pkey -in KEY -out PLAIN`")


def tls_context(options: BrokerOptions) -> ssl.SSLContext | None:
    """The server's side of TLS, or None where there is no certificate."""
    if not options.tls_cert or not options.tls_key:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # whoever asks for TLS 1.0 shall have it
        context.minimum_version = VERSIONS[options.tls_min_version]
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key, _no_password)
        if options.tls_root_ca_file:
            context.load_verify_locations(options.tls_root_ca_file)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(filter(None, (options.tls_cert, options.tls_key, options.tls_root_ca_file)))
        raise BrokerError(f"cannot use the certificates of {files}: {error}") from None
    if options.tls_client_auth_policy:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    """The client's side of TLS: servers are verified by a file of authorities, or by those whom the system trusts."""
    for option, path in (("ca", ca), ("cert", cert), ("key", key)):
        if path and (why := _not_readable(path)):
            raise InputError(f"option {option} of the engine, {path}: {why}")
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert:
            context.load_cert_chain(cert, key, _no_password)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(filter(None, (ca, cert, key)))
        raise InputError(f"cannot use the certificates of {files}: {error}") from None
    return context


class Codec(Protocol):
    """A compression, both ways."""

    more: bool  # whether another `decode`, of nothing, would give more

    def decode(self, data: bytes) -> bytes:
        """Bytes of the protocol: not all at once, if there are very many."""

    def encode(self, data: bytes) -> bytes:
        """Bytes for the socket, complete for the other side to decode."""


class Deflate:
    """Raw deflate, flushed at every write."""

    __slots__ = ("_deflate", "_inflate", "more")

    def __init__(self, level: int) -> None:
        self._deflate = zlib.compressobj(level, wbits=-zlib.MAX_WBITS)
        self._inflate = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
        self.more = False

    def decode(self, data: bytes) -> bytes:
        """Bytes of the protocol."""
        inflate = self._inflate
        try:
            found = inflate.decompress(inflate.unconsumed_tail + data, _AT_ONCE)
        except zlib.error as error:
            raise BadStream(f"deflate: {error}") from None
        if inflate.eof:
            raise BadStream("deflate: the client ended its stream")
        self.more = len(found) == _AT_ONCE
        return found

    def encode(self, data: bytes) -> bytes:
        """Bytes for the socket."""
        return self._deflate.compress(data) + self._deflate.flush(zlib.Z_SYNC_FLUSH)


class Snappy:
    """Snappy's framing format: chunks of [type 1][size 3, little-endian][CRC32C 4][data].

    cramjam does snappy and the checksums; what is done here is to find where chunks end.
    """

    __slots__ = ("_begun", "_pending", "_snappy", "more")

    _BEGIN = b"\xff\x06\x00\x00sNaPpY"
    _DATA = (0x00, 0x01)  # compressed, and as it is
    _LONGEST = 76_490 + 4  # what 64 KiB can become at worst, with its checksum
    _CHUNKS_AT_ONCE = _AT_ONCE // 65_536

    def __init__(self) -> None:
        import cramjam

        self._snappy: Any = cramjam.snappy
        self._begun = False
        self._pending = bytearray()
        self.more = False

    def decode(self, data: bytes) -> bytes:
        """Bytes of the protocol."""
        pending = self._pending
        pending += data
        chunks = bytearray(self._BEGIN)
        at = count = 0
        self.more = False
        while at + 4 <= len(pending):
            kind, size = pending[at], int.from_bytes(pending[at + 1 : at + 4], "little")
            if size > self._LONGEST or 0x02 <= kind <= 0x7F:
                raise BadStream(f"snappy: a chunk of type {kind:#x} with {size} bytes")
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
                raise BadStream("snappy: a strange beginning")
            at = stop
        del pending[:at]
        if not count:
            return b""
        try:
            return bytes(self._snappy.decompress(chunks))
        except Exception as error:  # cramjam's own has no stable base
            raise BadStream(f"snappy: {error}") from None

    def encode(self, data: bytes) -> bytes:
        """Bytes for the socket."""
        found = bytes(self._snappy.compress(data))
        if self._begun:
            return found[len(self._BEGIN) :]
        self._begun = True
        return found


class Tls:
    """One TLS connection, in memory: the server's side, or that of a client of `server`."""

    __slots__ = ("_incoming", "_outgoing", "ended", "ready", "ssl")

    def __init__(self, context: ssl.SSLContext, server: str | None = None) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.ssl = context.wrap_bio(self._incoming, self._outgoing, server_side=server is None, server_hostname=server)
        self.ready = False
        self.ended = False

    def decode(self, data: bytes) -> bytes:
        """What was encrypted; before `ready`, the handshake goes on."""
        self._incoming.write(data)
        parts: list[bytes] = []
        try:
            if not self.ready:
                self.ssl.do_handshake()
                self.ready = True
            while part := self.ssl.read(_AT_ONCE):
                parts.append(part)
        except ssl.SSLWantReadError:
            return b"".join(parts)
        except ssl.SSLZeroReturnError:
            self.ended = True
            return b"".join(parts)
        except ssl.SSLError as error:
            raise BadStream(f"TLS: {error}") from error
        self.ended = True
        return b"".join(parts)

    def encode(self, data: bytes | bytearray) -> bytes:
        """Bytes for the socket."""
        with memoryview(data) as view:
            at = 0
            while at < len(view):
                at += self.ssl.write(view[at:])
        return self.pending()

    def end(self) -> bytes:
        """Bytes for the socket that say: nothing more comes from here."""
        with suppress(ssl.SSLError):  # it wants the other side's word, too, which may come much later
            self.ssl.unwrap()
        return self.pending()

    def pending(self) -> bytes:
        """What TLS itself has to say: handshakes, tickets, alerts."""
        return self._outgoing.read()

    @property
    def common_name(self) -> str:
        """Of the client's certificate."""
        certificate: Any = self.ssl.getpeercert() or {}
        names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
        return str(names[0]) if names else ""


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
