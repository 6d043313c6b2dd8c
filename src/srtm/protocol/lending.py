"""Tokens between brokers on the wire: frames of asks and answers (docs/adr/0021-lending.md).

In: bytes of another broker, in reads of any size. Out: the messages that they complete, or a ProtocolError. Whoever
connects says `MAGIC` or `MAGIC_TLS`, and nothing else until it is answered:

    connecting  "  L1"                              or "  LT" to be answered BEGIN_TLS, and go on inside of TLS
    listening   CHALLENGE nonce
    connecting  HELLO name, incarnation, proof      the proof that it has the control token: HMAC-SHA256 of all else
    listening   WELCOME name, incarnation           or REFUSED reason, and the end
    connecting  ASKS entries                        listening: ANSWERS entries; both at any time from now on

    frame       [size of the body 4][kind 1][body]
    entry       [birth 8][id 8][pico-tokens 8][level 8][size of the name 1][name of the topic]

All numbers are little-endian; tokens and levels are signed 64-bit integers, and what does not fit is refused.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable
from struct import Struct, error
from typing import Final, NamedTuple

from srtm.errors import ProtocolError
from srtm.protocol.names import valid_name

MAGIC: Final = b"  L1"
MAGIC_TLS: Final = b"  LT"
MAX_BODY: Final = 64 * 1024
NONCE_SIZE: Final = 16
MOST_PTOK: Final = 2**62  # of a bucket whose tokens can be lent: twice as much still fits
_AT_ONCE: Final = 512  # entries of a frame
_MAX_TEXT: Final = 1024
_HEAD: Final = Struct("<IB")
_ENTRY: Final = Struct("<QQqqB")
_NUMBER: Final = Struct("<Q")
_PROOF_SIZE: Final = hashlib.sha256().digest_size


class Entry(NamedTuple):
    """An ask or an answer: tokens of a topic's contract that are wanted or lent, and the level of who says it."""

    topic: str
    birth: int  # of the contract
    id: int  # of the ask
    ptok: int
    level_ptok: int


class BeginTls(NamedTuple):
    """Begin the handshake: everything else is said inside of TLS."""


class Challenge(NamedTuple):
    """Prove that you have the control token, by a proof of this nonce."""

    nonce: bytes


class Hello(NamedTuple):
    """Who connects."""

    name: str
    incarnation: int
    proof: bytes


class Welcome(NamedTuple):
    """Who listens; asks may follow."""

    name: str
    incarnation: int


class Refused(NamedTuple):
    """Why there is no lending; the connection ends."""

    reason: str


class Asks(NamedTuple):
    """Asks for tokens."""

    entries: list[Entry]


class Answers(NamedTuple):
    """Answers to asks."""

    entries: list[Entry]


Message = BeginTls | Challenge | Hello | Welcome | Refused | Asks | Answers


def hello(name: str, incarnation: int, nonce: bytes, token: str | None) -> Hello:
    """The answer to a challenge, with or without a control token."""
    signed = nonce + _NUMBER.pack(incarnation) + name.encode()
    return Hello(name, incarnation, hmac.digest((token or "").encode(), signed, "sha256"))


def proves(said: Hello, nonce: bytes, token: str | None) -> bool:
    """Whether a broker has the same token."""
    return hmac.compare_digest(said.proof, hello(said.name, said.incarnation, nonce, token).proof)


def encode(message: Message) -> bytes:
    """Return a message as bytes: one frame, or several with many entries; ProtocolError if a number does not fit."""
    try:
        match message:
            case BeginTls():
                return _frame(_BEGIN_TLS, b"")
            case Challenge(nonce):
                return _frame(_CHALLENGE, nonce)
            case Hello(name, incarnation, proof):
                return _frame(_HELLO, _NUMBER.pack(incarnation) + proof + name.encode())
            case Welcome(name, incarnation):
                return _frame(_WELCOME, _NUMBER.pack(incarnation) + name.encode())
            case Refused(reason):
                return _frame(_REFUSED, reason.encode()[:_MAX_TEXT])
            case Asks(entries) | Answers(entries):
                kind = _ASKS if isinstance(message, Asks) else _ANSWERS
                starts = range(0, len(entries), _AT_ONCE)
                return b"".join(_frame(kind, _packed(entries[at : at + _AT_ONCE])) for at in starts)
    except error as problem:
        raise ProtocolError("E_INVALID", f"cannot send {message}: {problem}") from None


def _frame(kind: int, body: bytes) -> bytes:
    return _HEAD.pack(len(body), kind) + body


def _packed(entries: Iterable[Entry]) -> bytes:
    parts: list[bytes] = []
    for topic, birth, number, ptok, level_ptok in entries:
        name = topic.encode()
        parts += (_ENTRY.pack(birth, number, ptok, level_ptok, len(name)), name)
    return b"".join(parts)


class Decoder:
    """One broker's bytes; after an error nothing more is read."""

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return all messages that these bytes complete."""
        self._pending += data
        whole, at, out = bytes(self._pending), 0, list[Message]()
        while len(whole) - at >= _HEAD.size:
            size, kind = _HEAD.unpack_from(whole, at)
            read = _READ.get(kind)
            if read is None or size > MAX_BODY:
                raise ProtocolError("E_INVALID", f"frame of kind {kind} with {size} bytes")
            start = at + _HEAD.size
            if len(whole) - start < size:
                break
            at = start + size
            out.append(read(whole[start:at]))
        del self._pending[:at]
        return out


def _challenge(body: bytes) -> Challenge:
    if len(body) != NONCE_SIZE:
        raise ProtocolError("E_INVALID", f"challenge of {len(body)} bytes")
    return Challenge(body)


def _hello(body: bytes) -> Hello:
    incarnation, rest = _numbered(body)
    return Hello(_text(rest[_PROOF_SIZE:]), incarnation, rest[:_PROOF_SIZE])


def _welcome(body: bytes) -> Welcome:
    incarnation, rest = _numbered(body)
    return Welcome(_text(rest), incarnation)


def _refused(body: bytes) -> Refused:
    return Refused(body[:_MAX_TEXT].decode("utf-8", "backslashreplace"))


def _numbered(body: bytes) -> tuple[int, bytes]:
    if len(body) < _NUMBER.size:
        raise ProtocolError("E_INVALID", f"greeting of {len(body)} bytes")
    return int(_NUMBER.unpack_from(body)[0]), body[_NUMBER.size :]


def _text(data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = ""
    if not text or len(text) > _MAX_TEXT:
        raise ProtocolError("E_INVALID", f"invalid name of a broker: {data[:_MAX_TEXT]!r}")
    return text


def _entries(body: bytes) -> list[Entry]:
    entries, at = [], 0
    while at < len(body):
        start = at + _ENTRY.size
        if start > len(body):
            raise ProtocolError("E_INVALID", f"{len(body) - at} bytes of an entry")
        birth, number, ptok, level_ptok, size = _ENTRY.unpack_from(body, at)
        at = start + size
        name = body[start:at]
        if len(name) < size or ptok < 0 or not valid_name(name):
            raise ProtocolError("E_INVALID", f"invalid entry of topic {name!r}: {ptok} pico-tokens")
        entries.append(Entry(name.decode(), birth, number, ptok, level_ptok))
    return entries


_CHALLENGE, _HELLO, _WELCOME, _REFUSED, _ASKS, _ANSWERS, _BEGIN_TLS = range(1, 8)
_READ: Final[dict[int, Callable[[bytes], Message]]] = {
    _CHALLENGE: _challenge,
    _HELLO: _hello,
    _WELCOME: _welcome,
    _REFUSED: _refused,
    _ASKS: lambda body: Asks(_entries(body)),
    _ANSWERS: lambda body: Answers(_entries(body)),
    _BEGIN_TLS: lambda _: BeginTls(),
}
