"""Names and numbers as nsqd takes them, beyond what the transcripts show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.protocol import gojson
from srtm.protocol.names import base10, ephemeral, quoted, signed64, valid_name


@pytest.mark.parametrize(
    ("name", "valid"),
    [("t", True), ("a.b_c-9", True), ("x" * 64, True), ("x" * 65, False), ("", False), ("x" * 54 + "#ephemeral", True),
     ("x" * 55 + "#ephemeral", False), ("t#eph", False), ("t\n", False), ("é", False), ("\udcff", False)],
)  # fmt: skip
def test_names(name: str, valid: bool) -> None:
    assert valid_name(name) == valid
    assert valid_name(name.encode("utf-8", "surrogateescape")) == valid


def test_ephemeral() -> None:
    assert ephemeral("t#ephemeral")
    assert not ephemeral("ephemeral")


@given(st.integers(0, 10**4000))
def test_numbers_wrap_as_registers_do(number: int) -> None:
    assert base10(str(number).encode()) == number % 2**64
    assert signed64(number) == int.from_bytes((number % 2**64).to_bytes(8, "big"), "big", signed=True)


@pytest.mark.parametrize("text", [b"-1", b"+1", b"1_0", b" 1", b"1 ", "١".encode(), b"0x1"])
def test_what_is_no_number(text: bytes) -> None:
    assert base10(text) is None


@given(st.binary(max_size=30))
def test_quoted_text_is_always_text(raw: bytes) -> None:
    quoted(raw).encode()


def test_json_too_deep_is_refused_and_not_an_accident() -> None:
    with pytest.raises(ValueError, match="deep"):
        gojson.read(b'{"x":' + b"[" * 100_000, {})
    with pytest.raises(ValueError, match="digits"):
        gojson.read(b'{"x":' + b"1" * 10_000 + b"}", {})
