"""nsqlookupd's V1: every command and error, in any cut, and against a real nsqlookupd."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import InputError, ProtocolError
from srtm.protocol import lookup
from srtm.protocol.lookup import Identify, LookupClient, LookupServer, PeerInfo, Ping, Register, Unregister
from srtm.protocol.names import MAGIC_V1, MAX_LINE
from tests.programs import nsqlookupd
from tests.protocol.strategies import cuts, names, pieces
from tests.protocol.transcripts import n, sized

PEER = PeerInfo("127.0.0.1", "host", 4150, 4151, "1.3.0")
ME = lookup.identify(PEER)
JSON = b"IDENTIFY\n" + sized(
    b'{"Broadcast_Address":"127.0.0.1","hostname":"host","tcp_port":1,"http_port":2,"version":"v"}'
)

CASES: list[tuple[bytes, list[object]]] = [
    (b"", []),
    (b"PING\n", [Ping()]),
    (b" \tPING\r\n", [Ping()]),
    (b"PING x\n", [Ping()]),
    (ME, [Identify(PEER)]),
    (JSON, [Identify(PeerInfo("127.0.0.1", "host", 1, 2, "v"))]),
    (ME + b"REGISTER t\nREGISTER t c\n", [Identify(PEER), Register("t", None), Register("t", "c")]),
    (ME + b"UNREGISTER t\nUNREGISTER t c\n", [Identify(PEER), Unregister("t", None), Unregister("t", "c")]),
    (ME + b"REGISTER t c x\nREGISTER t \n", [Identify(PEER), Register("t", "c"), Register("t", None)]),
    (ME + b"REGISTER t  x\n", [Identify(PEER), Register("t", None)]),
    (b"HELLO\n", [b"E_INVALID invalid command HELLO"]),
    (b"\n", [b"E_INVALID invalid command "]),
    (b"\xff\n", [b"E_INVALID invalid command \xff"]),
    (b"REGISTER t\n", [b"E_INVALID client must IDENTIFY"]),
    (b"UNREGISTER t\n", [b"E_INVALID client must IDENTIFY"]),
    (ME + b"REGISTER\n", [Identify(PEER), b"E_INVALID REGISTER insufficient number of params"]),
    (ME + b"REGISTER \n", [Identify(PEER), b"E_INVALID REGISTER insufficient number of params"]),
    (ME + b"UNREGISTER $ \n", [Identify(PEER), b"E_BAD_TOPIC UNREGISTER topic name '$' is not valid"]),
    (ME + b"REGISTER  t\n", [Identify(PEER), b"E_BAD_TOPIC REGISTER topic name '' is not valid"]),
    (ME + b"REGISTER t \xff$\n", [Identify(PEER), b"E_BAD_CHANNEL REGISTER channel name '\xff$' is not valid"]),
    (ME + ME, [Identify(PEER), b"E_INVALID cannot IDENTIFY again"]),
    (b"IDENTIFY\n" + n(0), [b"E_BAD_BODY IDENTIFY failed to decode JSON body"]),
    (b"IDENTIFY\n" + sized(b"[]"), [b"E_BAD_BODY IDENTIFY failed to decode JSON body"]),
    (b"IDENTIFY\n" + sized(b'{"tcp_port":"1"}'), [b"E_BAD_BODY IDENTIFY failed to decode JSON body"]),
    (b"IDENTIFY\n" + sized(b"{}"), [b"E_BAD_BODY IDENTIFY missing fields"]),
    (lookup.identify(PEER._replace(http_port=0)), [b"E_BAD_BODY IDENTIFY missing fields"]),
]  # fmt: skip
OURS: list[tuple[bytes, list[object]]] = [  # nsqlookupd ends as a whole at the first, and keeps the others' bytes
    (b"IDENTIFY\n" + n(-1), [b"E_BAD_BODY IDENTIFY invalid body size -1"]),
    (b"IDENTIFY\n" + n(65537), [b"E_BAD_BODY IDENTIFY body too big 65537 > 65536"]),
    (b"x" * MAX_LINE, [b"E_INVALID line is longer than 16384 bytes"]),
]


def read(parts: Iterable[bytes]) -> list[object]:
    protocol = LookupServer()
    found = [event for part in parts for event in protocol.feed(part)]
    return [event.wire if isinstance(event, ProtocolError) else event for event in found]


@pytest.mark.parametrize("trailing", [b"", b"PING\n", b"PI"])
@pytest.mark.parametrize(("sent", "wanted"), [*CASES, *OURS], ids=lambda value: repr(value)[:50])
def test_commands_whole_byte_by_byte_and_with_trailing_bytes(
    sent: bytes, wanted: list[object], trailing: bytes
) -> None:
    stream = MAGIC_V1 + sent + trailing
    whole = read([stream])
    assert whole[: len(wanted)] == wanted
    assert read(pieces(stream, 1)) == whole


def test_the_magic() -> None:
    assert read([b"  V2"]) == [b"E_BAD_PROTOCOL"]
    assert read([b"  "]) == []


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"", None),
        (b"PIN", None),
        (b"IDENTIFY\n\0", "E_BAD_BODY IDENTIFY failed to read body size"),
        (b"IDENTIFY\n" + n(2) + b"{", "E_BAD_BODY IDENTIFY failed to read body"),
    ],
)
def test_the_end(sent: bytes, error: str | None) -> None:
    protocol = LookupServer()
    protocol.feed(MAGIC_V1 + sent)
    assert (str(found) if (found := protocol.end()) else None) == error
    assert protocol.feed(b"PING\n") == []


def test_responses_in_any_cut() -> None:
    sent = (
        lookup.response()
        + lookup.peer_response(PEER)
        + lookup.error(ProtocolError("E_INVALID", "client must IDENTIFY"))
    )
    for size in (1, 3, 1000):
        protocol = LookupClient()
        ok, peer, error = [event for part in pieces(sent, size) for event in protocol.feed(part)]
        assert ok == b"OK"
        assert isinstance(peer, bytes)
        assert lookup.read_peer(peer) == PEER
        assert isinstance(error, ProtocolError)
        assert error.wire == b"E_INVALID client must IDENTIFY"
        assert protocol.buffered == 0
    for size in (-1, lookup.MAX_RESPONSE + 1):
        assert isinstance(LookupClient().feed(n(size))[0], ProtocolError)
    with pytest.raises(ProtocolError, match="cannot decode the response to IDENTIFY"):
        lookup.read_peer(b"OK")


def test_a_broker_cannot_break_its_own_stream() -> None:
    with pytest.raises(InputError):
        lookup.register("t\n")
    with pytest.raises(InputError):
        lookup.unregister("t", "c c")


@given(st.data(), st.lists(st.tuples(st.booleans(), names, st.none() | names), max_size=6))
def test_registrations_round_trip(data: st.DataObject, calls: list[tuple[bool, str, str | None]]) -> None:
    sent = MAGIC_V1 + ME + b"".join((lookup.register if on else lookup.unregister)(t, c) for on, t, c in calls)
    wanted = [Identify(PEER), *((Register if on else Unregister)(t, c) for on, t, c in calls)]
    assert read(data.draw(cuts(sent))) == wanted


@given(st.data())
def test_nonsense_gives_errors_in_bounds_and_the_same_for_any_cut(data: st.DataObject) -> None:
    part = st.one_of(st.sampled_from([sent for sent, _ in CASES]), st.binary(max_size=30))
    sent = data.draw(st.sampled_from([b"", MAGIC_V1])) + b"".join(data.draw(st.lists(part, max_size=6)))
    parts = data.draw(cuts(sent))
    assert read(parts) == read([sent])


def converse(sent: bytes, wanted: list[object], address: tuple[str, int]) -> None:
    """Say it to a lookup service, and hold its answers against what it should have understood."""
    client = LookupClient()
    found: list[object] = []
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(MAGIC_V1 + sent)
        connection.shutdown(socket.SHUT_WR)
        while data := connection.recv(65536):
            found += client.feed(data)
    assert client.buffered == 0
    assert len(found) == len(wanted)
    for answer, command in zip(found, wanted, strict=True):
        if isinstance(command, bytes):
            assert isinstance(answer, ProtocolError)
            assert answer.wire == command
        elif isinstance(command, Identify):
            assert isinstance(answer, bytes)
            assert lookup.read_peer(answer).version == "1.3.0"
        else:
            assert answer == b"OK"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Where a real nsqlookupd takes registrations."""
    with nsqlookupd(tmp_path_factory.mktemp("nsqlookupd")) as (tcp, _):
        yield "127.0.0.1", tcp


@pytest.mark.needs("nsqlookupd")
@pytest.mark.parametrize(("sent", "wanted"), CASES, ids=lambda value: repr(value)[:50])
def test_nsqlookupd_answers_as_the_table_says(sent: bytes, wanted: list[object], service: tuple[str, int]) -> None:
    converse(sent, wanted, service)
