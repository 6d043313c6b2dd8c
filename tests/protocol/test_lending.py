"""Frames between brokers that lend: whatever is said is heard, however it is cut, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import ProtocolError
from srtm.protocol.lending import (
    Answers,
    Asks,
    Challenge,
    Decoder,
    Entry,
    Hello,
    Message,
    Refused,
    Welcome,
    encode,
    hello,
    proves,
)

u64 = st.integers(0, 2**64 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)
topics = st.from_regex(r"[.a-zA-Z0-9_-]{1,54}(#ephemeral)?", fullmatch=True)
names = st.text(min_size=1, max_size=64)
entries = st.lists(st.builds(Entry, topics, u64, u64, st.integers(0, 2**63 - 1), i64), min_size=1, max_size=5)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Challenge, st.binary(min_size=16, max_size=16)),
    st.builds(hello, names, u64, st.binary(min_size=16, max_size=16), st.none() | names),
    st.builds(Welcome, names, u64),
    st.builds(Refused, st.text(max_size=50)),
    st.builds(Asks, entries),
    st.builds(Answers, entries),
)


@given(st.lists(messages, max_size=5), st.lists(st.integers(1, 40), min_size=1))
def test_what_is_said_is_heard_however_it_is_cut(said: list[Message], sizes: list[int]) -> None:
    wire, decoder, heard, at = b"".join(map(encode, said)), Decoder(), list[Message](), 0
    while at < len(wire):
        size = sizes[at % len(sizes)]
        heard += decoder.feed(wire[at : at + size])
        at += size
    assert heard == said


@given(st.lists(messages, min_size=1, max_size=3), st.data())
def test_other_bytes_are_refused_or_are_other_messages(said: list[Message], data: st.DataObject) -> None:
    wire = bytearray(b"".join(map(encode, said)))
    for _ in range(data.draw(st.integers(1, 4))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    try:
        heard = Decoder().feed(bytes(wire))
    except ProtocolError:
        return
    for message in heard:
        assert Decoder().feed(encode(message)) == [message]
        if isinstance(message, Asks | Answers):
            assert all(entry.ptok >= 0 for entry in message.entries)


@given(st.binary(max_size=200))
def test_noise_is_refused_or_incomplete(noise: bytes) -> None:
    try:
        heard = Decoder().feed(noise)
    except ProtocolError:
        return
    assert sum(len(encode(message)) for message in heard if not isinstance(message, Refused)) <= len(noise)


def test_many_entries_are_several_frames() -> None:
    many = [Entry("a" * 64, number, number, 1, -1) for number in range(2_000)]
    heard = Decoder().feed(encode(Asks(many)))
    assert len(heard) > 1
    assert [entry for message in heard if isinstance(message, Asks) for entry in message.entries] == many


@pytest.mark.parametrize(
    "entry", [Entry("t", 1, 1, 2**63, 0), Entry("t", 1, 1, 0, -(2**63) - 1), Entry("t", -1, 1, 0, 0)]
)
def test_a_number_that_does_not_fit_is_not_sent(entry: Entry) -> None:
    with pytest.raises(ProtocolError, match="cannot send"):
        encode(Asks([entry]))


@pytest.mark.parametrize(
    "wire",
    [
        b"\x00\x00\x00\x00\x09",  # no such kind
        b"\x01\x00\x01\x00\x05",  # more than a frame may have
        b"\x01\x00\x00\x00\x05x",  # a piece of an entry
        encode(Asks([Entry("t", 1, 1, 1, 1)])).replace(b"t", b"!"),
        b"\x02\x00\x00\x00\x01ab",  # a short nonce
    ],
)
def test_what_nobody_says_is_refused(wire: bytes) -> None:
    with pytest.raises(ProtocolError):
        Decoder().feed(wire)


def test_a_proof_needs_the_same_token_nonce_name_and_incarnation() -> None:
    nonce = bytes(16)
    said = hello("a", 1, nonce, "secret")
    assert proves(said, nonce, "secret")
    assert proves(hello("a", 1, nonce, None), nonce, None)
    assert not proves(said, nonce, "other")
    assert not proves(said, nonce, None)
    assert not proves(said, b"1" * 16, "secret")
    assert not proves(Hello("b", 1, said.proof), nonce, "secret")
    assert not proves(Hello("a", 2, said.proof), nonce, "secret")
