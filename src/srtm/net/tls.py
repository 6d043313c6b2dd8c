"""TLS in memory: OpenSSL never sees a socket, so its reader keeps the kernel stamps.

A handshake that fails or takes longer than HANDSHAKE_S ends its own connection only.
"""

from __future__ import annotations

import ssl
import warnings
from contextlib import suppress
from typing import Any

from srtm.errors import BrokerError, InputError
from srtm.files import not_readable
from srtm.net.compression import AT_ONCE, BadStream

HANDSHAKE_S = 5.0
VERSIONS = {
    "tls1.0": ssl.TLSVersion.TLSv1,
    "tls1.1": ssl.TLSVersion.TLSv1_1,
    "tls1.2": ssl.TLSVersion.TLSv1_2,
    "tls1.3": ssl.TLSVersion.TLSv1_3,
}


def _no_password() -> str:
    """Refuse: OpenSSL would otherwise ask on the terminal."""
    raise ssl.SSLError("the key is encrypted: decrypt it with `openssl pkey -in KEY -out PLAIN`")


def server_context(
    cert: str, key: str, ca: str | None, *, min_version: str, client_certificates: bool
) -> ssl.SSLContext:
    """Return a TLS context for servers."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TLS 1.0 is allowed if the operator asks for it
        context.minimum_version = VERSIONS[min_version]
    try:
        context.load_cert_chain(cert, key, _no_password)
        if ca:
            context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(filter(None, (cert, key, ca)))
        raise BrokerError(f"cannot use the certificates in {files}: {error}") from None
    if client_certificates:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    """Return a TLS context for clients, which verifies servers by a CA file, or by the CAs of the system."""
    for option, path in (("ca", ca), ("cert", cert), ("key", key)):
        if path and (why := not_readable(path)):
            raise InputError(f"option {option} of the engine, {path}: {why}")
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert:
            context.load_cert_chain(cert, key, _no_password)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(filter(None, (ca, cert, key)))
        raise InputError(f"cannot use the certificates in {files}: {error}") from None
    return context


class Tls:
    """One TLS connection in memory: the server's side, or that of a client of `server`."""

    __slots__ = ("_incoming", "_outgoing", "ended", "ready", "serves", "ssl")

    def __init__(self, context: ssl.SSLContext, server: str | None = None) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.ssl = context.wrap_bio(self._incoming, self._outgoing, server_side=server is None, server_hostname=server)
        self.serves = server is None
        self.ready = False
        self.ended = False

    def decode(self, data: bytes) -> bytes:
        """Decrypt bytes of a read; until `ready`, continue the handshake."""
        self._incoming.write(data)
        parts: list[bytes] = []
        try:
            if not self.ready:
                self.ssl.do_handshake()
                self.ready = True
            while part := self.ssl.read(AT_ONCE):
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
        """Encrypt bytes for the socket."""
        with memoryview(data) as view:
            at = 0
            while at < len(view):
                at += self.ssl.write(view[at:])
        return self.pending()

    def end(self) -> bytes:
        """Return the bytes that announce the end of our side."""
        with suppress(ssl.SSLError):  # the peer's own end may come much later
            self.ssl.unwrap()
        return self.pending()

    def pending(self) -> bytes:
        """Return what TLS itself has to send: handshakes, tickets, alerts."""
        return self._outgoing.read()

    @property
    def common_name(self) -> str:
        """The common name in the client's certificate."""
        certificate: Any = self.ssl.getpeercert() or {}
        names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
        return str(names[0]) if names else ""
