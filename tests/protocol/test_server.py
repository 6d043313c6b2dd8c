"""The server's side: what is ours alone, and that cuts, trailing bytes and nonsense change nothing."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import ProtocolError
from srtm.protocol import client, commands, identify
from srtm.protocol.commands import Cls, Dpub, Event, Fin, Identify, Mpub, Nop, Pub, Rdy, Req, Sub, Touch
from srtm.protocol.identify import Declared, Identity
from srtm.protocol.names import MAGIC_V2, MAX_LINE, Settings
from srtm.protocol.server import ServerProtocol
from tests.protocol.strategies import cuts, pieces, sessions, streams
from tests.protocol.transcripts import TRANSCRIPTS, mpub, n, sized

SETTINGS = Settings()
SMALL = Settings(max_msg_size=64, max_body_size=256)
ID = b"0123456789abcdef"


def opened(settings: Settings = SETTINGS, sent: bytes = b"") -> ServerProtocol:
    protocol = ServerProtocol(settings)
    assert not [event for event in protocol.feed(MAGIC_V2 + sent) if isinstance(event, ProtocolError)]
    return protocol


def read(parts: Iterable[bytes], settings: Settings = SETTINGS) -> list[object]:
    """What the parts make; errors as the bytes that nsqd would send."""
    protocol = ServerProtocol(settings)
    found = [plain(event) for part in parts for event in apart(feed(protocol, part))]
    return [*found, plain(protocol.end())]


def feed(protocol: ServerProtocol, part: bytes) -> list[Event]:
    """Read on after every upgrade as if the new transport changed nothing."""
    found = protocol.feed(part)
    while protocol.paused:
        found += protocol.feed(protocol.take_unparsed())
    return found


def apart(events: Iterable[Event]) -> Iterator[Event]:
    """The same events, with each FIN for itself: how many are one command depends on how the stream was cut."""
    for event in events:
        if isinstance(event, Fin):
            yield from (Fin([each]) for each in event.ids)
        else:
            yield event


def plain(event: Event | None) -> object:
    return event.wire if isinstance(event, ProtocolError) else event


COMMANDS: list[tuple[bytes, list[Event]]] = [
    (b"PUB t\n" + sized(b"body\n\0\xff"), [Pub("t", b"body\n\0\xff")]),
    (b"PUB t\r\n" + sized(b"x"), [Pub("t", b"x")]),
    (b"PUB t\n" + sized(b"x") + b"PUB t\n" + sized(b"y"), [Pub("t", b"x"), Pub("t", b"y")]),
    (b"DPUB t#ephemeral 3600000\n" + sized(b"x"), [Dpub("t#ephemeral", 3_600_000, b"x")]),
    (b"DPUB t 18446744073709551616\n" + sized(b"x"), [Dpub("t", 0, b"x")]),
    (mpub(b"a", b"bb").replace(b"@T", b"t"), [Mpub("t", [b"a", b"bb"])]),
    (b"SUB t c\n", [Sub("t", "c")]),
    (b"SUB t c\nRDY 2500\nRDY\nRDY \n", [Sub("t", "c"), Rdy(2500), Rdy(1), Rdy(0)]),
    (b"SUB t c\nFIN %b\nFIN %b\r\nFIN %b x\n" % (ID, ID, ID), [Sub("t", "c"), Fin([ID]), Fin([ID]), Fin([ID])]),
    (b"SUB t c\nFIN !!!!!!!!!!!!!!!!\n", [Sub("t", "c"), Fin([b"!" * 16])]),
    (b"SUB t c\nREQ %b 5\nREQ %b 9999999999\n" % (ID, ID), [Sub("t", "c"), Req(ID, 5), Req(ID, 3_600_000)]),
    (b"SUB t c\nREQ %b 18446744073709551615\n" % ID, [Sub("t", "c"), Req(ID, 0)]),
    (b"SUB t c\nTOUCH %b\n" % ID, [Sub("t", "c"), Touch(ID)]),
    (b"SUB t c\nCLS\nRDY 1\nFIN %b\n" % ID, [Sub("t", "c"), Cls(), Fin([ID])]),
    (b"NOP\nNOP\r\nNOP x\n", [Nop(), Nop(), Nop()]),
]  # fmt: skip


@pytest.mark.parametrize("trailing", [b"", b"NOP\n", b"NO", b"\n", b"PUB t\n\0\0\0\x09part"])
@pytest.mark.parametrize(("sent", "wanted"), COMMANDS, ids=lambda value: repr(value)[:40])
def test_commands_whole_byte_by_byte_and_with_trailing_bytes(sent: bytes, wanted: list[Event], trailing: bytes) -> None:
    whole = opened().feed(sent + trailing)
    assert whole[: len(wanted)] == wanted
    one_by_one = opened()
    found = [event for byte in sent + trailing for event in one_by_one.feed(bytes([byte]))]
    assert list(map(plain, found)) == list(map(plain, whole))


def test_fins_in_a_row_are_one_command() -> None:
    several = [b"%016x" % number for number in range(3)]
    fins = b"".join(map(client.fin, several))
    protocol = opened(sent=b"SUB t c\n")
    assert protocol.feed(fins + b"NOP\n" + fins[:-1]) == [Fin(several), Nop(), Fin(several[:2])]
    assert protocol.feed(b"\n") == [Fin(several[2:])]


@pytest.mark.parametrize("trailing", [b"NOP\n", b"\n", b"\0", b"PUB t\n" + sized(b"x")])
@pytest.mark.parametrize("transcript", [t for t in TRANSCRIPTS if t.closes and not t.shut], ids=lambda t: t.name)
def test_nothing_is_read_after_an_error(transcript: object, trailing: bytes) -> None:
    sent = b"".join(sent for sent, _ in transcript.steps).replace(b"@T", b"t")  # type: ignore[attr-defined]
    protocol = ServerProtocol(SETTINGS)
    found = protocol.feed(sent + trailing)
    assert isinstance(found[-1], ProtocolError)
    assert found[-1].fatal
    assert protocol.closed
    assert protocol.feed(trailing) == []
    assert protocol.end() is None
    assert protocol.buffered == 0


def test_any_buffer_is_taken() -> None:
    for kind in (bytes, bytearray, memoryview):
        protocol = opened()
        buffer = bytearray(b"PUB t\n" + sized(b"x") + b"PUB t\n")
        assert protocol.feed(kind(buffer)) == [Pub("t", b"x")]
        buffer[:] = bytes(len(buffer))  # a receive buffer is used again
        assert protocol.feed(kind(sized(b"y"))) == [Pub("t", b"y")]


def test_a_line_ends_within_its_limit() -> None:
    longest = b"NOP " + b"x" * (MAX_LINE - 5) + b"\n"
    assert opened().feed(longest) == [Nop()]
    for parts in ([b"x" * MAX_LINE], [b"NOP x" + longest[4:]], [b"x" * (MAX_LINE - 1), b"x"]):
        protocol = opened()
        found = [event for part in parts for event in protocol.feed(part)]
        assert [plain(event) for event in found] == [b"E_INVALID line is longer than 16384 bytes"]
    assert not opened().feed(b"x" * (MAX_LINE - 1))


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"\0\0\0", b"E_BAD_BODY MPUB failed to read message count"),
        (n(2) + sized(b"a"), b"E_BAD_MESSAGE MPUB failed to read message(1) body size"),
        (n(2) + sized(b"a") + b"\0\0", b"E_BAD_MESSAGE MPUB failed to read message(1) body size"),
        (n(1) + n(2) + b"a", b"E_BAD_MESSAGE MPUB failed to read message body"),
        (n(1) + n(2), b"E_BAD_MESSAGE MPUB failed to read message body"),
        (n(1) + sized(b"a") + b"bc", b"E_BAD_BODY MPUB body is 2 bytes longer than its messages"),
    ],
)
def test_an_mpub_keeps_to_its_own_size(body: bytes, error: bytes) -> None:
    """Where nsqd reads by the count alone, past the body and without bound."""
    sent = MAGIC_V2 + b"MPUB t\n" + sized(body) + b"NOP\n" * 9
    assert read([sent]) == [error, None]
    assert read(pieces(sent, 1)) == [error, None]


def test_sizes_are_judged_before_bodies_come() -> None:
    for line, size in [(b"PUB t\n", 2**20 + 1), (b"DPUB t 1\n", 2**20 + 1), (b"MPUB t\n", 5 * 2**20 + 1)]:
        (found,) = opened().feed(line + n(size))
        assert isinstance(found, ProtocolError)
        assert found.facts == {"size": size, "limit": size - 1}


def test_a_topic_that_is_known_gives_no_licence() -> None:
    good, longer = b"PUB t\n" + sized(b"x" * 64), b"PUB t\n" + sized(b"x" * 65)
    *found, problem = opened(SMALL).feed(good + good + longer)
    assert found == [Pub("t", b"x" * 64)] * 2
    assert plain(problem) == b"E_BAD_MESSAGE PUB message too big 65 > 64"


def test_identify_may_have_a_limit_of_its_own() -> None:
    (found,) = opened(Settings(max_identify_size=100)).feed(b"IDENTIFY\n" + n(101))
    assert plain(found) == b"E_BAD_BODY IDENTIFY body too big 101 > 100"
    (found,) = opened(SMALL).feed(b"IDENTIFY\n" + n(257))
    assert plain(found) == b"E_BAD_BODY IDENTIFY body too big 257 > 256"


def test_an_upgrade_stops_the_reading() -> None:
    asked = json.dumps({"feature_negotiation": True, "snappy": True}).encode()
    protocol = opened()
    (found,) = protocol.feed(b"IDENTIFY\n" + sized(asked) + b"\xff\x06\0\0sNaPpY\nNOP\n")
    assert isinstance(found, Identify)
    assert found.identity.snappy
    assert protocol.paused
    assert protocol.take_unparsed() == b"\xff\x06\0\0sNaPpY\nNOP\n"
    assert protocol.feed(b"NOP\n") == [Nop()]
    again = opened()
    again.feed(b"IDENTIFY\n" + sized(asked))
    assert again.take_unparsed() == b""
    again.feed(b"IDENTIFY\n" + sized(b"{}"))
    assert not again.paused


def test_tls_required_allows_only_identify() -> None:
    settings = Settings(tls_v1=True, tls_required=True)
    for line in (b"PUB t\n", b"NOP\n", b"HELLO\n", b"SUB\n"):
        verb = line.split()[0]
        (found,) = opened(settings).feed(line)
        assert plain(found) == b"E_INVALID cannot %b in current state (TLS required)" % verb
    protocol = opened(settings, b"IDENTIFY\n" + sized(b'{"feature_negotiation":true,"tls_v1":true}'))
    assert protocol.identity.tls_v1
    assert protocol.take_unparsed() == b""
    protocol.tls = True
    assert protocol.feed(b"NOP\n") == [Nop()]


def test_auth_is_a_command_where_the_broker_has_an_authority() -> None:
    assert opened(Settings(auth_required=True)).feed(b"AUTH\n" + sized(b"\xffsecret")) == [commands.Auth(b"\xffsecret")]
    assert commands.auth_first("PUB").wire == b"E_AUTH_FIRST AUTH required before PUB"
    assert commands.unauthorized("SUB", "t", "c").wire == b'E_UNAUTHORIZED AUTH failed for SUB on "t" "c"'


def test_only_a_late_consumer_survives_its_error() -> None:
    assert not commands.failed("FIN", ID, "ID not in flight").fatal
    assert not commands.failed("REQ", ID, "ID not in flight").fatal
    assert not commands.failed("TOUCH", ID, "ID not in flight").fatal
    assert ProtocolError("E_PUB_FAILED", "PUB failed exiting").fatal
    problem = ProtocolError("E_INVALID", "invalid command \udcff")
    assert problem.wire == b"E_INVALID invalid command \xff"
    assert str(problem) == r"E_INVALID invalid command \xff"


def test_srtm_is_answered_only_to_those_who_declared_it() -> None:
    stock = identify.negotiate(b'{"feature_negotiation":true}', SETTINGS, Identity.default(SETTINGS))
    assert b"srtm" not in identify.response(stock, SETTINGS)
    body = b'{"feature_negotiation":true,"srtm":{"publisher":"p","group":"junction-17"}}'
    ours = identify.negotiate(body, SETTINGS, Identity.default(SETTINGS))
    assert ours.srtm == Declared("p", "junction-17")
    assert json.loads(identify.response(ours, SETTINGS))["srtm"] == {
        "publisher": "p",
        "group": "junction-17",
        "topic": None,
    }
    alone = identify.negotiate(b'{"srtm":{"publisher":"p"}}', SETTINGS, Identity.default(SETTINGS))
    assert alone.srtm == Declared("p", None)
    assert identify.response(alone, SETTINGS) == b"OK"


def test_a_replay_is_asked_for_beside_a_publisher_or_alone() -> None:
    body = b'{"feature_negotiation":true,"srtm":{"publisher":"p","replay":{"offset":7}}}'
    both = identify.negotiate(body, SETTINGS, Identity.default(SETTINGS))
    assert (both.srtm, both.replay) == (Declared("p", None), 7)
    assert json.loads(identify.response(both, SETTINGS))["srtm"]["replay"] == {"offset": 7}
    alone = identify.negotiate(b'{"srtm":{"replay":{"offset":0}}}', SETTINGS, Identity.default(SETTINGS))
    assert (alone.srtm, alone.replay) == (None, 0)
    assert identify.negotiate(b"{}", SETTINGS, both).replay == 7
    of_log = identify.negotiate(b'{"srtm":{"replay":{"offset":3,"log":"5f0c"}}}', SETTINGS, both)
    assert (of_log.replay, of_log.replay_log) == (3, "5f0c")
    assert json.loads(identify.response(replace(of_log, feature_negotiation=True), SETTINGS))["srtm"]["replay"] == {
        "offset": 3,
        "log": "5f0c",
    }
    again = identify.negotiate(b'{"srtm":{"replay":{"offset":4}}}', SETTINGS, of_log)
    assert (again.replay, again.replay_log) == (4, None)


@pytest.mark.parametrize("value", ['{"replay":1}', '{"replay":{}}', '{"replay":{"offset":-1}}',
                                   '{"replay":{"offset":0,"log":1}}', '{"replay":{"offset":0,"log":""}}',
                                   '{"replay":{"offset":true}}', '{"replay":{"offset":"0"}}',
                                   "1", '"p"', "[]", "{}", '{"publisher":1}', '{"publisher":""}',
                                   '{"publisher":"p","group":1}', '{"publisher":"%s"}' % ("x" * 257)])  # fmt: skip
def test_srtm_that_cannot_be_read(value: str) -> None:
    with pytest.raises(ProtocolError, match="E_BAD_BODY IDENTIFY srtm"):
        identify.negotiate(b'{"srtm":%b}' % value.encode(), SETTINGS, Identity.default(SETTINGS))


def test_compression_is_settled_within_limits() -> None:
    def level(asked: int, settings: Settings = SETTINGS) -> tuple[bool, int]:
        body = json.dumps({"feature_negotiation": True, "deflate": True, "deflate_level": asked}).encode()
        identity = identify.negotiate(body, settings, Identity.default(settings))
        return identity.deflate, identity.deflate_level

    assert [level(asked) for asked in (0, 3, 9, -1)] == [(True, 6), (True, 3), (True, 6), (True, 6)]
    assert level(6, Settings(max_deflate_level=2)) == (True, 2)
    assert level(3, Settings(deflate=False)) == (False, 6)


def test_connections_need_no_garbage_collector() -> None:
    gc.collect()
    for sent in (b"PUB t\n" + sized(b"x"), b"HELLO\n", b"IDENTIFY\n" + sized(b"{"), b"MPUB t\n" + n(9) + n(1)):
        ServerProtocol(SETTINGS).feed(MAGIC_V2 + sent)
    assert gc.collect() == 0


def test_many_topics_on_one_connection() -> None:
    protocol = opened()
    for i in range(500):
        assert protocol.feed(b"PUB t%d\n" % i + sized(b"x")) == [Pub(f"t{i}", b"x")]
    assert len(protocol._pubs) <= 64
    protocol = opened(sent=b"PUB t " + b"x" * 9_999 + b"\n" + sized(b"x"))
    assert not protocol._pubs, "lines that may be long are not kept"


@given(st.data())
def test_any_cut_of_a_session_gives_the_same(data: st.DataObject) -> None:
    sent, wanted = data.draw(sessions(SETTINGS))
    found = read(data.draw(cuts(MAGIC_V2 + sent)))
    assert found == [*wanted, None]


@given(st.data())
def test_nonsense_gives_errors_in_bounds_and_the_same_for_any_cut(data: st.DataObject) -> None:
    sent = data.draw(streams(SMALL))
    parts = data.draw(cuts(sent))
    assert read(parts, SMALL) == read([sent], SMALL)
    protocol = ServerProtocol(SMALL)
    for part in parts:
        closed = protocol.closed
        found = feed(protocol, part)
        errors = [i for i, event in enumerate(found) if isinstance(event, ProtocolError)]
        assert errors == ([len(found) - 1] if protocol.closed and not closed else [])
        assert protocol.buffered <= MAX_LINE + 4 + SMALL.max_body_size
