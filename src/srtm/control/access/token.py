"""A token: a named credential with a role, as the store keeps it.

A token is written `srtm_ID_SECRET`: the id finds the token, and the store keeps only the SHA-256 of the whole. A secret
has 256 random bits, so nobody can guess it and a fast hash is enough.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from srtm.units import NS_PER_MS


class Role(StrEnum):
    """What a token is for. Each of the first three may do everything that those before it may."""

    VIEWER = "viewer"  # reads
    OPERATOR = "operator"  # changes topics, publishers and placements
    ADMIN = "admin"  # manages tokens and removes brokers
    BROKER = "broker"  # registers as a broker, and does nothing else


@dataclass(frozen=True, slots=True)
class Token:
    """A token as the store keeps it: without its secret."""

    name: str
    id: str
    role: Role
    digest: bytes
    created_ns: int
    expires_ns: int | None

    def expired(self, now_ns: int) -> bool:
        """Whether its time is over."""
        return self.expires_ns is not None and now_ns >= self.expires_ns

    def covers(self, broker: str) -> bool:
        """Whether a broker of that name may register with it."""
        return self.role is Role.BROKER and fnmatchcase(broker, self.name)

    def described(self, now_ns: int) -> dict[str, object]:
        """The token as the API shows it."""
        return {
            "name": self.name,
            "id": self.id,
            "role": self.role.value,
            "created_ms": self.created_ns // NS_PER_MS,
            "expires_ms": None if self.expires_ns is None else self.expires_ns // NS_PER_MS,
            "expired": self.expired(now_ns),
        }


def digest_of(secret: str) -> bytes:
    """The hash of a secret that the store keeps."""
    return hashlib.sha256(secret.encode(errors="surrogateescape")).digest()
