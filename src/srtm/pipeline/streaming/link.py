"""A connection to NATS, as a request and its replies: blocking, for executors.

In: the address of servers. Out: JetStream's replies and a consumer's messages. A broken connection is `Away`; an error
that only the user can mend is InputError.
"""

from __future__ import annotations

import random
import secrets
import socket
import ssl
from collections import deque
from typing import TYPE_CHECKING, Any, Self

import msgspec

from srtm.errors import InputError, ProtocolError
from srtm.net.credentials import Credentials
from srtm.net.explain import explained
from srtm.pipeline.streaming.logs import Away, Refused
from srtm.protocol import greeting, nats
from srtm.protocol.nats import Err, Event, Info, Msg, NatsProtocol, Ping, Pong

if TYPE_CHECKING:
    from srtm.protocol.engine import EngineAddress

_REPLY_S = 3.0  # JetStream leaves requests unanswered while it elects a leader
_READ = 1024 * 1024
_TEMPORARY = 500  # errors from this code on may pass
_OURS = ("Authorization", "Permissions", "User Authentication")  # errors that waiting does not mend
_ENGINE = "describe how to reach it in option engine, for example nats+tls://host:4222?ca=ca.pem (docs/engines.md)"
_LOGIN = "give valid credentials in option engine, for example nats://user:password@host:4222 (docs/engines.md)"


class Link:
    """A connection to one server of several; raises `Away` if it breaks."""

    def __init__(self, address: EngineAddress) -> None:
        self._address = address
        self._host, self._sock = self._connect()
        self._protocol, self._events = NatsProtocol(), deque[Event]()
        self._inbox = f"_INBOX.{secrets.token_hex(8)}"
        self._asked = 0
        try:
            self._greet()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def send(self, subject: str, /, **wanted: Any) -> None:
        """Send a request; `next` returns its replies, and ignores those to earlier requests."""
        self._asked += 1
        self._write(nats.publish(subject.encode(), self._reply, msgspec.json.encode(wanted)))

    @property
    def _reply(self) -> bytes:
        return f"{self._inbox}.{self._asked}".encode()

    def ask(self, subject: str, /, **wanted: Any) -> dict[str, Any]:
        """JetStream's reply; Refused, with an HTTP status, for an error that retrying does not mend."""
        self.send(subject, **wanted)
        while (answer := self.next()).subject != self._reply:
            pass  # from a consumer that was given up
        if answer.status:
            raise Away(f"{self._address} replies {answer.status}: it has no leader, or JetStream is disabled")
        found = nats.fields(answer.body)
        if error := found.get("error"):
            code, text = int(error.get("code", _TEMPORARY)), str(error.get("description", "unknown error"))
            if code >= _TEMPORARY:
                raise Away(f"{self._address} replies {code}: {text}")
            raise Refused(code, text)
        return found

    def next(self) -> Msg:
        """The next message of a consumer, or the reply to the last request."""
        while True:
            event = self._event()
            if isinstance(event, Msg) and (event.reply.startswith(nats.ACK_PREFIX) or event.subject == self._reply):
                return event

    def _connect(self) -> tuple[str, socket.socket]:
        problem: OSError | None = None
        for server in random.sample(self._address.servers, len(self._address.servers)):
            try:
                return server[0], socket.create_connection(server, _REPLY_S)
            except OSError as error:
                problem = error
        raise Away(f"{self._address} does not respond ({problem})")

    def _greet(self) -> None:
        credentials = Credentials.read(self._address)
        if self._address.handshake_first:
            self._secure(credentials)
        while not isinstance(event := self._event(), Info):
            pass
        try:
            begins = greeting.nats_tls(self._address, event.fields)
        except InputError as problem:
            raise InputError(f"{self._address}: {problem}; {_ENGINE}") from None
        if begins:
            self._secure(credentials)
        login = credentials.login(str(event.fields.get("nonce", "")))
        told = nats.connect(verbose=False, headers=True, no_responders=True, name="srtm spark", lang="python", **login)
        self._write(told + nats.subscribe(f"{self._inbox}.*".encode(), 1) + nats.PING)
        while not isinstance(self._event(), Pong):
            pass

    def _secure(self, credentials: Credentials) -> None:
        """Continue over TLS, discarding anything received in the clear."""
        assert credentials.tls is not None
        self._protocol, self._events = NatsProtocol(), deque[Event]()
        try:
            self._sock = credentials.tls.wrap_socket(self._sock, server_hostname=self._host)
        except ssl.SSLCertVerificationError as error:
            raise InputError(f"{self._address}: {explained(error)}; {_ENGINE}") from None
        except OSError as error:
            raise Away(f"{self._address} does not respond ({explained(error)})") from None

    def _event(self) -> Event:
        try:
            while not self._events:
                data = self._sock.recv(_READ)
                if not data:
                    raise Away(f"{self._address} closed the connection")
                self._events += self._protocol.feed(data)
        except (OSError, ProtocolError) as error:
            raise Away(f"{self._address} does not respond ({explained(error)})") from None
        event = self._events.popleft()
        if isinstance(event, Ping):
            self._write(nats.PONG)
        elif isinstance(event, Err):
            if event.text.startswith(_OURS):
                raise InputError(f"{self._address} refuses the connection: {event.text}; {_LOGIN}")
            raise Away(f"{self._address} reports {event.text}")
        return event

    def _write(self, data: bytes) -> None:
        try:
            self._sock.sendall(data)
        except OSError as error:
            raise Away(f"{self._address} does not respond ({error})") from None
