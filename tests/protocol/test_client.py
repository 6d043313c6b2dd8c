"""The client's side: frames in any cut, orders, and what a client must not say."""

from __future__ import annotations

import json
import socket
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import InputError, ProtocolError
from srtm.protocol import client, frames, orders
from srtm.protocol.client import ClientProtocol, Error, Event, Heartbeat, Message, Response
from srtm.protocol.frames import Outgoing as Sent
from srtm.protocol.names import MAGIC_V2
from srtm.protocol.orders import Migrate, Throttle
from tests.protocol.strategies import bodies, cuts, ids, pieces
from tests.protocol.test_transcripts import nsqd

ID = b"0123456789abcdef"
REFUSED = ProtocolError("E_FIN_FAILED", "FIN x failed")


def plain(event: Event) -> object:
    if isinstance(event, Error):
        return event.problem.code, event.problem.text, event.problem.fatal
    return str(event) if isinstance(event, ProtocolError) else event


def read(parts: Iterable[bytes], max_frame: int = client.MAX_FRAME) -> list[object]:
    protocol = ClientProtocol(max_frame)
    return [plain(event) for part in parts for event in protocol.feed(part)]


FRAMES: list[tuple[bytes, list[object]]] = [
    (frames.OK, [Response(b"OK")]),
    (frames.CLOSE_WAIT, [Response(b"CLOSE_WAIT")]),
    (frames.HEARTBEAT, [Heartbeat()]),
    (frames.response(b""), [Response(b"")]),
    (frames.error(REFUSED), [("E_FIN_FAILED", "FIN x failed", False)]),
    (frames.error(ProtocolError("E_BAD_PROTOCOL")), [("E_BAD_PROTOCOL", "", True)]),
    (frames.messages([Sent(1, 2, ID, b"body")]), [Message(1, 2, ID, b"body")]),
    (frames.messages([Sent(-1, 65535, ID, b"")]), [Message(-1, 65535, ID, b"")]),
    (orders.encode(Throttle("t", 20)), [Throttle("t", 20)]),
    (orders.encode(Migrate("t", ("a:1", "b:2"))), [Migrate("t", ("a:1", "b:2"))]),
    (frames.response(b'_srtm_ {"order":"dance","topic":"t"}'), []),
    (frames.response(b"_srtm_ {"), ["E_INVALID cannot decode order"]),
    (frames.response(b'_srtm_ {"order":"migrate","topic":"t","to":"a:1"}'), ["E_INVALID cannot decode order"]),
    (pack(">ii", 3, 0), ["E_INVALID frame size 3 out of range 4-5242910"]),
    (pack(">ii", -1, 0), ["E_INVALID frame size -1 out of range 4-5242910"]),
    (pack(">ii", 5_242_911, 2), ["E_INVALID frame size 5242911 out of range 4-5242910"]),
    (pack(">ii", 4, 3), ["E_INVALID frame type 3 is unknown"]),
    (pack(">ii", 29, 2) + b"x" * 25, ["E_INVALID message frame of 29 bytes is too short"]),
]  # fmt: skip


@pytest.mark.parametrize("trailing", [b"", b"\0", frames.OK, frames.OK[:-1]])
@pytest.mark.parametrize(("sent", "wanted"), FRAMES, ids=lambda value: repr(value)[:50])
def test_frames_whole_byte_by_byte_and_with_trailing_bytes(sent: bytes, wanted: list[object], trailing: bytes) -> None:
    whole = read([sent + trailing])
    assert whole[: len(wanted)] == wanted
    assert read(pieces(sent + trailing, 1)) == whole


def test_the_layout_of_a_message() -> None:
    found = frames.messages([Sent(0x0102030405060708, 0x090A, ID, b"body")])
    assert found == bytes.fromhex("00000022 00000002 0102030405060708 090a") + ID + b"body"
    assert frames.message_id(255) == b"00000000000000ff"


def test_orders_are_json_in_a_response() -> None:
    found = orders.encode(Throttle("t", 20))
    assert found[8:] == b'_srtm_ {"order":"throttle","topic":"t","retry_after_ms":20}'
    assert orders.encode(Migrate("t", ("a:1",)))[8:] == b'_srtm_ {"order":"migrate","topic":"t","to":["a:1"]}'


def test_what_follows_the_answer_to_identify_is_left_alone() -> None:
    protocol = ClientProtocol()
    protocol.pause_after_response()
    assert protocol.feed(frames.HEARTBEAT + frames.response(b"{}") + b"\xff\x06") == [Heartbeat(), Response(b"{}")]
    assert protocol.paused
    assert protocol.take_unparsed() == b"\xff\x06"
    assert protocol.feed(frames.OK + frames.OK) == [Response(b"OK"), Response(b"OK")]


@pytest.mark.needs("nsqd")
def test_nsqd_is_read_through_an_upgrade(tmp_path: Path) -> None:
    """The compressed OK may come with the answer to IDENTIFY in one read."""
    protocol = ClientProtocol()
    inflate = zlib.decompressobj(-zlib.MAX_WBITS)
    with nsqd(tmp_path, ()) as address, socket.create_connection(address, timeout=10) as connection:
        connection.sendall(MAGIC_V2 + client.identify({"feature_negotiation": True, "deflate": True}))
        protocol.pause_after_response()
        while not protocol.paused:
            events = protocol.feed(connection.recv(65536))
        (settled,) = events
        assert isinstance(settled, Response)
        assert json.loads(settled.data)["deflate"]
        events = protocol.feed(inflate.decompress(protocol.take_unparsed()))
        while not events:
            events = protocol.feed(inflate.decompress(connection.recv(65536)))
        assert events == [Response(b"OK")]


@pytest.mark.parametrize(
    "say",
    [
        lambda: client.pub("a\nNOP", b""),
        lambda: client.pub("", b""),
        lambda: client.sub("t", "é"),
        lambda: client.sub("x" * 65, "c"),
        lambda: client.fin(b"short"),
        lambda: client.req(b"0123456\n89abcdef", 0),
        lambda: client.touch(b"0123456 89abcdef"),
    ],
)
def test_a_client_cannot_break_its_own_stream(say: Callable[[], bytes]) -> None:
    with pytest.raises(InputError):
        say()


message_events = st.builds(Message, st.integers(-(2**63), 2**63 - 1), st.integers(0, 65535), ids, bodies)


@given(st.data(), st.lists(message_events, max_size=8))
def test_messages_round_trip_in_any_cut(data: st.DataObject, events: list[Message]) -> None:
    sent = frames.messages([Sent(*event) for event in events])
    assert sent == b"".join(frames.messages([Sent(*event)]) for event in events)
    assert read(data.draw(cuts(sent))) == events


@given(st.data())
def test_nonsense_gives_errors_in_bounds_and_the_same_for_any_cut(data: st.DataObject) -> None:
    head = st.builds(lambda size, kind: pack(">ii", size, kind), st.integers(-2, 80), st.integers(-1, 3))
    part = st.one_of(head, st.binary(max_size=40), st.sampled_from([sent for sent, _ in FRAMES]))
    sent = b"".join(data.draw(st.lists(part, max_size=8)))
    parts = data.draw(cuts(sent))
    assert read(parts, 64) == read([sent], 64)
    protocol = ClientProtocol(64)
    for part_ in parts:
        protocol.feed(part_)
        assert protocol.buffered <= 68
