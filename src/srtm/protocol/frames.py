"""The frames that a server of V2 sends.

In: responses, errors, messages. Out: bytes, many frames in one write. All numbers are big-endian.

    frame     [size 4][type 4][data]                              size counts the type and the data
    type      0 response, 1 error, 2 message
    message   [timestamp_ns 8][attempts 2][id 16, hex][body]      the data of a message frame
"""

from __future__ import annotations

from struct import Struct
from typing import Final, TypeVar

from srtm.errors import ProtocolError
from srtm.protocol.names import ID_SIZE

RESPONSE: Final = 0
ERROR: Final = 1
MESSAGE: Final = 2

FRAME_HEAD: Final = Struct(">ii")
MESSAGE_HEAD: Final = Struct(f">qH{ID_SIZE}s")
MAX_ATTEMPTS: Final = 2**16 - 1

_MESSAGE_FRAME: Final = Struct(f">iiqH{ID_SIZE}s")
_pack_message: Final = _MESSAGE_FRAME.pack
_REST: Final = _MESSAGE_FRAME.size - 4  # the part of a message frame's size beside the body


def response(data: bytes) -> bytes:
    """Return a response frame."""
    return FRAME_HEAD.pack(len(data) + 4, RESPONSE) + data


def error(problem: ProtocolError) -> bytes:
    """Return an error frame, in the words of nsqd."""
    return FRAME_HEAD.pack(len(problem.wire) + 4, ERROR) + problem.wire


OK: Final = response(b"OK")
HEARTBEAT: Final = response(b"_heartbeat_")
CLOSE_WAIT: Final = response(b"CLOSE_WAIT")


class Outgoing:
    """A message to send; `attempts` includes this delivery."""

    __slots__ = ("arrival_ns", "attempts", "body", "id")

    def __init__(self, arrival_ns: int, attempts: int, id: bytes, body: bytes) -> None:  # noqa: A002
        self.arrival_ns = arrival_ns
        self.attempts = attempts
        self.id = id
        self.body = body


M = TypeVar("M", bound=Outgoing)


def messages(batch: list[M]) -> bytes:
    """Return the frames of many messages, for one write."""
    parts: list[bytes] = []
    for message in batch:
        body = message.body
        parts.append(_pack_message(len(body) + _REST, MESSAGE, message.arrival_ns, message.attempts, message.id))
        parts.append(body)
    return b"".join(parts)


def message_id(number: int) -> bytes:
    """Return a 64-bit number as a message id."""
    return b"%016x" % number
