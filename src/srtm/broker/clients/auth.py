"""AUTH: who may publish and subscribe, as NSQ's authorities say (`--auth-http-address`).

In: the commands of a client, in order. Out: those that may be carried out now. While an authority is being asked the
others wait, in order, and the client is not read; the loop goes on. An answer holds for its TTL, and is asked for again
by the first command after that.

    GET /auth?common_name=…&remote_ip=…&secret=…&tls=true|false
    {"ttl": s, "identity": …, "identity_url": …,
     "authorizations": [{"topic": regexp, "channels": [regexp, …], "permissions": ["publish", "subscribe"]}, …]}
"""

from __future__ import annotations

import logging
import ssl
import time
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlencode

import httpx
import re2

from srtm.broker.permissions import GUARDED
from srtm.errors import ProtocolError
from srtm.protocol import frames, gojson
from srtm.protocol.commands import Auth, Sub, auth_first, unauthorized

if TYPE_CHECKING:
    import asyncio

    from srtm.broker.clients.connection import Connection

log = logging.getLogger(__name__)

_PERMISSIONS = frozenset({"publish", "subscribe"})
_FIELDS: gojson.Fields = {"ttl": 0, "identity": "", "identity_url": "", "authorizations": None}
_ACCEPT = {"Accept": "application/vnd.nsq; version=1.0"}
_TIMES = httpx.Timeout(5.0, connect=2.0)  # nsqd's
_ALL = httpx.Limits(max_connections=None, max_keepalive_connections=20)  # who come at once are asked for at once


class Refused(Exception):
    """An authority cannot be asked, or does not answer as it should."""


@dataclass(frozen=True, slots=True)
class Authorization:
    """What is allowed on topics and channels whose names match."""

    topic: Any  # of RE2, as in nsqd: no expression takes longer than its length and the name's
    channels: tuple[Any, ...]
    permissions: frozenset[str]

    def allows(self, topic: str, channel: str) -> bool:
        """Whether to subscribe to the channel or, without one, to publish."""
        if ("subscribe" if channel else "publish") not in self.permissions or not self.topic.search(topic):
            return False
        return any(pattern.search(channel) for pattern in self.channels)


@dataclass(frozen=True, slots=True)
class Permit:
    """An authority's answer."""

    identity: str
    identity_url: str
    authorizations: tuple[Authorization, ...]
    expires_s: float

    @classmethod
    def read(cls, body: bytes, now_s: float) -> Permit:
        """From JSON, by nsqd's rules."""
        try:
            fields = gojson.read(body, _FIELDS)
            found = tuple(_authorization(each) for each in fields["authorizations"] or ())
        except (ValueError, TypeError, AttributeError, re2.error) as problem:
            raise Refused(f"its answer cannot be read: {problem}") from None
        if fields["ttl"] <= 0:
            raise Refused(f"invalid TTL {fields['ttl']} (must be >0)")
        return cls(fields["identity"], fields["identity_url"], found, now_s + fields["ttl"])

    def allows(self, topic: str, channel: str) -> bool:
        """Whether any authorization does."""
        return any(each.allows(topic, channel) for each in self.authorizations)


def _authorization(found: Any) -> Authorization:
    permissions = frozenset(found.get("permissions") or ())
    if unknown := permissions - _PERMISSIONS:
        raise ValueError(f"unknown permission {', '.join(sorted(unknown))}")
    quiet = re2.Options()
    quiet.log_errors = False
    channels = tuple(re2.compile(pattern, quiet) for pattern in found.get("channels") or ())
    return Authorization(re2.compile(found.get("topic") or "", quiet), channels, permissions)


class Authority:
    """The authorities of a broker: the first that answers, from a random one on."""

    def __init__(self, addresses: tuple[str, ...], loop: asyncio.AbstractEventLoop, ca_file: str | None = None) -> None:
        self.loop = loop
        self._endpoints = [each if "://" in each else f"http://{each}/auth" for each in addresses]
        self._random = Random()
        self._ca_file = ca_file
        self._client: httpx.AsyncClient | None = None

    async def ask(self, secret: bytes, remote_ip: str, common_name: str, *, tls: bool) -> Permit:
        """What whoever has this secret may do."""
        if self._client is None:
            trusted = ssl.create_default_context(cafile=self._ca_file)
            self._client = httpx.AsyncClient(
                timeout=_TIMES, limits=_ALL, headers=_ACCEPT, verify=trusted, trust_env=False
            )
        about: dict[str, str | bytes] = {
            "common_name": common_name,
            "remote_ip": remote_ip,
            "secret": secret,
            "tls": "true" if tls else "false",
        }
        problems = []
        start = self._random.randrange(len(self._endpoints))
        for endpoint in self._endpoints[start:] + self._endpoints[:start]:
            try:
                answer = await self._client.get(f"{endpoint}?{urlencode(about)}")
                if answer.status_code != httpx.codes.OK:
                    raise Refused(f"got response {answer.status_code}")
                return Permit.read(answer.content, time.monotonic())
            except (httpx.HTTPError, httpx.InvalidURL, Refused) as problem:
                problems.append(f"failed to auth against {endpoint} - {str(problem) or type(problem).__name__}")
        raise Refused("; ".join(problems))

    async def close(self) -> None:
        """Ask no more."""
        if self._client is not None:
            await self._client.aclose()


class Guarded(Protocol):
    """A client that may do only what an authority allows."""

    connection: Connection

    def carry_out(self, events: list[Any], arrival_ns: int) -> None:
        """Carry out commands, in order."""


class Guard:
    """Stands between one client's commands and the broker."""

    __slots__ = ("_asking", "_authority", "_client", "_permit", "_secret")

    def __init__(self, client: Guarded, authority: Authority) -> None:
        self._client = client
        self._authority = authority
        self._permit: Permit | None = None
        self._secret = b""
        self._asking: asyncio.Task[None] | None = None

    @property
    def permit(self) -> Permit | None:
        """What the client may do, as far as is known."""
        return self._permit

    @property
    def identity(self) -> frozenset[str]:
        """The identity that an authority vouches for, if any."""
        return frozenset({self._permit.identity} - {""} if self._permit is not None else ())

    @property
    def asking(self) -> bool:
        """Whether commands wait for the authority's answer."""
        return self._asking is not None

    def admit(self, events: list[Any], arrival_ns: int) -> list[Any]:
        """What may be carried out now. If an authority has to be asked, the rest follows when it has answered."""
        for number, event in enumerate(events):
            kind = type(event)
            if kind is Auth:
                if self._known:
                    return [*events[:number], ProtocolError("E_INVALID", "AUTH already set")]
                self._secret = event.secret
            elif verb := GUARDED.get(kind):
                if not self._known:
                    return [*events[:number], auth_first(verb)]
                permit = self._permit
                assert permit is not None
                if permit.expires_s > time.monotonic():
                    channel = event.channel if kind is Sub else ""
                    if permit.allows(event.topic, channel):
                        continue
                    return [*events[:number], unauthorized(verb, event.topic, channel)]
            else:
                continue
            self._client.connection.hold()
            self._asking = self._authority.loop.create_task(self._ask(events[number:], arrival_ns))
            return events[:number]
        return events

    @property
    def _known(self) -> bool:
        return self._permit is not None and bool(self._permit.authorizations)

    async def _ask(self, events: list[Any], arrival_ns: int) -> None:
        connection = self._client.connection
        tls = connection.transport.tls if connection.transport else None
        remote_ip = connection.address.rpartition(":")[0]
        name = tls.common_name if tls else ""
        try:
            self._permit = await self._authority.ask(self._secret, remote_ip, name, tls=tls is not None)
        except Exception as problem:  # whatever it is, the client must not wait for ever; and is not told why
            log.warning("AUTH(%s): %s", connection.address, problem, exc_info=not isinstance(problem, Refused))
            events = [ProtocolError("E_AUTH_FAILED", "AUTH failed")]
        else:
            if type(events[0]) is Auth:
                events = self._answered(self._permit, events)
        self._asking = None
        if not connection.closed:
            self._client.carry_out(self.admit(events, arrival_ns), arrival_ns)
            connection.keeper.turn.wake()
            connection.release()

    def _answered(self, permit: Permit, events: list[Any]) -> list[Any]:
        if not permit.authorizations:
            return [ProtocolError("E_UNAUTHORIZED", "AUTH no authorizations found")]
        about = {
            "identity": permit.identity,
            "identity_url": permit.identity_url,
            "permission_count": len(permit.authorizations),
        }
        self._client.connection.send(frames.response(gojson.write(about)))
        return events[1:]

    def close(self) -> None:
        """The client is gone."""
        if self._asking:
            self._asking.cancel()
