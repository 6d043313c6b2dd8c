"""One sentence for each way a connection can fail: what is wrong, and the remedy if there is one."""

from __future__ import annotations

import os
import re
import ssl

_UNTRUSTED, _OTHER_NAME = (18, 19, 20, 21), (62, 64)  # OpenSSL's verify codes
_PLAIN_TEXT = ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE")  # by version of OpenSSL
_CLIENT_CERTIFICATE = re.compile(r"alert.*(certificate|unknown ca|access denied|handshake failure)", re.IGNORECASE)


def explained(error: BaseException) -> str:
    """Say what an error of a connection means to its user."""
    if isinstance(error, ssl.SSLCertVerificationError):
        remedy = "the server needs a new certificate"
        if error.verify_code in _UNTRUSTED:
            remedy = "name the CA file with option ca of the address, as in ?ca=ca.pem"
        elif error.verify_code in _OTHER_NAME:
            remedy = "use a host name that the certificate contains"
        return f"invalid server certificate: {error.verify_message.rstrip('.')}; {remedy}"
    if isinstance(error, ssl.SSLError) and _CLIENT_CERTIFICATE.search(str(error)):
        return f"the server rejects or requires a client certificate: set options cert and key of the address ({error})"
    if isinstance(error, ssl.SSLError) and getattr(error, "reason", None) in _PLAIN_TEXT:
        return "the server answers in plain text: leave out handshake_first, or give the server certificates"
    if isinstance(error, TimeoutError) and not error.errno:
        return str(error) or "no answer"
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.strerror:
        # asyncio replaces the system's text with an address that the caller names anyway; resolvers count below zero.
        return os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
    return str(error) or type(error).__name__
