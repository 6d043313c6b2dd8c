"""Who makes a request, and whether they may: tokens, the option's token, sessions, and requests without any of these.

| the controller has | a request without a credential may do |
|---|---|
| no tokens, no --token-file, no --auth-required | everything |
| --token-file (or SRTM_TOKEN) alone | what a viewer may |
| at least one token, or --auth-required | nothing but `/ping` and logging in |
"""

from __future__ import annotations

import base64
import binascii
import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from srtm.control.access.sessions import Sessions
from srtm.control.access.token import Role, digest_of
from srtm.control.access.tokens import Tokens

if TYPE_CHECKING:
    from srtm.control.access.rules import Who
    from srtm.control.options import ControllerOptions
    from srtm.control.store import Store

SHARED: Final = "(SRTM_BROKER_TOKEN)"  # the name of the token that all brokers may show
GIVEN: Final = "(SRTM_TOKEN)"  # the name of the token that the controller was started with; no other can have it


@dataclass(frozen=True, slots=True)
class Identity:
    """The maker of a request. Without a credential, it has no name."""

    role: Role | None
    name: str | None = None
    id: str = ""  # of its token
    by_cookie: bool = False

    def may(self, who: Who) -> bool:
        """Whether a rule allows it."""
        return who is None or self.role in who

    def at(self, host: str) -> str:
        """The identity as the audit log has it."""
        if self.name is None:
            return host
        return f"{self.name}#{self.id}@{host}" if self.id else f"{self.name}@{host}"


class Access:
    """Decides who somebody is."""

    def __init__(self, options: ControllerOptions, store: Store) -> None:
        self.tokens = Tokens(store)
        self.sessions = Sessions()
        self._store = store
        self._given = digest_of(options.token) if options.token else None
        self._shared = digest_of(options.broker_token) if options.broker_token else None
        self._required = options.auth_required

    @property
    def closed(self) -> bool:
        """Whether everything needs a credential."""
        return self._required or len(self.tokens) > 0 or self._store.closed

    @property
    def has_spare_admin(self) -> bool:
        """Whether the controller was started with a token, which is an admin's."""
        return self._given is not None

    @property
    def anonymous(self) -> Identity:
        """The identity of a request without a credential."""
        if self.closed:
            return Identity(None)
        return Identity(Role.ADMIN if self._given is None else Role.VIEWER)

    def known(self, secret: str, now_ns: int) -> Identity | None:
        """The identity that a secret proves; None if it proves none."""
        if self._given is not None and hmac.compare_digest(digest_of(secret), self._given):
            return Identity(Role.ADMIN, GIVEN)
        if self.is_shared(secret):
            return Identity(Role.BROKER, SHARED)
        token = self.tokens.find(secret, now_ns)
        return Identity(token.role, token.name, token.id) if token is not None else None

    def is_shared(self, secret: str) -> bool:
        """Whether a secret is the token that all brokers may show."""
        return self._shared is not None and hmac.compare_digest(digest_of(secret), self._shared)

    def identify(
        self, authorization: str, session: str, now_ns: int, certified: frozenset[str] = frozenset()
    ) -> Identity:
        """The identity of a request, by its Authorization header, or else its cookie, or else its certificate.

        A certificate is a broker's: people and programs have tokens.
        """
        if authorization:
            found = self.known(secret_in(authorization), now_ns)
        else:
            found = self._logged_in(session, now_ns) if session else None
        if found is None and certified and self.closed:
            return Identity(Role.BROKER, f"certificate {min(certified)}")
        return found or self.anonymous

    def log_in(self, secret: str, now_ns: int) -> tuple[Identity, str] | None:
        """Begin a session; returns the value of its cookie, or None if the secret is wrong or a broker's."""
        found = self.known(secret, now_ns)
        if found is None or found.role is Role.BROKER:
            return None
        return found, self.sessions.begin(found.id, now_ns)

    def _logged_in(self, session: str, now_ns: int) -> Identity | None:
        number = self.sessions.find(session, now_ns)
        if number is None:
            return None
        if not number:  # the token of the option
            return Identity(Role.ADMIN, GIVEN, by_cookie=True) if self._given is not None else None
        token = self.tokens.get(number)
        if token is None or token.expired(now_ns):
            return None
        return Identity(token.role, token.name, token.id, by_cookie=True)


def secret_in(authorization: str) -> str:
    """The secret in an Authorization header: a bearer token, or the password of Basic, whatever the user's name is.

    NSQ's own clients take a URL with a password (http://any:TOKEN@host:4161), and no bearer token.
    """
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return ""
