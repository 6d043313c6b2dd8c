"""What a server of V2 sends: frames.

In: responses, errors, messages. Out: bytes, for one write where there are many. All numbers are big-endian.

    frame     [size 4][type 4][data]                              size counts the type and the data
    type      0 response, 1 error, 2 message
    message   [timestamp_ns 8][attempts 2][id 16, hex][body]      the data of a message frame
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Final

from srtm.errors import ProtocolError
from srtm.protocol.names import ID_SIZE

RESPONSE: Final = 0
ERROR: Final = 1
MESSAGE: Final = 2

FRAME_HEAD: Final = Struct(">ii")
MESSAGE_HEAD: Final = Struct(f">qH{ID_SIZE}s")
MAX_ATTEMPTS: Final = 2**16 - 1

_MESSAGE_FRAME: Final = Struct(f">iiqH{ID_SIZE}s")
_pack_message = _MESSAGE_FRAME.pack
_REST: Final = _MESSAGE_FRAME.size - 4  # what a message frame's size counts beside the body


def response(data: bytes) -> bytes:
    """A response frame."""
    return FRAME_HEAD.pack(len(data) + 4, RESPONSE) + data


def error(problem: ProtocolError) -> bytes:
    """An error frame, in the words of nsqd."""
    return FRAME_HEAD.pack(len(problem.wire) + 4, ERROR) + problem.wire


OK: Final = response(b"OK")
HEARTBEAT: Final = response(b"_heartbeat_")
CLOSE_WAIT: Final = response(b"CLOSE_WAIT")


def append_message(out: bytearray, timestamp_ns: int, attempts: int, message_id: bytes, body: bytes) -> None:
    """Append a message frame to what will be written; `attempts` counts this delivery."""
    out += _pack_message(len(body) + _REST, MESSAGE, timestamp_ns, attempts, message_id)
    out += body


def messages(batch: Iterable[tuple[int, int, bytes, bytes]]) -> bytes:
    """The frames of many messages (timestamp_ns, attempts, id, body), for one write."""
    parts: list[bytes] = []
    for timestamp_ns, attempts, message_id, body in batch:
        parts += (_pack_message(len(body) + _REST, MESSAGE, timestamp_ns, attempts, message_id), body)
    return b"".join(parts)


def message_id(number: int) -> bytes:
    """A 64-bit number as a message's id."""
    return b"%016x" % number
