"""What NSQ calls valid: names of topics and channels, and every limit and default of nsqd 1.3.0.

In: names and numbers from peers. Out: yes or no, and the words of nsqd's errors. Units are in the names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MAGIC_V1: Final = b"  V1"
MAGIC_V2: Final = b"  V2"

VERSION: Final = "1.3.0"  # of nsqd and nsqlookupd, whose answers ours are; tools look at it
MAX_NAME: Final = 64  # characters, `#ephemeral` included
EPHEMERAL: Final = "#ephemeral"
ID_SIZE: Final = 16  # a message's id: 8 bytes as lower-case hex
MAX_LINE: Final = 16 * 1024  # a command's line with its newline; the size of nsqd's read buffer

_NAME = re.compile(rb"[.a-zA-Z0-9_-]+(?:#ephemeral)?")
_U64 = 2**64


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits of a server and what it offers; the defaults are nsqd's."""

    max_msg_size: int = 1024 * 1024
    max_body_size: int = 5 * 1024 * 1024
    max_identify_size: int = 5 * 1024 * 1024  # nsqd knows only max_body_size; JSON of that size stops a loop for long
    msg_timeout_ms: int = 60_000
    max_msg_timeout_ms: int = 15 * 60_000
    min_msg_timeout_ms: int = 1_000
    max_req_timeout_ms: int = 60 * 60_000
    max_rdy_count: int = 2_500
    heartbeat_ms: int = 30_000
    min_heartbeat_ms: int = 1_000
    max_heartbeat_ms: int = 60_000
    output_buffer_size: int = 16 * 1024
    min_output_buffer_size: int = 64
    max_output_buffer_size: int = 64 * 1024
    output_buffer_timeout_ms: int = 250
    min_output_buffer_timeout_ms: int = 25
    max_output_buffer_timeout_ms: int = 30_000
    max_sample_rate: int = 99
    tls_v1: bool = False  # a certificate is there
    tls_required: bool = False
    deflate: bool = True
    max_deflate_level: int = 6
    snappy: bool = True
    auth_required: bool = False
    version: str = VERSION


def valid_name(name: bytes | str) -> bool:
    """Whether NSQ accepts this as the name of a topic or a channel."""
    raw = name.encode("utf-8", "surrogateescape") if isinstance(name, str) else name
    return len(raw) <= MAX_NAME and _NAME.fullmatch(raw) is not None


def ephemeral(name: str) -> bool:
    """Whether a topic or channel lives only as long as someone uses it."""
    return name.endswith(EPHEMERAL)


def base10(digits: bytes) -> int | None:
    """An unsigned number as nsqd reads it: no sign, no digits means 0, and it wraps at 64 bits; None if it is none."""
    if not digits:
        return 0
    if not digits.isdigit():
        return None
    return int(digits[-64:]) % _U64  # 10^64 is a multiple of 2^64, so that earlier digits change nothing


def signed64(value: int) -> int:
    """The value as a 64-bit register with a sign holds it."""
    value %= _U64
    return value - _U64 if value >= _U64 // 2 else value


def quoted(raw: bytes) -> str:
    r"""The bytes in quotes as Go's %q writes them: "a\x00b", "\xff", "é"."""
    return '"' + "".join(_quoted(c) for c in raw.decode("utf-8", "surrogateescape")) + '"'


def _quoted(c: str) -> str:
    code = ord(c)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8
        return f"\\x{code - 0xDC00:02x}"
    if short := _SHORT.get(c):
        return short
    if c.isprintable():
        return c
    if code < 0x80:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_SHORT = {
    "\a": r"\a",
    "\b": r"\b",
    "\f": r"\f",
    "\n": r"\n",
    "\r": r"\r",
    "\t": r"\t",
    "\v": r"\v",
    "\\": r"\\",
    '"': r"\"",
}
