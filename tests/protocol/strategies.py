"""Conversations for properties: sessions that a well-behaved client could hold, and streams that nobody should send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from srtm.protocol import client, commands
from srtm.protocol.commands import Cls, Command, Dpub, Fin, Mpub, Nop, Pub, Rdy, Req, Sub, Touch
from srtm.protocol.names import MAGIC_V2, Settings

names = st.builds(
    lambda name, suffix: name + suffix,
    st.text("abcXYZ019._-", min_size=1, max_size=54),
    st.sampled_from(["", "#ephemeral"]),
)
bodies = st.one_of(st.binary(min_size=1, max_size=40), st.sampled_from([b"\n", b"PUB t\n", b"\0" * 8, b"  V2"]))
ids = st.integers(0, 2**64 - 1).map(lambda number: b"%016x" % number)


fins = ids.map(lambda each: Fin([each]))


def _each_fin(several: list[bytes]) -> bytes:
    return b"".join(map(client.fin, several))


_ENCODERS: dict[type, Callable[..., bytes]] = {
    Sub: client.sub, Mpub: client.mpub, Dpub: client.dpub, Rdy: client.rdy, Fin: _each_fin,
    Req: client.req, Touch: client.touch, Cls: client.cls, Nop: client.nop,
}  # fmt: skip


def encode(command: Command) -> bytes:
    if isinstance(command, Pub):
        return client.pub(command.topic, command.body)
    return _ENCODERS[type(command)](*command)


def publishing(settings: Settings) -> st.SearchStrategy[Any]:
    topics = st.one_of(st.just("t"), names)
    return st.one_of(
        st.builds(Pub, topics, bodies),
        st.builds(Mpub, topics, st.lists(bodies, min_size=1, max_size=5)),
        st.builds(Dpub, topics, st.integers(0, settings.max_req_timeout_ms), bodies),
        st.builds(Nop),
    )


def consuming(settings: Settings) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(Rdy, st.integers(0, settings.max_rdy_count)),
        fins,
        st.builds(Req, ids, st.integers(0, settings.max_req_timeout_ms)),
        st.builds(Touch, ids),
        publishing(settings),
    )


@st.composite
def sessions(draw: st.DrawFn, settings: Settings) -> tuple[bytes, list[Command]]:
    """What a client sends, without the magic, and the commands that it means."""
    commands: list[Command] = draw(st.lists(publishing(settings), max_size=6))
    if draw(st.booleans()):
        commands += [Sub(draw(names), draw(names)), *draw(st.lists(consuming(settings), max_size=8))]
        if draw(st.booleans()):
            commands += [Cls(), *draw(st.lists(fins, max_size=3))]
    return b"".join(map(encode, commands)), commands


VERBS = [*commands.ALLOWED, b"HELLO", b"", b"pub"]
sizes = st.one_of(
    st.integers(-(2**31), 2**31 - 1), st.integers(-2, 300), st.sampled_from([0, -1, 64, 65, 256, 257, 2**31 - 1])
).map(lambda size: size.to_bytes(4, "big", signed=True))
params = st.one_of(
    st.sampled_from([b"t", b"c", b"", b"0", b"1", b"-1", b"9" * 30, b"0123456789abcdef", b"\xff", b"a" * 65, b"t\r"]),
    st.binary(max_size=20),
)
JSON = [
    b"{}", b"null", b"[", b'{"heartbeat_interval":-1}', b'{"feature_negotiation":true,"snappy":true}', b"\xff\xfe",
    b'{"feature_negotiation":true,"deflate":true,"deflate_level":1}', b'{"srtm":{"publisher":"p","group":null}}',
    b'{"srtm":[]}', b'{"msg_timeout":1e400}', b'{"x":' + b"[" * 200, b'{"client_id":"\\udfff"}',
    b'{"a":' + b"9" * 200 + b"}",
]  # fmt: skip
fragments = st.one_of(
    st.builds(
        lambda verb, rest: b" ".join([verb, *rest]) + b"\n", st.sampled_from(VERBS), st.lists(params, max_size=3)
    ),
    sizes,
    st.sampled_from(JSON).map(lambda body: b"IDENTIFY\n" + len(body).to_bytes(4, "big") + body),
    st.binary(max_size=30),
    st.sampled_from([b"SUB t c\n", b"PUB t\n", b"MPUB t\n", b"\n", b"\0\0\0\x01x", b"x" * 300]),
)


@st.composite
def streams(draw: st.DrawFn, settings: Settings) -> bytes:
    """Bytes that are mostly wrong: fragments in any order, sessions with bytes changed or cut off, noise."""
    kind = draw(st.sampled_from(["fragments", "mutated", "truncated", "noise"]))
    if kind == "noise":
        return draw(st.sampled_from([b"", MAGIC_V2])) + draw(st.binary(max_size=100))
    if kind == "fragments":
        return MAGIC_V2 + b"".join(draw(st.lists(fragments, max_size=12)))
    sent, _ = draw(sessions(settings))
    stream = bytearray(MAGIC_V2 + sent)
    if kind == "truncated":
        return bytes(stream[: draw(st.integers(0, len(stream)))])
    for _ in range(draw(st.integers(1, 4))):
        stream[draw(st.integers(0, len(stream) - 1))] = draw(st.integers(0, 255))
    return bytes(stream)


@st.composite
def cuts(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """The data in pieces."""
    if draw(st.booleans()):
        return pieces(data, draw(st.sampled_from([1, 2, 3, 5, 16])))
    at = sorted(draw(st.lists(st.integers(0, len(data)), max_size=6)))
    return [data[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True)]


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]
