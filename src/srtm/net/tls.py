"""TLS in memory: OpenSSL never sees a socket, so its reader keeps the kernel stamps. And TLS contexts, for everybody.

A handshake that fails or takes longer than HANDSHAKE_S ends its own connection only. A server takes up certificates
that were changed on disk with the next handshake; while the new files are unusable, it goes on with the old ones.
"""

from __future__ import annotations

import logging
import os
import ssl
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srtm.errors import BrokerError, InputError
from srtm.files import not_readable
from srtm.net.compression import AT_ONCE, BadStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
Files = tuple[tuple[int, int, int] | None, ...]  # what changes when files are written or replaced
AUTH_POLICIES = ("require", "require-verify")  # as nsqd names them
VERSIONS = {
    "tls1.0": ssl.TLSVersion.TLSv1,
    "tls1.1": ssl.TLSVersion.TLSv1_1,
    "tls1.2": ssl.TLSVersion.TLSv1_2,
    "tls1.3": ssl.TLSVersion.TLSv1_3,
}


def _no_password() -> str:
    """Refuse: OpenSSL would otherwise ask on the terminal."""
    raise ssl.SSLError("the key is encrypted: decrypt it with `openssl pkey -in KEY -out PLAIN`")


def stamp_of(paths: Iterable[str | None]) -> Files:
    """Return what changes when one of these files is written or replaced."""

    def one(path: str) -> tuple[int, int, int] | None:
        try:
            found = Path(path).stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    return tuple(one(path) for path in paths if path)


class _Renewed:
    """A context that stands in for one that was made of older files, from the next handshake on."""

    def __init__(self, make: Callable[[], ssl.SSLContext], paths: tuple[str | None, ...]) -> None:
        self._make, self._paths = make, paths
        self._stamp = stamp_of(paths)
        self.current = make()
        self.current.sni_callback = self._choose

    def _choose(self, handshake: Any, _name: str | None, _context: ssl.SSLContext) -> None:
        stamp = stamp_of(self._paths)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self.current = self._make()
            except BrokerError as problem:
                log.warning("TLS: %s; the old certificates stay in use", problem)
            else:
                log.info("TLS: certificates were renewed from %s", ", ".join(filter(None, self._paths)))
        if handshake.context is not self.current:
            handshake.context = self.current


def server_context(
    cert: str, key: str, ca: str | None, *, min_version: str, client_certificates: bool, offered: bool = False
) -> ssl.SSLContext:
    """Return a TLS context for servers, which takes up changed files by itself.

    Clients must show a certificate, or, if that is `offered`, may.
    """
    need = ssl.CERT_REQUIRED if client_certificates else ssl.CERT_OPTIONAL if offered and ca else ssl.CERT_NONE
    return _Renewed(lambda: _server_context(cert, key, ca, min_version, need), (cert, key, ca)).current


def _server_context(cert: str, key: str, ca: str | None, min_version: str, need: ssl.VerifyMode) -> ssl.SSLContext:
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
    if need is not ssl.CERT_NONE:
        context.verify_mode = need
        context.num_tickets = 0  # a ticket would outlive a certificate that is not trusted any more
        context.options |= ssl.OP_NO_TICKET
    return context


_OF_ENGINE = ("option ca of the engine", "option cert of the engine", "option key of the engine")
_VARIABLES = ("SRTM_CA", "SRTM_CERT", "SRTM_KEY")


def client_context(
    ca: str | None, cert: str | None, key: str | None, named: tuple[str, str, str] = _OF_ENGINE
) -> ssl.SSLContext:
    """Return a TLS context for clients, which verifies servers by a CA file, or by the CAs of the system."""
    for option, path in zip(named, (ca, cert, key), strict=True):
        if path and (why := not_readable(path)):
            raise InputError(f"{option}, {path}: {why}")
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert:
            context.load_cert_chain(cert, key, _no_password)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(filter(None, (ca, cert, key)))
        raise InputError(f"cannot use the certificates in {files}: {error}") from None
    return context


def context_of_environment() -> ssl.SSLContext:
    """Return the TLS context for programs that speak to a controller, from SRTM_CA, SRTM_CERT and SRTM_KEY."""
    ca, cert, key = (os.environ.get(name) or None for name in _VARIABLES)
    return client_context(ca, cert, key, _VARIABLES)


def names_in(certificate: Any) -> frozenset[str]:
    """Return whom a certificate, as `getpeercert` gives it, belongs to: its common name, or else its DNS names.

    Several certificates may be valid for one host, so if there is a common name, that alone tells them apart.
    """
    hosts = (certificate or {}).get("subjectAltName", ())
    return frozenset(_common_names(certificate) or (value for kind, value in hosts if kind == "DNS"))


def _common_names(certificate: Any) -> list[str]:
    subject = (certificate or {}).get("subject", ())
    return [value for part in subject for key, value in part if key == "commonName"]


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
        return next(iter(_common_names(self.ssl.getpeercert())), "")

    @property
    def names(self) -> frozenset[str]:
        """Whom the client's certificate belongs to, if it showed one."""
        return names_in(self.ssl.getpeercert())
