"""Sessions of the page: a cookie that scripts cannot read stands for a token.

In: tokens that people log in with, and cookies. Out: the id of the token behind a cookie. A session ends when its
person logs out, after SESSION_NS, with its token, or with the controller, which keeps hashes of the cookies only.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from srtm.units import NS_PER_S

COOKIE: Final = "srtm_session"
SESSION_NS: Final = 12 * 3600 * NS_PER_S
MAX_SESSIONS: Final = 10_000  # the oldest make room


@dataclass(frozen=True, slots=True)
class Session:
    """One login."""

    token: str  # the id of its token
    ends_ns: int


class Sessions:
    """All logins, in memory."""

    def __init__(self) -> None:
        self._open: OrderedDict[bytes, Session] = OrderedDict()

    def begin(self, token: str, now_ns: int) -> str:
        """Log in; returns the value of the cookie."""
        value = secrets.token_urlsafe(32)
        self._open[_digest(value)] = Session(token, now_ns + SESSION_NS)
        while len(self._open) > MAX_SESSIONS:
            self._open.popitem(last=False)
        return value

    def find(self, value: str, now_ns: int) -> str | None:
        """The id of the token that logged in; None if the session is over."""
        session = self._open.get(_digest(value))
        if session is None or now_ns >= session.ends_ns:
            return None
        return session.token

    def end(self, value: str) -> None:
        """Log out."""
        self._open.pop(_digest(value), None)


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode(errors="surrogateescape")).digest()


def cookie(value: str, *, secure: bool) -> str:
    """The Set-Cookie header of a login, or of a logout if the value is empty."""
    lasts = SESSION_NS // NS_PER_S if value else 0
    return f"{COOKIE}={value}; Path=/; Max-Age={lasts}; HttpOnly; SameSite=Strict" + ("; Secure" if secure else "")
