"""Tokens: made, found by their secret, and revoked.

In: names, roles and presented secrets. Out: the token that a secret belongs to. An id is never used again: a name that
is removed and created again is another token.
"""

from __future__ import annotations

import hmac
import re
import secrets
from typing import TYPE_CHECKING

from srtm.control.access.token import Role, Token, digest_of
from srtm.errors import InputError

if TYPE_CHECKING:
    from srtm.control.store import Store

MAX_TOKENS = 10_000
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_BROKER_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,63}\*?")  # a star at the end covers several brokers
_WRITTEN = re.compile(r"srtm_([0-9a-f]{16})_[A-Za-z0-9_\-]{43}")
_LONGEST_NS = 100 * 365 * 86_400 * 1_000_000_000


class Tokens:
    """All tokens, kept in the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_id = {token.id: token for token in store.tokens()}

    def __len__(self) -> int:
        return len(self._by_id)

    def all(self) -> list[Token]:
        """All tokens by name."""
        return sorted(self._by_id.values(), key=lambda token: token.name)

    def get(self, identity: str) -> Token | None:
        """The token with that id."""
        return self._by_id.get(identity)

    def create(
        self, name: str, role: Role, now_ns: int, lasts_ns: int | None = None, *, spare_admin: bool = False
    ) -> tuple[Token, str]:
        """Make a token; returns it with its secret, which nobody can read again.

        The first token must be an admin's, unless there is a spare one: afterwards, everything needs a credential.
        """
        pattern = _BROKER_NAME if role is Role.BROKER else _NAME
        if not pattern.fullmatch(name):
            star = ", and * at the end for a broker token of several brokers"
            raise InputError(f"invalid token name {name!r}; use up to 64 letters, digits, '_', '.' and '-'{star}")
        if any(token.name == name for token in self._by_id.values()):
            raise InputError(f"token {name!r} exists; remove it first (srtm token rm), or choose another name")
        if len(self._by_id) >= MAX_TOKENS:
            raise InputError(f"there are {MAX_TOKENS:,} tokens; remove some that nobody uses")
        if not self._store.lasting:
            raise InputError(
                "this controller keeps its store in memory, and would be open to everyone after a restart; start it"
                " with --data-path to use tokens"
            )
        if self._store.shared:
            raise InputError(
                "several controllers share this store, and those that do not lead could not check tokens; give all of"
                " them SRTM_TOKEN, or use the store of one controller (--data-path)"
            )
        if role is not Role.ADMIN and not spare_admin and not self._admins():
            raise InputError(
                f"the first token must have the role admin, not {role.value}; without one, nobody could make another"
            )
        if lasts_ns is not None and not 0 < lasts_ns <= _LONGEST_NS:
            raise InputError("a token must last for more than 0 s and less than 100 years")
        number = secrets.token_hex(8)
        secret = f"srtm_{number}_{secrets.token_urlsafe(32)}"
        expires_ns = None if lasts_ns is None else now_ns + lasts_ns
        token = Token(name, number, role, digest_of(secret), now_ns, expires_ns)
        self._store.save_token(token)
        self._by_id[number] = token
        return token, secret

    def remove(self, name: str, *, spare_admin: bool = False) -> Token:
        """Revoke a token; the last admin's goes last."""
        token = next((each for each in self._by_id.values() if each.name == name), None)
        if token is None:
            raise InputError(f"unknown token {name!r}; srtm token ls lists them", name=name)
        others = len(self._by_id) > 1
        if token.role is Role.ADMIN and len(self._admins()) == 1 and others and not spare_admin:
            raise InputError(f"token {name!r} is the last one of an admin; create another admin first")
        self._store.delete_token(token.name)
        del self._by_id[token.id]
        return token

    def find(self, secret: str, now_ns: int) -> Token | None:
        """The token that a secret belongs to; None if it is unknown, revoked or expired."""
        written = _WRITTEN.fullmatch(secret)
        token = self._by_id.get(written[1]) if written else None
        known = token.digest if token is not None else b"\0" * 32
        if not hmac.compare_digest(digest_of(secret), known) or token is None:
            return None
        return None if token.expired(now_ns) else token

    def _admins(self) -> list[Token]:
        return [token for token in self._by_id.values() if token.role is Role.ADMIN]
