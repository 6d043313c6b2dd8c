"""The stream of JetStream that has a topic's messages: which it is, how far it reaches, its rows.

In: servers of NATS. Out: the same as of brokers' logs (`logs.py`), with sequence numbers of the stream as offsets.

Always holds: the same range gives the same rows, whichever server gives them and however often one is lost meanwhile.
- A range is read through a consumer of its own, which lives no longer. Consumers number what they deliver: a number
  that is missing was lost on the way, and the range is read again from there.
- A replica may lag behind; that there is no more in a range is said by the stream's leader alone.
- A stream is known by its name and the time of its creation. One that was deleted and created again is LogReplaced.
- Sequence numbers without a message are passed over: they were other topics', or somebody deleted that one. If the
  stream begins after them, they were discarded, which is OffsetTrimmed.
"""

from __future__ import annotations

import json
import logging
import random
import re
import secrets
import socket
import ssl
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import unquote_to_bytes

import msgspec

from srtm.errors import InputError, LogError, LogReplaced, OffsetTrimmed, PipelineError, ProtocolError
from srtm.net.credentials import Credentials
from srtm.net.explain import explained
from srtm.pipeline.streaming.logs import Away, Contract, Logs, Refused, Spools, ask, patiently
from srtm.pipeline.streaming.positions import Extent
from srtm.protocol import engine as engines
from srtm.protocol import greeting, nats
from srtm.protocol.nats import Delivered, Err, Event, Info, Msg, NatsProtocol, Ping, Pong
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    import pyarrow as pa

    from srtm.pipeline.streaming.settings import Settings
    from srtm.protocol.engine import EngineAddress

logger = logging.getLogger(__name__)

_ANSWER_S = 3.0  # JetStream leaves questions unanswered while it elects a leader
_EXPIRES_S = 2  # of what a consumer is asked for; shorter, so that it is said
_READ = 1024 * 1024
_ROWS, _BYTES = 2_000, 2 * nats.MAX_BODY  # that are asked for at once
_IDLE_S = 30  # after which a server forgets a consumer whose reader was killed
_NOT_FOUND = 404
_PASSING = 500  # from this code on, an error may be over soon
_STREAM = re.compile(r"[^\s.*>/\\]+")
_OURS = ("Authorization", "Permissions", "User Authentication")  # errors that waiting does not mend


class Link:
    """A connection to one server of several; whatever ends it is `Away`."""

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
        """Hang up."""
        self._sock.close()

    def say(self, subject: str, /, **wanted: Any) -> None:
        """Ask a question whose answers `next` gives; those to earlier ones are not waited for any more."""
        self._asked += 1
        self._send(nats.publish(subject.encode(), self._reply, msgspec.json.encode(wanted)))

    @property
    def _reply(self) -> bytes:
        return f"{self._inbox}.{self._asked}".encode()

    def ask(self, subject: str, /, **wanted: Any) -> dict[str, Any]:
        """JetStream's answer; Refused with the code of HTTP where it is an error that stays."""
        self.say(subject, **wanted)
        while (answer := self.next()).subject != self._reply:
            pass  # of a consumer that nobody listens to any more
        if answer.status:
            raise Away(f"{self._address} answers {answer.status}: it has no leader, or JetStream is off")
        found = nats.fields(answer.body)
        if error := found.get("error"):
            code, text = int(error.get("code", _PASSING)), str(error.get("description", "unknown error"))
            if code >= _PASSING:
                raise Away(f"{self._address} answers {code}: {text}")
            raise Refused(code, text)
        return found

    def next(self) -> Msg:
        """The next message of a consumer, or the answer to the last question."""
        while True:
            event = self._event()
            if isinstance(event, Msg) and (event.reply.startswith(nats.ACK_PREFIX) or event.subject == self._reply):
                return event

    def _connect(self) -> tuple[str, socket.socket]:
        problem: OSError | None = None
        for server in random.sample(self._address.servers, len(self._address.servers)):
            try:
                return server[0], socket.create_connection(server, _ANSWER_S)
            except OSError as error:
                problem = error
        raise Away(f"{self._address} does not answer ({problem})")

    def _greet(self) -> None:
        while not isinstance(event := self._event(), Info):
            pass
        credentials = Credentials.read(self._address)
        try:
            if greeting.nats_tls(self._address, event.fields):
                self._secure(credentials)
        except InputError as problem:
            raise InputError(f"{self._address}: {problem}; {_ENGINE}") from None
        login = credentials.login(str(event.fields.get("nonce", "")))
        told = nats.connect(verbose=False, headers=True, no_responders=True, name="srtm spark", lang="python", **login)
        self._send(told + nats.subscribe(f"{self._inbox}.*".encode(), 1) + nats.PING)
        while not isinstance(self._event(), Pong):
            pass

    def _secure(self, credentials: Credentials) -> None:
        """Go on through TLS; what came in the clear after INFO is nobody's."""
        assert credentials.tls is not None
        self._protocol, self._events = NatsProtocol(), deque[Event]()
        try:
            self._sock = credentials.tls.wrap_socket(self._sock, server_hostname=self._host)
        except ssl.SSLCertVerificationError as error:
            raise InputError(explained(error)) from None
        except OSError as error:
            raise Away(f"{self._address} does not answer ({explained(error)})") from None

    def _event(self) -> Event:
        try:
            while not self._events:
                data = self._sock.recv(_READ)
                if not data:
                    raise Away(f"{self._address} closed the connection")
                self._events += self._protocol.feed(data)
        except (OSError, ProtocolError) as error:
            raise Away(f"{self._address} does not answer ({explained(error)})") from None
        event = self._events.popleft()
        if isinstance(event, Ping):
            self._send(nats.PONG)
        elif isinstance(event, Err):
            if event.text.startswith(_OURS):
                raise InputError(f"{self._address} refuses: {event.text}; {_LOGIN}")
            raise Away(f"{self._address} says {event.text}")
        return event

    def _send(self, data: bytes) -> None:
        try:
            self._sock.sendall(data)
        except OSError as error:
            raise Away(f"{self._address} does not answer ({error})") from None


class Streams(Logs):
    """A topic's stream, as if it were the log of a broker of that name."""

    noun = "stream"

    def __init__(self, settings: Settings, engine: str) -> None:
        super().__init__(settings)
        if settings.trim_on_commit:
            raise InputError(f"trimOnCommit: others read the stream of topic {settings.topic!r}, too; {_LIMITS}")
        self._engine = engine
        self._address = address_of(engine)

    def look(self, *, strict: bool = False) -> dict[str, str]:
        """The stream that has the topic as a subject; what was found once is not looked for again."""
        del strict
        if not self._urls:
            with Link(self._address) as link:
                names = link.ask("$JS.API.STREAM.NAMES", subject=self._settings.topic).get("streams") or []
            self._urls = dict.fromkeys(names, self._engine)
        return self._urls

    def url(self, broker: str, timeout_s: float) -> str:
        """Where a stream is."""
        del broker, timeout_s
        return self._engine

    def contract(self, brokers: dict[str, str]) -> Contract | None:
        """The topic's bucket, as the controller or the brokers that were named have it."""
        del brokers
        return super().contract({url: url for url in self._settings.brokers})

    def extent(self, broker: str) -> Extent | None:
        """How far a stream reaches; None if there is none."""
        if not _STREAM.fullmatch(broker):
            return None
        try:
            with Link(self._address) as link:
                found = link.ask(f"$JS.API.STREAM.INFO.{broker}")
        except Refused as refused:
            if refused.status == _NOT_FOUND:
                return None
            raise _explained(refused, self._settings.topic, broker) from None
        if (retention := found["config"]["retention"]) != "limits":  # and a consumer of ours would take part in that
            where = f"stream {broker!r} of topic {self._settings.topic!r}"
            raise InputError(f"{where} forgets what its consumers have finished (retention {retention}): {_RETENTION}")
        return _extent(found)


def read(
    engine: str,
    stream: str,
    topic: str,
    begin: int,
    end: int,
    timeout_s: float,
    log: str | None = None,
    *,
    strict: bool,
) -> Iterator[pa.RecordBatch]:
    """The rows of a range; with `strict`, OffsetTrimmed if some were discarded, before any that come after them.

    With `log`, of the stream that was created then: LogReplaced if it is another one.
    """
    cursor = _Cursor(address_of(engine), stream, topic, begin, end, log, strict=strict)
    try:
        while cursor.at < end:
            try:
                rows = patiently(cursor.pull, timeout_s)
            except Refused as refused:
                raise _explained(refused, topic, stream) from None
            if rows:
                yield _batch(topic, rows)
    finally:
        cursor.close()


class _Row(NamedTuple):
    sequence: int
    stored_ns: int
    message: Msg


class _Cursor:
    """A place in a range of a stream; `pull` gives the rows from there and moves it."""

    def __init__(
        self,
        address: EngineAddress,
        stream: str,
        topic: str,
        begin: int,
        end: int,
        log: str | None,
        *,
        strict: bool,
    ) -> None:
        self.at = begin
        self._log = log
        self._address, self._stream, self._topic, self._end, self._strict = address, stream, topic, end, strict
        self._link: Link | None = None
        self._consumer = ""
        self._delivered = self._pending = 0  # by this consumer

    def close(self) -> None:
        """Leave nothing at the server."""
        if self._link is None:
            return
        with self._link as link, suppress(Away):  # then it forgets the consumer by itself
            if self._consumer:
                link.say(f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._consumer}")
        self._link, self._consumer = None, ""

    def pull(self) -> list[_Row]:
        """The next rows, or none and the end of the range. After `Away` it may be called again."""
        try:
            link = self._link or self._open()
            found = self._some(link) if self._pending else []
            rows = [row for row in found if row.sequence < self._end]
            if not found:
                self._confirm_end(link)
            after = rows[-1].sequence + 1 if rows and rows == found else self._end
            if self._strict and (missing := _first_missing(self.at, after, rows)) is not None:
                self._confirm_kept(link, missing)
        except BaseException:
            self.close()
            raise
        self.at = after
        return rows

    def _open(self) -> Link:
        self._link = link = Link(self._address)
        wanted = {
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self.at,
            "ack_policy": "none",
            "filter_subject": self._topic,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": _IDLE_S * NS_PER_S,
        }
        subject = f"$JS.API.CONSUMER.CREATE.{self._stream}"
        made = link.ask(subject, stream_name=self._stream, config=wanted)
        self._consumer, self._delivered, self._pending = made["name"], 0, made["num_pending"]
        self._extent(link)  # a consumer of the stream that was meant: that one was there before, and is there still
        return link

    def _extent(self, link: Link) -> Extent:
        """How far the stream reaches, if it is the one that was meant."""
        extent = _extent(link.ask(f"$JS.API.STREAM.INFO.{self._stream}"))
        if self._log is not None and extent.log is not None and extent.log != self._log:
            where = f"stream {self._stream!r} of topic {self._topic!r}"
            raise LogReplaced(f"{where} was deleted and created again, and with it went offset {self.at}")
        return extent

    def _some(self, link: Link) -> list[_Row]:
        """As much as one question brings; it may reach over the end of the range."""
        most, rows = min(_ROWS, self._end - self.at), list[_Row]()
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        link.say(subject, batch=most, max_bytes=_BYTES, expires=_EXPIRES_S * NS_PER_S)
        while len(rows) < most and self._pending and (not rows or rows[-1].sequence < self._end - 1):
            message = link.next()
            if not message.reply.startswith(nats.ACK_PREFIX):  # this question is over
                if rows:
                    break
                raise Away(f"{self._address} delivers nothing: {message.status}")
            told = Delivered.by(message.reply)
            self._delivered, self._pending = self._delivered + 1, told.pending
            if told.number != self._delivered:
                raise Away(f"{self._address} lost messages on their way here")
            rows.append(_Row(told.sequence, told.stored_ns, message))
        return rows

    def _confirm_end(self, link: Link) -> None:
        """The replica that was asked has no more: neither may the leader."""
        try:
            subject = f"$JS.API.STREAM.MSG.GET.{self._stream}"
            found = link.ask(subject, seq=self.at, next_by_subj=self._topic)["message"]["seq"]
        except Refused as refused:
            if refused.status != _NOT_FOUND:
                raise
            self._extent(link)
            return
        if found < self._end:
            raise Away(f"{self._address} has message {found} of stream {self._stream!r} not on all servers")

    def _confirm_kept(self, link: Link, missing: int) -> None:
        """What is missing is so because nobody has it, not because it was discarded."""
        begin = self._extent(link).begin
        if begin > missing:
            where = f"topic {self._topic!r} at stream {self._stream!r}"
            raise OffsetTrimmed(f"{where} no longer holds offset {missing}: it begins at {begin}", begin=begin)


def _first_missing(begin: int, end: int, rows: list[_Row]) -> int | None:
    if len(rows) == end - begin:
        return None
    return next((at for at, row in enumerate(rows, begin) if row.sequence != at), begin + len(rows))


def _extent(info: dict[str, Any]) -> Extent:
    return Extent(max(1, info["state"]["first_seq"]), info["state"]["last_seq"] + 1, info.get("created"))


def _batch(topic: str, rows: list[_Row]) -> pa.RecordBatch:
    """Rows as Arrow; what came to the stream past SRTM has no broker, no publisher, and JetStream's time."""
    import pyarrow as pa

    messages = [row.message for row in rows]
    columns = {
        "topic": pa.repeat(pa.scalar(topic, pa.string()), len(rows)),
        "publisher": pa.array([_name(message.value(nats.PUBLISHER)) for message in messages], pa.string()),
        "body": pa.array([message.body for message in messages], pa.binary()),
        "broker": pa.array([_name(message.value(nats.BROKER)) or None for message in messages], pa.string()),
        "offset": pa.array([row.sequence for row in rows], pa.int64()),
        "arrival_ns": pa.array([_arrival_ns(row) for row in rows], pa.int64()),
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


@lru_cache(maxsize=4096)
def _name(value: bytes) -> str:
    return unquote_to_bytes(value).decode("utf-8", "replace")


def _arrival_ns(row: _Row) -> int:
    said = row.message.value(nats.ARRIVAL)
    return int(said) if said.isdigit() and len(said) < 19 + 1 else row.stored_ns


def address_of(engine: str) -> EngineAddress:
    """Servers of NATS, by the text of an option."""
    found = engines.parse(engine)
    if found is None or found.kind != "nats":
        raise InputError(f"{engines.hidden(engine)!r} keeps nothing that can be read again: {_NATS}")
    return found


def located(settings: Settings) -> Logs | None:
    """Where a topic's messages are: in a stream, or in brokers' logs. None where nobody has the topic yet."""
    if settings.engine:
        return Streams(settings, settings.engine)
    logs = Logs(settings)
    here = list(settings.brokers or logs.look().values())  # brokers with an engine are not listed
    members = [] if settings.brokers else _members(settings.controller)
    engined = [each for each in members if each.kind != "local" and each.alive]
    found = {each.engine for each in engined if each.engine is not None}
    elsewhere = [each.url for each in engined if each.engine is None]
    if not engined and not settings.brokers:
        return logs if here else None
    if any(each.kind == "nsqd" for each in engined):  # whose nsqds may be listed, beside brokers of ours
        here = [url for url in here if url in {each.url for each in members}]
    away = None
    for url in [*elsewhere, *here]:
        try:
            found.add(_engine_of(url))
        except Away as problem:
            away = problem
    nsqds = {engine for engine in found if engine.startswith("nsqd")}  # each broker has its own
    if len(found - nsqds) + bool(nsqds) > 1:
        ways = ", ".join(sorted(found))
        raise InputError(f"topic {settings.topic!r} is delivered in several ways ({ways}): {_ONE_WAY}")
    if not found and elsewhere and away:
        raise away
    engine = found.pop() if found else "local"
    if nsqds:
        return Spools(settings, {each.name: each.url for each in engined})
    return logs if engine == "local" else Streams(settings, engine)


class _Member(NamedTuple):
    """A broker as the controller knows it; of an older version it does not know the address of the engine."""

    name: str
    url: str
    alive: bool
    kind: str
    engine: str | None


def _members(controller: str) -> list[_Member]:
    """All brokers of a controller; a stock nsqlookupd knows of none."""
    try:
        listed = json.loads(ask(f"{controller}/v1/brokers"))["brokers"]
        return [
            _Member(
                each["name"],
                each["http"],
                each["status"] != "dead",
                each.get("engine", "local"),
                each.get("engine_address"),
            )
            for each in listed
        ]
    except (Refused, ValueError, KeyError, TypeError):
        return []


def _engine_of(url: str) -> str:
    """The address of a broker's engine, or `local`."""
    try:
        found = json.loads(ask(f"{url}/stats", format="json", include_clients="false"))["srtm"]["engine"]
    except (Refused, ValueError, KeyError, TypeError):  # no broker, or one of another version; `Logs` says so
        return "local"
    return str(found.get("address") or found["kind"])


def _explained(refused: Refused, topic: str, stream: str) -> Exception:
    where = f"stream {stream!r} of topic {topic!r}"
    if refused.status == _NOT_FOUND:
        return LogError(f"{where} is gone")
    return PipelineError(f"{where} cannot be read: {refused}")  # nothing is lost, so this is not to be left out


_ENGINE = "option engine says how to reach it, as in nats+tls://host:4222?ca=ca.pem (docs/engines.md)"
_LOGIN = "give a login that may with option engine, as in nats://user:password@host:4222 (docs/engines.md)"
_LIMITS = "leave the option out, and set the stream's own limits"
_RETENTION = "only one with retention limits can be read again"
_NATS = "only servers of NATS do, written as nats://host:4222,host:4222"
_ONE_WAY = "name brokers that deliver in one way with option brokers, or servers of NATS with option engine"
