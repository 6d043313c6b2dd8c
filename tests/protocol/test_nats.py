"""NATS' protocol, the client's side: events in any cut, and what no server says."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import ProtocolError
from srtm.protocol import nats
from srtm.protocol.nats import Err, Info, Msg, NatsProtocol, Ping, Pong
from tests.protocol.strategies import cuts

BODIES = st.one_of(st.binary(max_size=40), st.sampled_from([b"\r\n", b"PING\r\n", b"MSG a 1 5\r\n"]))
SUBJECTS = st.sampled_from([b"a", b"_INBOX.x.17", b"a.b.c"])


def header(status: int) -> bytes:
    return b"NATS/1.0 %d\r\n\r\n" % status if status else b"NATS/1.0\r\nA: b\r\nNats-Msg-Id: x-1\r\nC: d\r\n\r\n"


@st.composite
def conversations(draw: st.DrawFn) -> tuple[bytes, list[Any]]:
    """What a server sends, and what it means."""
    data, events = b"", list[Any]()
    for kind in draw(st.lists(st.sampled_from(["msg", "hmsg", "ping", "pong", "ok", "err", "info"]), max_size=8)):
        subject, body = draw(SUBJECTS), draw(BODIES)
        reply = draw(st.sampled_from([b"", b"answer.here "]))
        if kind == "msg":
            data += b"MSG %b 1 %b%d\r\n%b\r\n" % (subject, reply, len(body), body)
            events.append(Msg(subject, 0, body, reply=reply.strip()))
        elif kind == "hmsg":
            status = draw(st.sampled_from([0, 503]))
            head = header(status)
            data += b"HMSG %b 1 %b%d %d\r\n%b%b\r\n" % (subject, reply, len(head), len(head) + len(body), head, body)
            events.append(Msg(subject, status, body, head, reply.strip()))
        elif kind == "ok":
            data += b"+OK\r\n"
        elif kind == "err":
            data += b"-ERR 'Stale Connection'\r\n"
            events.append(Err("Stale Connection"))
        elif kind == "info":
            data += b'INFO {"max_payload": 5}\r\n'
            events.append(Info({"max_payload": 5}))
        else:
            data += nats.PING if kind == "ping" else nats.PONG
            events.append(Ping() if kind == "ping" else Pong())
    return data, events


@given(st.data(), conversations())
def test_any_cut_gives_the_same_events(data: st.DataObject, conversation: tuple[bytes, list[Any]]) -> None:
    said, events = conversation
    protocol = NatsProtocol()
    assert [event for piece in data.draw(cuts(said)) for event in protocol.feed(piece)] == events


@pytest.mark.parametrize(
    "data",
    [
        b"HELLO\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"MSG a 1 x\r\n",
        b"MSG a\r\n",
        b"MSG a 1 -5\r\n",
        b"MSG a 1 99999999999\r\n",
        b"HMSG a 1 9 5\r\n",
        b"MSG a 1 r x 5\r\n",
        b"INFO {\r\n",
        b"INFO [1]\r\n",
        b"x" * (nats.MAX_LINE + 1),
    ],
)
def test_what_no_server_of_nats_says(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        NatsProtocol().feed(data)


def test_the_id_of_a_message_is_in_its_header() -> None:
    assert Msg(b"a", 0, b"", header(0)).message_id == b"x-1"
    assert Msg(b"a", 503, b"", header(503)).message_id == b""


def test_commands() -> None:
    assert nats.publish(b"t", b"r", b"ab") == b"PUB t r 2\r\nab\r\n"
    assert nats.subscribe(b"r.*", 1) == b"SUB r.* 1\r\n"
    assert nats.connect(verbose=False) == b'CONNECT {"verbose":false}\r\n'
    head = b"NATS/1.0\r\nNats-Msg-Id: x-1\r\nSrtm-Broker: b\r\nSrtm-Publisher: p\r\nSrtm-Arrival: 17\r\n\r\n"
    said = nats.publish_once(b"t", b"r", b"x-1", b"ab", nats.origin("b", "p", 17))
    assert said == b"HPUB t r %d %d\r\n%bab\r\n" % (len(head), len(head) + 2, head)


@given(st.text(min_size=1), st.text(min_size=1))
def test_where_a_message_comes_from_is_said_in_lines_that_no_name_can_break(broker: str, publisher: str) -> None:
    said = nats.publish_once(b"t", b"r", b"x-1", b"ab", nats.origin(broker, publisher, 17))
    head = said.partition(b"\r\n")[2].removesuffix(b"ab\r\n")
    assert head.count(b"\r\n") == 6
    message = Msg(b"t", 0, b"ab", head)
    assert [unquote(message.value(name).decode("ascii")) for name in (nats.BROKER, nats.PUBLISHER)] == [
        broker.encode("utf-8", "replace").decode(),
        publisher.encode("utf-8", "replace").decode(),
    ]
    assert (message.message_id, message.value(nats.ARRIVAL), message.value(b"Else")) == (b"x-1", b"17", b"")
