"""One connection to a NATS server.

In: an address with several servers, requests, bytes. Out: answers; messages, passed to a listener as they are read.
Opening negotiates TLS and the login. A server that stays silent for two and a half ping intervals counts as lost.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import ssl
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from srtm.errors import ClientError, InputError, ProtocolError
from srtm.net.credentials import Credentials
from srtm.net.explain import explained
from srtm.net.sockets import open_streams
from srtm.protocol import greeting, nats
from srtm.protocol.engine import written
from srtm.protocol.nats import Err, Event, Info, Msg, NatsProtocol, Ping, Pong

if TYPE_CHECKING:
    from srtm.protocol.engine import EngineAddress

_READ = 256 * 1024
_OPEN_S = 5.0
_ANSWER_S = 3.0  # JetStream leaves requests unanswered while it elects a leader
_SIGN_S = 5.0
_SILENCE = 2.5  # ping intervals
_PASSING = 500  # errors from this HTTP code on may pass
_OURS = ("Authorization", "Permissions", "User Authentication")  # errors that waiting does not cure


class Refused(Exception):
    """JetStream refused a request for good; `code` is an HTTP status, `reason` JetStream's own number."""

    def __init__(self, code: int, text: str, reason: int = 0) -> None:
        super().__init__(text)
        self.code = code
        self.reason = reason


class Listener(Protocol):
    """Receives what a server sends."""

    def came(self, message: Msg) -> None:
        """A message or status arrived that is not the answer to a request."""

    def ended(self, problem: ClientError) -> None:
        """The connection ended."""


class NatsConnection:
    """A connection, ready for use."""

    def __init__(self, address: EngineAddress, listener: Listener) -> None:
        self._address = address
        self.listener = listener
        self.place = ""  # host:port of the server
        self.inbox = f"_INBOX.{secrets.token_hex(8)}"
        self.closed = False
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        self._protocol, self._events = NatsProtocol(), deque[Event]()
        self._said: list[bytes] = []
        self._asked = 0
        self._answers: dict[bytes, asyncio.Future[Msg]] = {}
        self._pongs: deque[asyncio.Future[None]] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._heard = True

    @classmethod
    async def open(cls, address: EngineAddress, listener: Listener, patience_s: float = _OPEN_S) -> NatsConnection:
        """Connect to any of the servers; ClientError if none answers, InputError if one refuses us."""
        problem: Exception | None = None
        for server in random.sample(address.servers, len(address.servers)):
            connection = cls(address, listener)
            try:
                async with asyncio.timeout(patience_s):
                    await connection._open(*server)
            except (OSError, TimeoutError, EOFError, ProtocolError) as error:
                connection.close()
                problem = error
            except BaseException:
                connection.close()
                raise
            else:
                return connection
        assert problem is not None
        hint = greeting.nats_silence(address) if isinstance(problem, TimeoutError | EOFError) else ""
        raise ClientError(f"{address} does not answer ({explained(problem)}){hint}")

    async def _open(self, host: str, port: int) -> None:
        self.place = written(host, port)
        self._reader, self._writer = await open_streams(host, port)
        credentials = Credentials.read(self._address)
        try:
            if self._address.handshake_first:
                assert credentials.tls is not None
                await self._writer.start_tls(credentials.tls, server_hostname=host)
            while not isinstance(event := await self._event(), Info):
                pass
            if greeting.nats_tls(self._address, event.fields):
                assert credentials.tls is not None
                self._protocol, self._events = NatsProtocol(), deque()  # ignore what else came in the clear
                await self._writer.start_tls(credentials.tls, server_hostname=host)
                if self._reader._buffer:  # type: ignore[attr-defined]
                    # A server is silent until CONNECT, so these bytes were sent in the clear, during the handshake.
                    raise EOFError(f"{self.place} sent plain text during the TLS handshake")
        except (InputError, ssl.SSLError) as problem:
            raise InputError(f"{self._address}: {explained(problem)}; {_tls(self._address.variable)}") from None
        login = credentials.login(str(event.fields.get("nonce", "")))
        told = nats.connect(verbose=False, headers=True, no_responders=True, name="srtm", lang="python", **login)
        self.say(told + nats.subscribe(f"{self.inbox}.*".encode(), 1) + nats.PING)
        while not isinstance(await self._event(), Pong):
            pass
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._listen())]

    def close(self) -> None:
        """Close the connection; the listener hears nothing more."""
        self._write()
        self.closed = True
        for task in self._tasks:
            task.cancel()
        if self._writer is not None:
            self._writer.transport.abort()  # everything said was flushed; closing TLS would wait for the server
        self._give_up(ClientError(f"the connection to {self._address} was closed"))

    def say(self, data: bytes) -> None:
        """Write this at the end of the loop's turn, together with everything else said in it."""
        if not self._said:
            asyncio.get_running_loop().call_soon(self._write)
        self._said.append(data)

    def _write(self) -> None:
        data = b"".join(self._said)
        self._said.clear()
        if data and self._writer is not None and not self._writer.is_closing():
            self._writer.write(data)

    async def ask(self, subject: str, /, **wanted: Any) -> dict[str, Any]:
        """Return JetStream's answer; Refused if it refuses for good, ClientError if it does not answer."""
        if self.closed:
            raise ClientError(f"{self._address} closed the connection")
        reply, answer = self._expect()
        self.say(nats.publish(subject.encode(), reply, msgspec.json.encode(wanted) if wanted else b""))
        try:
            async with asyncio.timeout(_ANSWER_S):
                found = await answer
        except TimeoutError:
            raise ClientError(f"{self._address} did not answer within {_ANSWER_S:g} s ({subject})") from None
        finally:
            self._answers.pop(reply, None)
        return self.read(found)

    def publish(self, subject: bytes, body: bytes, lines: bytes) -> asyncio.Future[Msg]:
        """Publish a message with these header lines; the future has JetStream's answer, for `read`.

        If the connection ends before, the future has that error.
        """
        reply, answer = self._expect()
        answer.add_done_callback(lambda _: self._answers.pop(reply, None))
        if self.closed:
            answer.set_exception(ClientError(f"{self._address} closed the connection"))
            answer.exception()  # nobody need be waiting
        else:
            self.say(nats.tell_with(subject, reply, body, lines))
        return answer

    def _expect(self) -> tuple[bytes, asyncio.Future[Msg]]:
        """Return a reply subject, and the answer that will come there."""
        self._asked += 1
        reply = f"{self.inbox}.{self._asked}".encode()
        answer = self._answers[reply] = asyncio.get_running_loop().create_future()
        return reply, answer

    def read(self, found: Msg) -> dict[str, Any]:
        """Return the fields of JetStream's answer; Refused if it refuses for good, ClientError if a retry may help."""
        if found.status:
            raise ClientError(f"{self._address} answers {found.status}: no leader, or JetStream is off")
        document = nats.fields(found.body)
        if error := document.get("error"):
            code, text = int(error.get("code", _PASSING)), str(error.get("description", "unknown error"))
            reason = int(error.get("err_code", 0))
            if code >= _PASSING:
                raise ClientError(f"{self._address} answers {code}: {text}", reason=reason)
            raise Refused(code, text, reason)
        return document

    async def flush(self) -> None:
        """Wait until the server has read everything said, and we everything that it sent before."""
        pong: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pongs.append(pong)
        self.say(nats.PING)
        await pong

    async def _event(self) -> Event:
        while not self._events:
            data = await self._reader.read(_READ)
            if not data:
                raise EOFError(f"{self.place} closed the connection")
            self._heard = True
            self._events += self._protocol.feed(data)
        event = self._events.popleft()
        if isinstance(event, Ping):
            self.say(nats.PONG)
        elif isinstance(event, Err) and event.text.startswith(_OURS):
            raise InputError(f"{self._address} refuses the login: {event.text}; {_login(self._address.variable)}")
        elif isinstance(event, Err):
            raise EOFError(f"{self.place} says {event.text}")
        return event

    async def _read(self) -> None:
        """Pass on what the server sends, until the end."""
        try:
            while True:
                event = await self._event()
                if isinstance(event, Msg):
                    answer = self._answers.get(event.subject)
                    if answer is None or event.reply.startswith(nats.ACK_PREFIX):
                        self.listener.came(event)
                    elif not answer.done():
                        answer.set_result(event)
                elif isinstance(event, Pong) and self._pongs and not (pong := self._pongs.popleft()).done():
                    pong.set_result(None)
        except InputError as problem:
            self._end(problem)
        except (OSError, EOFError, ProtocolError) as problem:
            self._end(ClientError(f"{self._address}: {explained(problem)}"))

    async def _listen(self) -> None:
        """Ping, and end the connection if the server stays silent."""
        while True:
            self._heard = False
            with suppress(TimeoutError):
                async with asyncio.timeout(_SIGN_S * _SILENCE):
                    await self.flush()
            if not self._heard:
                self._end(ClientError(f"{self.place} is silent"))
                return
            await asyncio.sleep(_SIGN_S)

    def _end(self, problem: Exception) -> None:
        if self.closed:
            return
        self.closed = True
        if self._writer is not None:
            self._writer.transport.abort()
        self._give_up(problem)
        ended = problem if isinstance(problem, ClientError) else ClientError(str(problem))
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self.listener.ended(ended)

    def _give_up(self, problem: Exception) -> None:
        waiting: list[asyncio.Future[Any]] = [*self._answers.values(), *self._pongs]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(problem)
                answer.exception()  # nobody need be waiting
        self._answers.clear()
        self._pongs.clear()


def _tls(variable: str) -> str:
    return f"set {variable}, as in nats+tls://host:4222?ca=ca.pem (docs/engines.md)"


def _login(variable: str) -> str:
    return f"set {variable} to another login, as in nats://user:password@host:4222 (docs/engines.md)"
