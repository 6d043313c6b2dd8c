"""Connections of brokers: how they end, what nonsense does, and what one of them can take up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from struct import pack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srtm.control.discovery.registry import ANY, Came, Change, Left, Reason, Registry, TopicChanged
from srtm.control.discovery.tcp import Connection, Discovery
from srtm.errors import ProtocolError
from srtm.net.sockets import listen
from srtm.protocol import lookup
from srtm.protocol.lookup import MAX_BODY, LookupClient, PeerInfo
from srtm.protocol.names import MAGIC_V1, MAX_LINE
from srtm.units import NS_PER_S
from tests.broker.running import in_thread
from tests.control.discovery.transcripts import Conversation, Service, identify, say
from tests.programs import wait_for
from tests.protocol.strategies import cuts, names

ME = PeerInfo("127.0.0.1", socket.gethostname(), 1, 2, "1.3.0")
BROKER = lookup.identify(PeerInfo("127.0.0.1", "h", 4150, 4151, "1.3.0"))


@asynccontextmanager
async def serving(registry: Registry, **options: Any) -> AsyncIterator[int]:
    listener = listen("127.0.0.1", 0)
    port: int = listener.getsockname()[1]
    async with Discovery(registry, ME._replace(tcp_port=port, http_port=port), **options).serving(listener):
        yield port


@contextmanager
def discovery(registry: Registry, **options: Any) -> Iterator[Conversation]:
    """Discovery over TCP alone, and brokers that talk to it."""
    conversation: Conversation | None = None
    try:
        with in_thread(lambda: serving(registry, **options)) as (port, _):
            conversation = Conversation(Service(port, port))
            yield conversation
    finally:  # after the service: it must not take them for brokers that leave
        for connection in conversation.brokers.values() if conversation else ():
            connection.close()


def followed() -> tuple[Registry, list[Change]]:
    registry = Registry()
    changes: list[Change] = []
    registry.on_change = changes.append
    return registry, changes


def end(connection: socket.socket, reason: Reason) -> None:
    if reason is Reason.RESET:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, pack("ii", 1, 0))
    if reason is Reason.REFUSED:
        connection.sendall(b"HELLO\n")
    else:
        connection.close()


@pytest.mark.parametrize("reason", [Reason.EOF, Reason.RESET, Reason.REFUSED])
def test_the_reason_of_an_end(reason: Reason) -> None:
    registry, changes = followed()
    with discovery(registry) as brokers:
        for step in (identify("a"), identify("b"), say("a", "REGISTER t")):
            brokers.step(step)
        end(brokers.brokers["a"], reason)
        wait_for(lambda: len(changes) == 5)
        came, other, there, left, gone = changes
        assert isinstance(came, Came)
        assert isinstance(other, Came)
        assert left == Left(came.producer, reason)
        assert there == gone == TopicChanged("t")
    assert len(changes) == 5, "brokers do not leave because the service stops"


def test_silence_is_told_while_the_connection_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srtm.control.discovery.tcp._TICK_S", 0.01)
    clock = iter(range(0, 10**18, 60 * NS_PER_S))
    registry, changes = followed()
    with discovery(registry, clock=lambda: next(clock)) as brokers:
        brokers.step(identify("a"))
        wait_for(lambda: len(changes) == 2)
        brokers.step(say("a", "PING"))
        wait_for(lambda: len(changes) >= 3)
    assert isinstance(changes[1], Left)
    assert changes[1].reason is Reason.SILENT
    assert changes[2] == Came(changes[1].producer)


def test_a_registry_without_room_refuses_one_and_serves_others() -> None:
    with discovery(Registry(max_entries=3)) as brokers:
        brokers.step(identify("a"))
        brokers.step(say("a", "REGISTER t"))
        brokers.connection("b").sendall(BROKER + b"REGISTER t\nPING\n")
        assert brokers.answer("b").startswith(b"E_INVALID the registry holds its limit of 3 names and registrations")
        assert brokers.brokers["b"].recv(1) == b""
        brokers.step(say("a", "PING"))


def test_no_more_connections_than_allowed() -> None:
    with discovery(Registry(), max_connections=1) as brokers:
        brokers.step(identify("a"))
        assert not accepted(brokers, "b")
        brokers.step(say("a", "PING"))
        end(brokers.brokers.pop("a"), Reason.EOF)
        wait_for(lambda: accepted(brokers, "c"))


def accepted(brokers: Conversation, name: str) -> bool:
    try:
        brokers.step(identify(name))
    except (AssertionError, ConnectionError):
        brokers.brokers.pop(name).close()
        return False
    return True


def test_who_does_not_read_answers_is_not_read() -> None:
    with discovery(Registry()) as brokers:
        brokers.step(identify("a"))
        flood = brokers.brokers["a"]
        flood.settimeout(0.5)
        sent, pings = 0, b"PING\n" * 20_000
        while sent < 500 * len(pings):
            try:
                sent += flood.send(pings)
            except TimeoutError:
                break
        assert sent < 500 * len(pings), "50 MB of commands were taken"
        brokers.step(identify("b"))
        for _ in range(1_000):
            assert brokers.answer("a") == b"OK"


class Wire(asyncio.Transport):
    """A transport in memory."""

    def __init__(self) -> None:
        super().__init__({"peername": ("::1", 7, 0, 0)})
        self.written = b""
        self.closing = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = close


commands = st.one_of(
    st.just(BROKER),
    st.just(b"PING\n"),
    st.builds(lookup.register, names, st.none() | names),
    st.builds(lookup.unregister, names, st.none() | names),
    st.sampled_from([b"REGISTER t c\n", b"UNREGISTER t\n", b"IDENTIFY\n", b"\0\0\0\5", b"{}", b"\n", b"REGISTER \n"]),
    st.binary(max_size=30),
)


@given(st.data(), st.lists(commands, max_size=12), st.sampled_from([None, ConnectionResetError(), TimeoutError()]))
def test_nonsense_is_answered_within_bounds_and_leaves_nothing(
    data: st.DataObject, parts: list[bytes], how: Exception | None
) -> None:
    registry = Registry(max_entries=data.draw(st.sampled_from([0, 3, 1_000])))
    service, wire = Discovery(registry, ME), Wire()
    connection = Connection(service)
    connection.connection_made(wire)
    sent = data.draw(st.sampled_from([b"", MAGIC_V1, MAGIC_V1 + BROKER])) + b"".join(parts)
    for part in data.draw(cuts(sent)):
        connection.data_received(part)
        assert connection._protocol.buffered <= MAX_LINE + MAX_BODY
        assert len(registry.nodes(0)) <= 1
        if wire.closing:
            break
    if how is None and not wire.closing:
        connection.eof_received()
    connection.connection_lost(how)
    client = LookupClient()
    answers = client.feed(wire.written)
    assert client.buffered == 0
    assert not any(isinstance(answer, ProtocolError) for answer in answers[:-1]), "an error is the last word"
    assert list(registry.registrations()) == []
    assert registry.entries == len(registry.topics()) + len(registry.channels(ANY)), "but for names"
    assert not service.connections


@settings(max_examples=30)
@given(st.data())
def test_nonsense_over_sockets(data: st.DataObject) -> None:
    with discovery(Registry()) as brokers:
        brokers.step(identify("good"))
        for number in range(3):
            sent = b"".join(data.draw(st.lists(commands, max_size=12)))
            try:
                brokers.connection(str(number)).sendall(sent)
                if data.draw(st.booleans()):
                    end(brokers.brokers.pop(str(number)), Reason.RESET)
            except ConnectionError:  # refused already
                pass
        brokers.step(say("good", "PING", "REGISTER t"))


def test_addresses_are_written_as_go_writes_them() -> None:
    registry = Registry()
    connection = Connection(Discovery(registry, ME))
    connection.connection_made(Wire())
    connection.data_received(MAGIC_V1 + BROKER)
    (entry,) = registry.registrations()
    assert entry.producer.address == "[::1]:7"
