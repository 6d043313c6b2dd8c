r"""The server's side of V2: bytes of one client in, commands out.

In: bytes of the client, in reads of any size. Out: a list of the commands that they complete, in order. A command that
nsqd refuses without looking at a topic becomes nsqd's error, which is the last entry and ends the connection.

    magic      "  V2"
    command    VERB [SP param]... LF                    a CR before the LF is dropped, spare params are ignored
    PUB t      [size 4][body]
    DPUB t ms  [size 4][body]
    MPUB t     [size 4][count 4]{[size 4][body]}...     the first size counts everything after it
    IDENTIFY   [size 4][JSON]
    AUTH       [size 4][secret]

Always holds:
- the same bytes give the same commands, however they are split; only how many FINs in a row are one command may differ;
- only the beginning of one command is kept between calls: at most a line and a body within its limit (of an MPUB, its
  complete messages and the beginning of one);
- a size is checked before a byte of its body is kept;
- after an error nothing more is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from srtm.errors import ProtocolError
from srtm.protocol import commands
from srtm.protocol.commands import (
    CLOSING,
    INIT,
    SUBSCRIBED,
    Auth,
    Cls,
    Dpub,
    Event,
    Fin,
    Identify,
    Mpub,
    Nop,
    Pub,
    check_allowed,
    raw,
    too_big,
    topic_of,
)
from srtm.protocol.identify import Identity, negotiate
from srtm.protocol.mpub import SIZE, MpubBody, size_at
from srtm.protocol.names import ID_SIZE, MAGIC_V2, MAX_LINE, Settings

_KNOWN_LINES: Final = 64  # lines of one publisher that need no second check
# FINs in a row. An id of letters and digits contains no space or CR, which would end it.
_fins_at: Final = re.compile(rb"(?:FIN [0-9A-Za-z]{%d}\n)++" % ID_SIZE).match
_P: Final = ord("P")
_INCOMPLETE: Final = -1


class ServerProtocol:
    """One client's connection, as the server reads it.

    `feed` returns commands. If IDENTIFY settles TLS or compression, reading pauses: send the answer, decode
    `take_unparsed()` with the new layer, and feed the result. Once `closed` is set, nothing more is read.
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
        self.tls = False  # set by the owner when it begins TLS
        self.closed = False
        self._greeted = False
        self._paused = False
        self._pending = bytearray()
        self._need = 0  # bytes that the pending command needs at least
        self._mpub: MpubBody | None = None
        self._pubs: dict[bytes, str] = {}  # topics by valid lines of PUB and MPUB
        self._max_msg_size = settings.max_msg_size

    @property
    def buffered(self) -> int:
        """Bytes of an incomplete command."""
        return len(self._pending)

    @property
    def paused(self) -> bool:
        """Whether an upgrade was settled, and `take_unparsed` must be called."""
        return self._paused

    def feed(self, data: bytes | bytearray | memoryview) -> list[Event]:
        """Return all commands that these bytes complete; an error, always fatal, comes last."""
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
        """Return the bytes after the IDENTIFY that settled an upgrade; `feed` may be called again."""
        data = bytes(self._pending)
        self._pending.clear()
        self._paused = False
        return data

    def end(self) -> ProtocolError | None:
        """End the stream; return nsqd's error for a truncated body, or None."""
        if self.closed:
            return None
        self.closed = True
        if self._mpub is not None:
            return self._mpub.cut(len(self._pending))
        line, newline, rest = bytes(self._pending).partition(b"\n")
        if not newline or not self._greeted or self._paused:
            return None
        verb = line.split(b" ", 1)[0].rstrip(b"\r").decode()
        code, what = ("E_BAD_MESSAGE", "message body") if verb in ("PUB", "DPUB") else ("E_BAD_BODY", "body")
        return ProtocolError(code, f"{verb} failed to read {what}{' size' if len(rest) < SIZE else ''}")

    def _read(self, data: bytes, out: list[Event]) -> int:
        """Read commands from the start of data; return the offset of the first incomplete one."""
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
            if self._stops():
                return pos
        max_msg_size = self._max_msg_size
        consumer = self.state != INIT
        while pos < end:
            if consumer and (fins := _fins_at(data, pos)):
                stop = fins.end()
                out.append(Fin(data[pos + 4 : stop - 1].split(b"\nFIN ")))
                pos = stop
                continue
            newline = data.find(b"\n", pos, pos + MAX_LINE)
            if newline < 0:
                if end - pos >= MAX_LINE:
                    raise ProtocolError("E_INVALID", f"line is longer than {MAX_LINE} bytes")
                self._need = end - pos + 1
                return pos
            line = data[pos:newline]
            topic = self._pubs.get(line)
            start = newline + 5
            if topic is None or start > end:
                after = self._command(data, newline + 1, line, out)
            elif data[pos] == _P:
                size = size_at(data, newline + 1)
                stop = start + size
                if 0 < size <= max_msg_size and stop <= end:
                    out.append(Pub(topic, data[start:stop]))
                    pos = stop
                    continue
                after = self._command(data, newline + 1, line, out)
            else:
                after = self._mpub_body(data, newline + 1, topic, out)
            if after < 0:
                self._need -= pos
                return pos
            pos = after
            if self._stops():
                return pos
            consumer = self.state != INIT
        return pos

    def _stops(self) -> bool:
        """Whether nothing more can be read now: an MPUB is incomplete, or an upgrade was settled."""
        return self._mpub is not None or self._paused

    def _command(self, data: bytes, at: int, line: bytes, out: list[Event]) -> int:
        """Read one command whose line is complete and whose body starts `at`; return the offset of the next.

        Return _INCOMPLETE if the body is incomplete, and set `_need` to the offset where it ends.
        """
        params = (line[:-1] if line.endswith(b"\r") else line).split(b" ")
        verb = params[0]
        if self.settings.tls_required and not self.tls and verb != b"IDENTIFY":
            raise ProtocolError("E_INVALID", f"cannot {raw(verb)} in current state (TLS required)")
        check_allowed(verb, self.state)
        return _VERBS[verb](self, data, at, params, out)

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
        out.append(commands.sub(params, self.identity))
        self.state = SUBSCRIBED  # if SUB fails later, the connection ends
        return at

    def _pub(self, data: bytes, at: int, params: list[bytes], out: list[Event]) -> int:
        topic = topic_of("PUB", params)
        stop = self._message(data, at, "PUB")
        if stop >= 0:
            self._remember(params, topic)
            out.append(Pub(topic, data[at + 4 : stop]))
        return stop

    def _remember(self, params: list[bytes], topic: str) -> None:
        if len(self._pubs) >= _KNOWN_LINES:
            self._pubs.clear()
        if len(params) == 2:  # with spare params it could be long
            self._pubs[b" ".join(params)] = topic

    def _dpub(self, data: bytes, at: int, params: list[bytes], out: list[Event]) -> int:
        topic = topic_of("DPUB", params, 3)
        delay_ms = commands.dpub_delay_ms(params, self.settings)
        stop = self._message(data, at, "DPUB")
        if stop >= 0:
            out.append(Dpub(topic, delay_ms, data[at + 4 : stop]))
        return stop

    def _rdy(self, _data: bytes, at: int, params: list[bytes], out: list[Event]) -> int:
        if self.state != CLOSING:
            out.append(commands.rdy(params, self.settings))
        return at

    def _fin(self, _data: bytes, at: int, params: list[bytes], out: list[Event]) -> int:
        out.append(commands.fin(params))
        return at

    def _req(self, _data: bytes, at: int, params: list[bytes], out: list[Event]) -> int:
        out.append(commands.req(params, self.settings))
        return at

    def _touch(self, _data: bytes, at: int, params: list[bytes], out: list[Event]) -> int:
        out.append(commands.touch(params))
        return at

    def _cls(self, _data: bytes, at: int, _params: list[bytes], out: list[Event]) -> int:
        self.state = CLOSING
        out.append(Cls())
        return at

    def _nop(self, _data: bytes, at: int, _params: list[bytes], out: list[Event]) -> int:
        out.append(Nop())
        return at

    def _body(self, data: bytes, at: int, verb: str, limit: int) -> int:
        """Return the end of the body of IDENTIFY or AUTH whose size is `at`; _INCOMPLETE if it is incomplete."""
        if at + 4 > len(data):
            self._need = at + 4
            return _INCOMPLETE
        size = size_at(data, at)
        if size > limit:
            raise too_big("E_BAD_BODY", f"{verb} body", size, limit)
        if size <= 0:
            raise ProtocolError("E_BAD_BODY", f"{verb} invalid body size {size}", size=size)
        return self._stop(data, at + 4 + size)

    def _message(self, data: bytes, at: int, verb: str) -> int:
        """Return the end of the message of PUB or DPUB whose size is `at`; _INCOMPLETE if it is incomplete."""
        if at + 4 > len(data):
            self._need = at + 4
            return _INCOMPLETE
        size = size_at(data, at)
        if size <= 0:
            raise ProtocolError("E_BAD_MESSAGE", f"{verb} invalid message body size {size}", size=size)
        if size > self._max_msg_size:
            raise too_big("E_BAD_MESSAGE", f"{verb} message", size, self._max_msg_size)
        return self._stop(data, at + 4 + size)

    def _stop(self, data: bytes, stop: int) -> int:
        if stop <= len(data):
            return stop
        self._need = stop
        return _INCOMPLETE

    def _mpub_begin(self, data: bytes, at: int, params: list[bytes], out: list[Event]) -> int:
        topic = topic_of("MPUB", params)
        self._remember(params, topic)
        return self._mpub_body(data, at, topic, out)

    def _mpub_body(self, data: bytes, at: int, topic: str, out: list[Event]) -> int:
        if at + 4 > len(data):
            self._need = at + 4
            return _INCOMPLETE
        size = size_at(data, at)
        if size <= 0:
            raise ProtocolError("E_BAD_BODY", f"MPUB invalid body size {size}", size=size)
        if size > self.settings.max_body_size:
            raise too_big("E_BAD_BODY", "MPUB body", size, self.settings.max_body_size)
        self._mpub = MpubBody(topic, size, self.settings)
        return self._mpub_go_on(data, at + 4, out)

    def _mpub_go_on(self, data: bytes, pos: int, out: list[Event]) -> int:
        """Read complete messages of an MPUB's body; return the offset after them."""
        mpub = self._mpub
        assert mpub is not None
        pos = mpub.read(data, pos)
        if mpub.complete:
            self._mpub = None
            out.append(Mpub(mpub.topic, mpub.bodies))
        else:
            self._need = mpub.need
        return pos


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
