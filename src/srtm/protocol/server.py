r"""The server's side of V2: bytes of one client in, commands out.

In: what a read brought, cut anywhere. Out: a list of everything it completed, in order; commands that nsqd would refuse
without asking a topic are replaced by nsqd's error, which is the last entry and the end of the connection.

    magic      "  V2"
    command    VERB [SP param]... LF                    a CR before the LF is dropped, spare params are passed over
    PUB t      [size 4][body]
    DPUB t ms  [size 4][body]
    MPUB t     [size 4][count 4]{[size 4][body]}...     the first size counts all that follows it
    IDENTIFY   [size 4][JSON]
    AUTH       [size 4][secret]

Always holds:
- the same bytes give the same commands, however they are cut;
- what is kept between two calls is the beginning of one command: at most a line and a body within its limit (of an
  MPUB, the messages that are complete and the beginning of one);
- a size is judged before a byte of its body is kept;
- after an error nothing more is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from struct import Struct
from typing import Final, NamedTuple

from srtm.errors import ProtocolError
from srtm.protocol.identify import Identity, negotiate
from srtm.protocol.names import ID_SIZE, MAGIC_V2, MAX_LINE, Settings, base10, quoted, signed64, valid_name


class Identify(NamedTuple):
    """The client's wishes, settled; answer with `identify.response`."""

    identity: Identity


class Auth(NamedTuple):
    """A secret for the authority to judge."""

    secret: bytes


class Sub(NamedTuple):
    """Subscribe to a channel."""

    topic: str
    channel: str


class Pub(NamedTuple):
    """Publish one message."""

    topic: str
    body: bytes


class Mpub(NamedTuple):
    """Publish several messages, all or none."""

    topic: str
    bodies: list[bytes]


class Dpub(NamedTuple):
    """Publish one message, to be delivered after a while."""

    topic: str
    delay_ms: int
    body: bytes


class Rdy(NamedTuple):
    """How many messages may be in flight to this client."""

    ready: int


class Fin(NamedTuple):
    """A message is done."""

    id: bytes


class Req(NamedTuple):
    """A message is to be delivered again; the delay is already within the limit."""

    id: bytes
    delay_ms: int


class Touch(NamedTuple):
    """A message needs more time."""

    id: bytes


class Cls(NamedTuple):
    """Send no more messages; answer CLOSE_WAIT."""


class Nop(NamedTuple):
    """Nothing but a sign of life."""


Command = Identify | Auth | Sub | Pub | Mpub | Dpub | Rdy | Fin | Req | Touch | Cls | Nop
Event = Command | ProtocolError

# What a connection is, and what it may say then. A consumer that is closing may still finish what it has; its RDY is
# passed over. PUB, MPUB, DPUB and NOP are always allowed, and IDENTIFY as often as wanted before SUB, as in nsqd.
INIT: Final = 0
SUBSCRIBED: Final = 1
CLOSING: Final = 2

ALLOWED: Final = {
    b"IDENTIFY": (INIT,),
    b"AUTH": (INIT,),
    b"SUB": (INIT,),
    b"RDY": (SUBSCRIBED, CLOSING),
    b"FIN": (SUBSCRIBED, CLOSING),
    b"REQ": (SUBSCRIBED, CLOSING),
    b"TOUCH": (SUBSCRIBED, CLOSING),
    b"CLS": (SUBSCRIBED,),
    b"PUB": (INIT, SUBSCRIBED, CLOSING),
    b"MPUB": (INIT, SUBSCRIBED, CLOSING),
    b"DPUB": (INIT, SUBSCRIBED, CLOSING),
    b"NOP": (INIT, SUBSCRIBED, CLOSING),
}

_KNOWN_LINES: Final = 64  # topics of one publisher that are recognised without being checked again
_FIN_LINE: Final = len(b"FIN \n") + ID_SIZE
# FINs in a row. An id of letters and digits holds no space and no CR, either of which would end it.
_fins_at = re.compile(rb"(?:FIN [0-9A-Za-z]{%d}\n)++" % ID_SIZE).match
_P: Final = ord("P")
_LEN: Final = Struct(">i")
_NS_PER_MS: Final = 1_000_000

_len_at = _LEN.unpack_from
_new = tuple.__new__  # a NamedTuple without the cost of its own constructor
_INCOMPLETE: Final = -1


class _Mpub:
    """An MPUB whose body is still coming in."""

    __slots__ = ("bodies", "count", "left", "topic")

    def __init__(self, topic: str, size: int) -> None:
        self.topic = topic
        self.left = size  # bytes of the body that are not read yet
        self.count = -1  # messages announced; -1 before that is known
        self.bodies: list[bytes] = []


class ServerProtocol:
    """One client's connection, as the server reads it.

    `feed` gives commands. Where IDENTIFY settled TLS or compression, it stops there: answer, take `take_unparsed()`,
    and feed what the new transport makes of it. After `closed`, nothing is read any more.
    """

    __slots__ = (
        "_greeted",
        "_max_msg_size",
        "_mpub",
        "_need",
        "_paused",
        "_pending",
        "_pubs",
        "closed",
        "identity",
        "settings",
        "state",
        "tls",
    )

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.identity = Identity.default(settings)
        self.state = INIT
        self.tls = False  # whoever upgrades the transport says so here
        self.closed = False
        self._greeted = False
        self._paused = False
        self._pending = bytearray()
        self._need = 0  # bytes that the pending command needs at least to go on
        self._mpub: _Mpub | None = None
        self._pubs: dict[bytes, str] = {}  # lines of PUB and MPUB that were found valid, and their topics
        self._max_msg_size = settings.max_msg_size

    @property
    def buffered(self) -> int:
        """Bytes kept until the rest of their command comes."""
        return len(self._pending)

    @property
    def paused(self) -> bool:
        """Whether an upgrade was settled and `take_unparsed` is due."""
        return self._paused

    def feed(self, data: bytes | bytearray | memoryview) -> list[Event]:
        """All commands that are complete with these bytes; an error, always fatal, comes last."""
        out: list[Event] = []
        if self.closed:
            return out
        assert not self._paused, "take_unparsed comes before the next feed"
        pending = self._pending
        if pending:
            pending += data
            if len(pending) < self._need:
                return out
            data = bytes(pending)
            pending.clear()
        elif type(data) is not bytes:
            data = bytes(data)
        try:
            pos = self._read(data, out)
        except ProtocolError as problem:
            self.closed = True
            self._mpub = None
            out.append(problem.bare())
            return out
        if pos < len(data):
            pending += memoryview(data)[pos:]
        return out

    def take_unparsed(self) -> bytes:
        """The bytes after the IDENTIFY that settled an upgrade; `feed` is ready for what they turn into."""
        data = bytes(self._pending)
        self._pending.clear()
        self._paused = False
        return data

    def end(self) -> ProtocolError | None:
        """The client sent its last byte: nsqd's error if that cut a body short, None if there is nothing to say."""
        if self.closed:
            return None
        self.closed = True
        if self._mpub is not None:
            return self._mpub_cut(self._mpub, len(self._pending))
        line, newline, rest = bytes(self._pending).partition(b"\n")
        if not newline or not self._greeted or self._paused:
            return None
        verb = line.split(b" ", 1)[0].rstrip(b"\r").decode()
        code, what = ("E_BAD_MESSAGE", "message body") if verb in ("PUB", "DPUB") else ("E_BAD_BODY", "body")
        return ProtocolError(code, f"{verb} failed to read {what}{' size' if len(rest) < _LEN.size else ''}")

    def _read(self, data: bytes, out: list[Event]) -> int:
        """Read commands from the start of data; gives the offset of the first that is incomplete."""
        pos = 0
        end = len(data)
        if not self._greeted:
            if end < len(MAGIC_V2):
                self._need = len(MAGIC_V2)
                return 0
            if not data.startswith(MAGIC_V2):
                raise ProtocolError("E_BAD_PROTOCOL", magic=data[: len(MAGIC_V2)])
            self._greeted = True
            pos = len(MAGIC_V2)
        if self._mpub is not None:
            pos = self._mpub_go_on(data, pos, out)
            if self._mpub is not None:
                return pos
        find, known, max_msg_size, append = data.find, self._pubs.get, self._max_msg_size, out.append
        consumer = self.state != INIT
        while pos < end:
            if consumer and (fins := _fins_at(data, pos)):
                out += [_new(Fin, (data[at : at + ID_SIZE],)) for at in range(pos + 4, fins.end(), _FIN_LINE)]
                pos = fins.end()
                continue
            newline = find(b"\n", pos, pos + MAX_LINE)
            if newline < 0:
                if end - pos >= MAX_LINE:
                    raise ProtocolError("E_INVALID", f"line is longer than {MAX_LINE} bytes")
                self._need = end - pos + 1
                return pos
            line = data[pos:newline]
            topic = known(line)
            start = newline + 5
            if topic is None or start > end:
                after = self._command(data, newline + 1, line, out)
            elif data[pos] == _P:
                (size,) = _len_at(data, newline + 1)
                stop = start + size
                if 0 < size <= max_msg_size and stop <= end:
                    append(_new(Pub, (topic, data[start:stop])))
                    pos = stop
                    continue
                after = self._command(data, newline + 1, line, out)
            else:
                after = self._mpub_body(data, newline + 1, topic, out)
            if after < 0:
                self._need -= pos
                return pos
            pos = after
            if self._mpub is not None or self._paused:
                return pos
            consumer = self.state != INIT
        return pos

    def _command(self, data: bytes, at: int, line: bytes, out: list[Event]) -> int:
        """Read one command whose line is complete and whose body starts `at`; gives where the next one starts.

        _INCOMPLETE if the body is cut, with the offset that is needed in `_need`.
        """
        params = (line[:-1] if line.endswith(b"\r") else line).split(b" ")
        verb = params[0]
        if self.settings.tls_required and not self.tls and verb != b"IDENTIFY":
            raise ProtocolError("E_INVALID", f"cannot {_raw(verb)} in current state (TLS required)")
        method = _VERBS.get(verb)
        if method is None:
            raise ProtocolError("E_INVALID", f"invalid command {_raw(verb)}")
        if self.state not in ALLOWED[verb]:
            raise ProtocolError("E_INVALID", f"cannot {_raw(verb)} in current state")
        return method(self, data, at, params, out)

    def _identify(self, data: bytes, at: int, _params: list[bytes], out: list[Event]) -> int:
        stop = self._body(data, at, "IDENTIFY", min(self.settings.max_identify_size, self.settings.max_body_size))
        if stop < 0:
            return stop
        self.identity = negotiate(data[at + 4 : stop], self.settings, self.identity)
        self._paused = self.identity.upgrades
        out.append(Identify(self.identity))
        return stop

    def _auth(self, data: bytes, at: int, params: list[bytes], out: list[Event]) -> int:
        if len(params) != 1:
            raise ProtocolError("E_INVALID", "AUTH invalid number of parameters")
        stop = self._body(data, at, "AUTH", self.settings.max_body_size)
        if stop < 0:
            return stop
        if not self.settings.auth_required:
            raise ProtocolError("E_AUTH_DISABLED", "AUTH disabled")
        out.append(Auth(data[at + 4 : stop]))
        return stop

    def _sub(self, _data: bytes, at: int, params: list[bytes], out: list[Event]) -> int:
        if self.identity.heartbeat_ms <= 0:
            raise ProtocolError("E_INVALID", "cannot SUB with heartbeats disabled")
        if len(params) < 3:
            raise ProtocolError("E_INVALID", "SUB insufficient number of parameters")
        topic = _topic("SUB", params[1])
        if not valid_name(params[2]):
            raise ProtocolError("E_BAD_CHANNEL", f"SUB channel name {quoted(params[2])} is not valid")
        self.state = SUBSCRIBED  # a SUB that fails later ends the connection
        out.append(Sub(topic, params[2].decode()))
        return at

    def _pub(self, data: bytes, at: int, params: list[bytes], out: list[Event]) -> int:
        if len(params) < 2:
            raise ProtocolError("E_INVALID", "PUB insufficient number of parameters")
        topic = _topic("PUB", params[1])
        stop = self._message(data, at, "PUB")
        if stop >= 0:
            self._remember(params, topic)
            out.append(Pub(topic, data[at + 4 : stop]))
        return stop

    def _remember(self, params: list[bytes], topic: str) -> None:
        if len(self._pubs) >= _KNOWN_LINES:
            self._pubs.clear()
        if len(params) == 2:  # spare params could make it long
            self._pubs[b" ".join(params)] = topic

    def _dpub(self, data: bytes, at: int, params: list[bytes], out: list[Event]) -> int:
        if len(params) < 3:
            raise ProtocolError("E_INVALID", "DPUB insufficient number of parameters")
        topic = _topic("DPUB", params[1])
        delay_ms = base10(params[2])
        if delay_ms is None:
            raise ProtocolError("E_INVALID", f"DPUB could not parse timeout {_raw(params[2])}")
        limit_ms = self.settings.max_req_timeout_ms
        if not 0 <= (delay_ns := signed64(delay_ms * _NS_PER_MS)) <= limit_ms * _NS_PER_MS:
            raise ProtocolError("E_INVALID", f"DPUB timeout {delay_ms} out of range 0-{limit_ms}")
        stop = self._message(data, at, "DPUB")
        if stop >= 0:
            out.append(Dpub(topic, delay_ns // _NS_PER_MS, data[at + 4 : stop]))
        return stop

    def _rdy(self, _data: bytes, at: int, params: list[bytes], out: list[Event]) -> int:
        if self.state == CLOSING:
            return at
        number = base10(params[1]) if len(params) > 1 else 1
        if number is None:
            raise ProtocolError("E_INVALID", f"RDY could not parse count {_raw(params[1])}")
        count, limit = signed64(number), self.settings.max_rdy_count
        if not 0 <= count <= limit:
            raise ProtocolError("E_INVALID", f"RDY count {count} out of range 0-{limit}", count=count, limit=limit)
        out.append(Rdy(count))
        return at

    def _fin(self, _data: bytes, at: int, params: list[bytes], out: list[Event]) -> int:
        out.append(Fin(_id("FIN", params, 2)))
        return at

    def _req(self, _data: bytes, at: int, params: list[bytes], out: list[Event]) -> int:
        message_id = _id("REQ", params, 3)
        delay_ms = base10(params[2])
        if delay_ms is None:
            raise ProtocolError("E_INVALID", f"REQ could not parse timeout {_raw(params[2])}")
        delay_ns = signed64(delay_ms * _NS_PER_MS)
        out.append(Req(message_id, min(max(delay_ns // _NS_PER_MS, 0), self.settings.max_req_timeout_ms)))
        return at

    def _touch(self, _data: bytes, at: int, params: list[bytes], out: list[Event]) -> int:
        out.append(Touch(_id("TOUCH", params, 2)))
        return at

    def _cls(self, _data: bytes, at: int, _params: list[bytes], out: list[Event]) -> int:
        self.state = CLOSING
        out.append(Cls())
        return at

    def _nop(self, _data: bytes, at: int, _params: list[bytes], out: list[Event]) -> int:
        out.append(Nop())
        return at

    def _body(self, data: bytes, at: int, verb: str, limit: int) -> int:
        """Where the body of IDENTIFY or AUTH, whose size stands `at`, ends; _INCOMPLETE if it is cut."""
        if at + 4 > len(data):
            self._need = at + 4
            return _INCOMPLETE
        (size,) = _len_at(data, at)
        if size > limit:
            raise _too_big("E_BAD_BODY", f"{verb} body", size, limit)
        if size <= 0:
            raise ProtocolError("E_BAD_BODY", f"{verb} invalid body size {size}", size=size)
        return self._stop(data, at + 4 + size)

    def _message(self, data: bytes, at: int, verb: str) -> int:
        """Where the message of PUB or DPUB, whose size stands `at`, ends; _INCOMPLETE if it is cut."""
        if at + 4 > len(data):
            self._need = at + 4
            return _INCOMPLETE
        (size,) = _len_at(data, at)
        if size <= 0:
            raise ProtocolError("E_BAD_MESSAGE", f"{verb} invalid message body size {size}", size=size)
        if size > self._max_msg_size:
            raise _too_big("E_BAD_MESSAGE", f"{verb} message", size, self._max_msg_size)
        return self._stop(data, at + 4 + size)

    def _stop(self, data: bytes, stop: int) -> int:
        if stop <= len(data):
            return stop
        self._need = stop
        return _INCOMPLETE

    def _mpub_begin(self, data: bytes, at: int, params: list[bytes], out: list[Event]) -> int:
        if len(params) < 2:
            raise ProtocolError("E_INVALID", "MPUB insufficient number of parameters")
        if not valid_name(params[1]):  # nsqd says the code twice
            raise ProtocolError("E_BAD_TOPIC", f"E_BAD_TOPIC MPUB topic name {quoted(params[1])} is not valid")
        topic = params[1].decode()
        self._remember(params, topic)
        return self._mpub_body(data, at, topic, out)

    def _mpub_body(self, data: bytes, at: int, topic: str, out: list[Event]) -> int:
        if at + 4 > len(data):
            self._need = at + 4
            return _INCOMPLETE
        (size,) = _len_at(data, at)
        if size <= 0:
            raise ProtocolError("E_BAD_BODY", f"MPUB invalid body size {size}", size=size)
        if size > self.settings.max_body_size:
            raise _too_big("E_BAD_BODY", "MPUB body", size, self.settings.max_body_size)
        self._mpub = _Mpub(topic, size)
        return self._mpub_go_on(data, at + 4, out)

    def _mpub_go_on(self, data: bytes, pos: int, out: list[Event]) -> int:
        """Read on in the body of an MPUB as far as messages are complete; gives where it stopped."""
        mpub = self._mpub
        assert mpub is not None
        end = len(data)
        if mpub.count < 0:
            if mpub.left < 4:
                raise self._mpub_cut(mpub, 0)
            if pos + 4 > end:
                self._need = 4
                return pos
            (mpub.count,) = _len_at(data, pos)
            if not 0 < mpub.count <= (self.settings.max_body_size - 4) // 5:  # no message is shorter than 4 + 1
                raise ProtocolError("E_BAD_BODY", f"MPUB invalid message count {mpub.count}", count=mpub.count)
            pos += 4
            mpub.left -= 4
        bodies, max_msg_size = mpub.bodies, self._max_msg_size
        limit = pos + mpub.left
        begin = pos
        for _ in range(mpub.count - len(bodies)):
            start = pos + 4
            if start > end or start > limit:
                self._need = 4
                break
            (size,) = _len_at(data, pos)
            stop = start + size
            if not 0 < size <= max_msg_size:
                raise _bad_message(len(bodies), size, max_msg_size)
            if stop > end or stop > limit:
                self._need = 4 + size
                break
            bodies.append(data[start:stop])
            pos = stop
        mpub.left -= pos - begin
        if len(bodies) < mpub.count:
            if mpub.left < self._need:
                raise self._mpub_cut(mpub, self._need - 1)
            return pos
        self._mpub = None
        if mpub.left:
            raise ProtocolError(
                "E_BAD_BODY", f"MPUB body is {mpub.left} bytes longer than its messages", left=mpub.left
            )
        out.append(Mpub(mpub.topic, bodies))
        return pos

    @staticmethod
    def _mpub_cut(mpub: _Mpub, seen: int) -> ProtocolError:
        """The error of an MPUB that ends before its messages do, `seen` bytes into one."""
        if mpub.count < 0:
            return ProtocolError("E_BAD_BODY", "MPUB failed to read message count")
        if seen < 4:
            return ProtocolError("E_BAD_MESSAGE", f"MPUB failed to read message({len(mpub.bodies)}) body size")
        return ProtocolError("E_BAD_MESSAGE", "MPUB failed to read message body")


_VERBS: Final[dict[bytes, Callable[[ServerProtocol, bytes, int, list[bytes], list[Event]], int]]] = {
    b"IDENTIFY": ServerProtocol._identify,
    b"AUTH": ServerProtocol._auth,
    b"SUB": ServerProtocol._sub,
    b"PUB": ServerProtocol._pub,
    b"MPUB": ServerProtocol._mpub_begin,
    b"DPUB": ServerProtocol._dpub,
    b"RDY": ServerProtocol._rdy,
    b"FIN": ServerProtocol._fin,
    b"REQ": ServerProtocol._req,
    b"TOUCH": ServerProtocol._touch,
    b"CLS": ServerProtocol._cls,
    b"NOP": ServerProtocol._nop,
}


def auth_first(verb: str) -> ProtocolError:
    """A command that needs AUTH came before it."""
    return ProtocolError("E_AUTH_FIRST", f"AUTH required before {verb}")


def unauthorized(verb: str, topic: str, channel: str = "") -> ProtocolError:
    """The authority does not allow this."""
    return ProtocolError("E_UNAUTHORIZED", f'AUTH failed for {verb} on "{topic}" "{channel}"')


def failed(verb: str, message_id: bytes, why: str) -> ProtocolError:
    """FIN, REQ or TOUCH of a message that is not, or no longer, this client's."""
    return ProtocolError(f"E_{verb}_FAILED", f"{verb} {_raw(message_id)} failed {why}", id=message_id)


def _topic(verb: str, raw: bytes) -> str:
    if not valid_name(raw):
        raise ProtocolError("E_BAD_TOPIC", f"{verb} topic name {quoted(raw)} is not valid")
    return raw.decode()


def _id(verb: str, params: list[bytes], least: int) -> bytes:
    if len(params) < least:
        raise ProtocolError("E_INVALID", f"{verb} insufficient number of params")
    if len(params[1]) != ID_SIZE:
        raise ProtocolError("E_INVALID", "invalid message ID")
    return params[1]


def _bad_message(index: int, size: int, limit: int) -> ProtocolError:
    if size > limit:
        return _too_big("E_BAD_MESSAGE", "MPUB message", size, limit)
    return ProtocolError("E_BAD_MESSAGE", f"MPUB invalid message({index}) body size {size}", size=size)


def _too_big(code: str, what: str, size: int, limit: int) -> ProtocolError:
    return ProtocolError(code, f"{what} too big {size} > {limit}", size=size, limit=limit)


def _raw(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
