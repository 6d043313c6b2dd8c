"""The handshake with an engine: TLS and logins, without IO.

In: an address, and what the server says about itself. Out: what to send next, and when to begin TLS; InputError, with
the remedy, if address and server do not match. No secret is sent before TLS.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from srtm.errors import InputError, ProtocolError
from srtm.protocol import client as say
from srtm.protocol.names import MAGIC_V2

if TYPE_CHECKING:
    from srtm.protocol.engine import EngineAddress

BEGIN_TLS = b""


def nsqd(address: EngineAddress, identity: Mapping[str, Any]) -> Generator[bytes, bytes, None]:
    """Yield what to send to an nsqd after each answer; after BEGIN_TLS, the answer comes over TLS."""
    identify = say.identify({**identity, "feature_negotiation": True, "tls_v1": address.tls})
    settled = _settled((yield MAGIC_V2 + identify))
    if not address.tls:
        # An nsqd that requires TLS refuses NOP. Any other does not answer NOP, but the second IDENTIFY.
        yield say.nop() + identify
    elif settled.get("tls_v1"):
        yield BEGIN_TLS
    else:
        raise InputError("the server offers no TLS: start it with --tls-cert and --tls-key, or write nsqd://")
    if settled.get("auth_required"):
        if not address.user:
            raise InputError(
                f"the server requires AUTH: put its secret into the address, as in {address.scheme}://secret@host"
            )
        yield say.auth(address.user.encode())


def after(steps: Generator[bytes, bytes, None], answer: bytes) -> bytes | None:
    """Return what to send after an answer; None if the handshake is complete."""
    try:
        return steps.send(answer)
    except StopIteration:
        return None


def nsqd_refuses(problem: ProtocolError) -> Exception:
    """Return what an nsqd's error means during the handshake."""
    if "TLS required" in problem.text:
        return InputError("the server requires TLS: write nsqd+tls://")
    if problem.code in ("E_AUTH_FAILED", "E_UNAUTHORIZED"):
        return InputError(f"the server refuses the secret of the address ({problem})")
    return problem


def nats_tls(address: EngineAddress, info: Mapping[str, Any]) -> bool:
    """Whether TLS begins after a server's first INFO; InputError if the two do not match."""
    if not address.tls:
        if info.get("tls_required"):
            raise InputError("the server requires TLS: write nats+tls://")
        return False
    if address.handshake_first:  # this INFO came over TLS
        return False
    if not info.get("tls_required") and not info.get("tls_available"):
        raise InputError(
            "the server offers no TLS: give it certificates (tls {} in its configuration), or write nats://"
        )
    if info.get("tls_verify") and not address.cert:
        raise InputError("the server requires a client certificate: set options cert and key of the address")
    return True


def nats_silence(address: EngineAddress) -> str:
    """Return a likely reason why a server says nothing, not even INFO, to be appended to an error."""
    if not address.tls or address.handshake_first:
        return ""
    return "; if its tls {} has handshake_first, add handshake_first=true to the address, as in ?handshake_first=true"


def _settled(answer: bytes) -> dict[str, Any]:
    try:
        found: dict[str, Any] = msgspec.json.decode(answer, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ProtocolError("E_INVALID", f"cannot decode the answer to IDENTIFY: {answer[:80]!r}") from None
    return found
