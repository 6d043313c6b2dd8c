"""What is agreed with an engine before it is used: TLS and logins, without IO.

In: what an address asks for, and what a server says of itself. Out: what to say next, when to begin TLS; InputError
where address and server do not agree, which says how to write the address. Nothing that is secret is said before TLS.
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
    """What to say to an nsqd, each time after the answer to what was said before; BEGIN_TLS is answered through TLS."""
    identify = say.identify({**identity, "feature_negotiation": True, "tls_v1": address.tls})
    settled = _settled((yield MAGIC_V2 + identify))
    if not address.tls:
        # One that requires TLS says so at the first command that is no IDENTIFY; NOP has no answer, the other has one.
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
    """What to say after an answer; None where all is agreed."""
    try:
        return steps.send(answer)
    except StopIteration:
        return None


def nsqd_refuses(problem: ProtocolError) -> Exception:
    """What an nsqd's error means while this is agreed."""
    if "TLS required" in problem.text:
        return InputError("the server requires TLS: write nsqd+tls://")
    if problem.code in ("E_AUTH_FAILED", "E_UNAUTHORIZED"):
        return InputError(f"the server refuses the secret of the address ({problem})")
    return problem


def nats_tls(address: EngineAddress, info: Mapping[str, Any]) -> bool:
    """Whether TLS is to begin after a server's first INFO."""
    if not address.tls:
        if info.get("tls_required"):
            raise InputError("the server requires TLS: write nats+tls://")
        return False
    if not info.get("tls_required") and not info.get("tls_available"):
        raise InputError(
            "the server offers no TLS: give it certificates (tls {} in its configuration), or write nats://"
        )
    if info.get("tls_verify") and not address.cert:
        raise InputError("the server requires a client certificate: add the options cert and key to the address")
    return True


def _settled(answer: bytes) -> dict[str, Any]:
    try:
        found: dict[str, Any] = msgspec.json.decode(answer, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ProtocolError("E_INVALID", f"cannot decode the answer to IDENTIFY: {answer[:80]!r}") from None
    return found
