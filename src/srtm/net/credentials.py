"""Credentials of an engine's client: the files that its address names.

In: an EngineAddress. Out: a TLS context, and the login for NATS' CONNECT; InputError names an unusable file. Programs
read the files for every connection, so operators can renew them at any time.

A NATS credentials file holds a JWT, which the server sees, and a seed, which it does not: the seed signs a nonce that
the server makes up for each connection.
"""

from __future__ import annotations

import base64
import binascii
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srtm.errors import InputError
from srtm.net.tls import client_context

if TYPE_CHECKING:
    from srtm.protocol.engine import EngineAddress

_PART = re.compile(r"-+BEGIN (NATS USER JWT|USER NKEY SEED)-+\s+(\S+)\s+-+END")
_SEED_SIZE, _SEED = 36, 18 << 3  # [prefix 2][seed 32][CRC 2, little-endian] in base32


@dataclass(frozen=True, slots=True)
class Credentials:
    """The TLS context and login of a connection to an engine."""

    tls: ssl.SSLContext | None
    _login: dict[str, str] = field(repr=False)
    _key: Any = field(default=None, repr=False)

    @classmethod
    def read(cls, address: EngineAddress) -> Credentials:
        """Read the files that an address names, if any."""
        tls = client_context(address.ca, address.cert, address.key) if address.tls else None
        if address.creds is None:
            return cls(tls, address.login)
        jwt, key = _user(address.creds)
        return cls(tls, {"jwt": jwt}, key)

    def login(self, nonce: str) -> dict[str, str]:
        """Return the login fields of NATS' CONNECT for a server's nonce."""
        if self._key is None:
            return self._login
        signed = base64.urlsafe_b64encode(self._key.sign(nonce.encode())).rstrip(b"=")
        return {**self._login, "sig": signed.decode()}


def _user(path: str) -> tuple[str, Any]:
    """Return the JWT and the key in a credentials file."""
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError:
        raise InputError("option creds of the engine needs cryptography: pip install 'srtm[creds]'") from None
    try:
        parts = dict(_PART.findall(Path(path).read_text()))
        seed = parts["USER NKEY SEED"]
        raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
        jwt = parts["NATS USER JWT"]
    except OSError as error:
        raise InputError(f"option creds of the engine, {path}: {error.strerror}") from None
    except (KeyError, ValueError):
        raise InputError(
            f"option creds of the engine, {path}: not a NATS credentials file, as `nsc generate creds` writes it"
        ) from None
    if (
        len(raw) != _SEED_SIZE
        or raw[0] & 0xF8 != _SEED
        or binascii.crc_hqx(raw[:-2], 0).to_bytes(2, "little") != raw[-2:]
    ):
        raise InputError(f"option creds of the engine, {path}: the seed is damaged")
    return jwt, Ed25519PrivateKey.from_private_bytes(raw[2:-2])
