"""The line to brokers: exchanges over HTTP, or HTTPS if the controller has a CA file, with limits on time and size.

A controller with a CA file speaks to brokers by HTTPS alone, verifies each by the host that it broadcasts, and presents
its own certificate. Files that were changed on disk are taken up within a second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import httpx

from srtm.errors import InputError
from srtm.net.tls import client_context, stamp_of
from srtm.protocol import exchange

if TYPE_CHECKING:
    import ssl

    from srtm.control.members import Member
    from srtm.control.options import ControllerOptions

log = logging.getLogger(__name__)

_ANSWER_S = 2.0
_CONNECT_S = 1.0
_LOOK_S = 1.0  # between looks at the certificates
_FLAGS = ("--tls-root-ca-file", "--tls-cert", "--tls-key")


class Line:
    """Carries exchanges to brokers, and their answers back."""

    def __init__(self, options: ControllerOptions) -> None:
        self._token = options.control_token
        self._files = (options.tls_root_ca_file, options.tls_cert, options.tls_key)
        self._stamp, self._looked_s = stamp_of(self._files), time.monotonic()
        self._client = self._connect()
        self._former: list[httpx.AsyncClient] = []

    @property
    def secure(self) -> bool:
        """Whether it speaks HTTPS alone."""
        return self._files[0] is not None

    def reaches(self, member: Member) -> bool:
        """Whether a broker may be spoken to now: one that has not named its HTTPS port yet will register again soon."""
        return bool(member.https_port) or not self.secure

    async def post(self, member: Member, body: bytes) -> tuple[int, bytes]:
        """Send an exchange, and return status and body of the answer."""
        self._renew()
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        found = bytearray()
        async with (
            asyncio.timeout(_ANSWER_S),
            self._client.stream("POST", f"{member.url}/srtm/exchange", content=body, headers=headers) as answer,
        ):
            async for part in answer.aiter_bytes():
                found += part
                if len(found) > exchange.MAX_BODY:
                    raise ValueError(f"answer exceeds {exchange.MAX_BODY:,} bytes")
        return answer.status_code, bytes(found)

    async def close(self) -> None:
        """Close all connections."""
        for client in (self._client, *self._former):
            await client.aclose()

    def _connect(self) -> httpx.AsyncClient:
        tls: ssl.SSLContext | bool = client_context(*self._files, _FLAGS) if self.secure else False
        return httpx.AsyncClient(
            timeout=httpx.Timeout(_ANSWER_S, connect=_CONNECT_S), trust_env=False, verify=tls, follow_redirects=False
        )

    def _renew(self) -> None:
        """Begin anew with files that have changed; exchanges under way end on the old connections."""
        now_s = time.monotonic()
        if not self.secure or now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        if (stamp := stamp_of(self._files)) != self._stamp:
            self._stamp = stamp
            try:
                self._client, former = self._connect(), self._client
            except InputError as problem:  # half written, perhaps: the next change is looked at again
                log.warning("CONTROLLER: %s; the old certificates stay in use", problem)
            else:
                self._former.append(former)
