"""The body of an MPUB, which may arrive in many reads: `[count 4]{[size 4][body]}…`

In: bytes, in reads of any size. Out: complete messages. A size is checked before a byte of its body is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from srtm.errors import ProtocolError
from srtm.protocol.commands import too_big

if TYPE_CHECKING:
    from mypy_extensions import i64

    from srtm.protocol.names import Settings

SIZE: Final = 4  # bytes of a number that says how many follow
_LEAST: Final = SIZE + 1  # bytes of a message with its size


def size_at(data: bytes, at: int) -> int:
    """Return the size whose four bytes begin `at`: big-endian and signed, as in all of V2."""
    size: i64 = data[at]
    size = size << 24 | data[at + 1] << 16 | data[at + 2] << 8 | data[at + 3]
    return size - 0x1_0000_0000 if size > 0x7FFF_FFFF else size


class MpubBody:
    """An MPUB whose body is incomplete; it needs at least `need` more bytes to continue."""

    __slots__ = ("_count", "_exact", "_left", "_settings", "bodies", "need", "topic")

    def __init__(self, topic: str, size: int, settings: Settings, *, exact: bool = True) -> None:
        """With `exact`, the messages must fill `size`; otherwise bytes after them are ignored."""
        self.topic = topic
        self._exact = exact
        self.bodies: list[bytes] = []
        self.need = 4
        self._left = size  # unread bytes of the body
        self._count = -1  # announced messages; -1 until that is read
        self._settings = settings

    @property
    def complete(self) -> bool:
        """Whether all messages are complete."""
        return len(self.bodies) == self._count

    def read(self, data: bytes, pos: int) -> int:
        """Read complete messages from `pos` on; return the offset after them."""
        end = len(data)
        if self._count < 0:
            if self._left < 4:
                raise self.cut(0)
            if pos + 4 > end:
                self.need = 4
                return pos
            self._count = size_at(data, pos)
            if not 0 < self._count <= (self._settings.max_body_size - 4) // _LEAST:
                raise ProtocolError("E_BAD_BODY", f"MPUB invalid message count {self._count}", count=self._count)
            pos += 4
            self._left -= 4
        bodies, max_msg_size = self.bodies, self._settings.max_msg_size
        limit = pos + self._left
        begin = pos
        for _ in range(self._count - len(bodies)):
            start = pos + 4
            if start > end or start > limit:
                self.need = 4
                break
            size = size_at(data, pos)
            stop = start + size
            if not 0 < size <= max_msg_size:
                raise self._bad_message(size)
            if stop > end or stop > limit:
                self.need = 4 + size
                break
            bodies.append(data[start:stop])
            pos = stop
        self._left -= pos - begin
        if len(bodies) < self._count:
            if self._left < self.need:
                raise self.cut(self.need - 1)
        elif self._left and self._exact:
            raise ProtocolError(
                "E_BAD_BODY", f"MPUB body is {self._left} bytes longer than its messages", left=self._left
            )
        return pos

    def _bad_message(self, size: int) -> ProtocolError:
        limit = self._settings.max_msg_size
        if size > limit:
            return too_big("E_BAD_MESSAGE", "MPUB message", size, limit)
        return ProtocolError("E_BAD_MESSAGE", f"MPUB invalid message({len(self.bodies)}) body size {size}", size=size)

    def cut(self, seen: int) -> ProtocolError:
        """Return the error of an MPUB that ends before its messages do, `seen` bytes into one."""
        if self._count < 0:
            return ProtocolError("E_BAD_BODY", "MPUB failed to read message count")
        if seen < 4:
            return ProtocolError("E_BAD_MESSAGE", f"MPUB failed to read message({len(self.bodies)}) body size")
        return ProtocolError("E_BAD_MESSAGE", "MPUB failed to read message body")
