"""NSQ's rules: names of topics and channels, and every limit and default of nsqd 1.3.0.

In: names and numbers from peers. Out: whether they are valid, and text for nsqd's errors. Units are in the names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MAGIC_V1: Final = b"  V1"
MAGIC_V2: Final = b"  V2"

VERSION: Final = "1.3.0"  # of nsqd and nsqlookupd, whose answers we give; tools check it
MAX_NAME: Final = 64  # characters, `#ephemeral` included
EPHEMERAL: Final = "#ephemeral"
ID_SIZE: Final = 16  # a message's id: 8 bytes as lower-case hex
MAX_LINE: Final = 16 * 1024  # a command's line with its newline; the size of nsqd's read buffer

_NAME = re.compile(rb"[.a-zA-Z0-9_-]+(?:#ephemeral)?")
_U64 = 2**64


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits and features of a server; the defaults are nsqd's."""

    max_msg_size: int = 1024 * 1024
    max_body_size: int = 5 * 1024 * 1024
    max_identify_size: int = (
        5 * 1024 * 1024
    )  # nsqd has only max_body_size, but JSON of that size blocks a loop for long
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
    tls_v1: bool = False  # the server has a certificate
    tls_required: bool = False
    deflate: bool = True
    max_deflate_level: int = 6
    snappy: bool = True
    auth_required: bool = False
    version: str = VERSION


def valid_name(name: bytes | str) -> bool:
    """Whether NSQ accepts a name of a topic or channel."""
    raw = name.encode("utf-8", "surrogateescape") if isinstance(name, str) else name
    return len(raw) <= MAX_NAME and _NAME.fullmatch(raw) is not None


def ephemeral(name: str) -> bool:
    """Whether a topic or channel is deleted when its last user leaves."""
    return name.endswith(EPHEMERAL)


def base10(digits: bytes) -> int | None:
    """Read a number as nsqd does: without a sign, 0 if empty, modulo 2^64; None if it is not a number."""
    if not digits:
        return 0
    if not digits.isdigit():
        return None
    return int(digits[-64:]) % _U64  # 10^64 is a multiple of 2^64, so earlier digits change nothing


def signed64(value: int) -> int:
    """Wrap a value to a signed 64-bit integer."""
    value %= _U64
    return value - _U64 if value >= _U64 // 2 else value


def quoted(raw: bytes) -> str:
    r"""Quote bytes as Go's %q does: "a\x00b", "\xff", "é"."""
    return '"' + "".join(_quoted(c) for c in raw.decode("utf-8", "surrogateescape")) + '"'


def _quoted(c: str) -> str:
    code = ord(c)
    if 0xDC80 <= code <= 0xDCFF:  # an invalid UTF-8 byte
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
