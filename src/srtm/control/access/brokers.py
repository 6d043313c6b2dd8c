"""Admission of brokers: which may register, and which were refused, with what they said.

A controller that is open admits every broker. One that needs credentials admits a broker with a certificate of its own
name, a token of the role broker that covers its name, or the token that all brokers share (SRTM_BROKER_TOKEN).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    from srtm.control.access.access import Access
    from srtm.control.discovery.tcp import Applicant
    from srtm.control.options import ControllerOptions
    from srtm.protocol.lookup import PeerInfo

MAX_REFUSED: Final = 100  # brokers that are listed; the ones that tried longest ago make room
_LONGEST: Final = 256  # characters of what a stranger said


@dataclass(slots=True)
class RefusedBroker:
    """A broker that was not admitted, by its own account."""

    peer: PeerInfo
    address: str  # that it connected from
    reason: str
    since_ns: int
    last_ns: int
    attempts: int = 1

    def described(self) -> dict[str, Any]:
        """The refusal as JSON."""
        peer = self.peer
        return {
            "name": _short(peer.hostname),
            "from": self.address,
            "said": {
                "address": f"{_short(peer.broadcast_address)}:{peer.tcp_port}",
                "http_port": peer.http_port,
                "https_port": peer.https_port,
                "version": _short(peer.version),
            },
            "reason": self.reason,
            "since_ms": self.since_ns // NS_PER_MS,
            "last_ms": self.last_ns // NS_PER_MS,
            "attempts": self.attempts,
        }


class Admission:
    """Decides about brokers, and remembers the refused ones."""

    def __init__(self, options: ControllerOptions, access: Access) -> None:
        self._access = access
        self._by_tls = options.tls_root_ca_file is not None
        self._refused: OrderedDict[tuple[str, str], RefusedBroker] = OrderedDict()

    @property
    def refused(self) -> list[RefusedBroker]:
        """Brokers that were refused and have not been admitted since, the latest first."""
        return list(reversed(self._refused.values()))

    def admit(self, applicant: Applicant, now_ns: int) -> str | None:
        """Why a broker may not register; None if it may."""
        peer, address = applicant.peer, applicant.address
        key = peer.hostname[:_LONGEST], address.rpartition(":")[0]
        why = self._problem(applicant, now_ns)
        before = self._refused.pop(key, None)
        if why is not None:
            since_ns, attempts = (before.since_ns, before.attempts + 1) if before else (now_ns, 1)
            self._refused[key] = RefusedBroker(peer, address, why, since_ns, now_ns, attempts)
            while len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)
        return why

    def _problem(self, applicant: Applicant, now_ns: int) -> str | None:
        name = applicant.peer.hostname
        if self._by_tls and not applicant.peer.https_port:
            return "the controller speaks only HTTPS to brokers; start this one with --https-port and --tls-cert"
        if not self._access.closed or name in applicant.names:
            return None
        if applicant.token:
            return self._wrong(applicant.token, name, now_ns)
        if applicant.names:
            shown = ", ".join(sorted(applicant.names))
            return f"its certificate is of {_short(shown)}, not of {_short(name)!r}"
        return "it showed neither a broker token (SRTM_BROKER_TOKEN) nor a certificate"

    def _wrong(self, secret: str, name: str, now_ns: int) -> str | None:
        if self._access.is_shared(secret):
            return None
        token = self._access.tokens.find(secret, now_ns)
        if token is None:
            return "its token is wrong, expired or revoked"
        if token.covers(name):
            return None
        return f"token {token.name!r} (role {token.role.value}) is not of broker {_short(name)!r}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
