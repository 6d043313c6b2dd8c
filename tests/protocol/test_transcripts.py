"""The table of transcripts holds for a real nsqd, and for our protocol with the least broker behind it."""

from __future__ import annotations

import re
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from srtm.errors import ProtocolError
from srtm.protocol import commands, frames, identify, server
from srtm.protocol.client import ClientProtocol, Error, Heartbeat, Message, Response
from srtm.protocol.frames import Outgoing as Sent
from srtm.protocol.names import Settings
from tests.conftest import PARTS
from tests.protocol.transcripts import (
    DEPARTURES,
    ERROR,
    MESSAGE,
    RESPONSE,
    TRANSCRIPTS,
    WITH_AUTH,
    Normaliser,
    Transcript,
    run,
)

Start = Callable[[tuple[str, ...]], tuple[str, int]]


@contextmanager
def nsqd(folder: Path, flags: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """A real nsqd on ports of its own choice; gives its TCP address."""
    command = [PARTS["nsqd"].path or "", "--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0"]
    log = folder / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen([*command, f"--data-path={folder}", *flags], stderr=stderr)
    try:
        while not (found := re.search(r"TCP: listening on (\S+):(\d+)", log.read_text())):
            assert process.poll() is None, log.read_text()
        yield found[1], int(found[2])
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Gives the address of an nsqd with these flags, one for all transcripts that want the same."""
    running: dict[tuple[str, ...], tuple[str, int]] = {}
    with ExitStack() as stack:

        def get(flags: tuple[str, ...]) -> tuple[str, int]:
            if flags not in running:
                running[flags] = stack.enter_context(nsqd(tmp_path_factory.mktemp("nsqd"), flags))
            return running[flags]

        yield get


@pytest.mark.needs("nsqd")
@pytest.mark.parametrize("transcript", [*TRANSCRIPTS, *WITH_AUTH], ids=lambda t: t.name)
def test_nsqd_answers_as_the_table_says(transcript: Transcript, start: Start) -> None:
    run(transcript, start(transcript.flags))


@pytest.mark.needs("nsqd")
@pytest.mark.parametrize("transcript", DEPARTURES, ids=lambda t: t.name)
def test_departures_are_departures(transcript: Transcript, start: Start) -> None:
    with pytest.raises((AssertionError, ConnectionError, TimeoutError)):
        run(transcript, start(()), timeout_s=0.5)


class Broker:
    """One topic, one consumer: enough of a broker to answer the table."""

    def __init__(self) -> None:
        self.protocol = server.ServerProtocol(Settings(version="*"))
        self.waiting: deque[list[bytes | int]] = deque()
        self.in_flight: dict[bytes, list[bytes | int]] = {}
        self.ready = 0
        self.ids = 0

    def receive(self, data: bytes) -> bytes:
        out = bytearray()
        for event in self.protocol.feed(data):
            out += self.answer(event)
            self.deliver(out)
        return bytes(out)

    def deliver(self, out: bytearray) -> None:
        while self.waiting and self.ready > len(self.in_flight):
            message = self.waiting.popleft()
            body, attempts = message
            assert isinstance(body, bytes)
            assert isinstance(attempts, int)
            self.ids += 1
            message_id = frames.message_id(self.ids)
            message[1] = attempts + 1
            self.in_flight[message_id] = message
            out += frames.messages([Sent(1_600_000_000 * 10**9, attempts + 1, message_id, body)])

    def answer(self, event: commands.Event) -> bytes:
        match event:
            case ProtocolError():
                return frames.error(event)
            case commands.Identify(identity):
                return frames.response(identify.response(identity, self.protocol.settings))
            case commands.Pub(_, body) | commands.Dpub(_, _, body):
                self.waiting.append([body, 0])
            case commands.Mpub(_, bodies):
                self.waiting.extend([body, 0] for body in bodies)
            case commands.Rdy(ready):
                self.ready = ready
                return b""
            case commands.Cls():
                self.ready = 0
                return frames.CLOSE_WAIT
            case commands.Fin(several):
                return b"".join(self.settle(event, each) for each in several)
            case commands.Req(message_id) | commands.Touch(message_id):
                return self.settle(event, message_id)
            case commands.Nop():
                return b""
        return frames.OK

    def settle(self, event: commands.Fin | commands.Req | commands.Touch, message_id: bytes) -> bytes:
        if message_id not in self.in_flight:
            return frames.error(commands.failed(type(event).__name__.upper(), message_id, "ID not in flight"))
        if not isinstance(event, commands.Touch):
            message = self.in_flight.pop(message_id)
            if isinstance(event, commands.Req) and not event.delay_ms:
                self.waiting.append(message)
        return b""


def seen(client: ClientProtocol, data: bytes, normal: Normaliser) -> list[tuple[int, bytes]]:
    """What a client makes of the answer, in the words of the table."""
    found = []
    for event in client.feed(data):
        match event:
            case Response(data):
                found.append(normal.frame(RESPONSE, data))
            case Error(problem):
                found.append(normal.frame(ERROR, problem.wire))
            case Message():
                head = frames.MESSAGE_HEAD.pack(event.timestamp_ns, event.attempts, event.id)
                found.append(normal.frame(MESSAGE, head + event.body))
            case Heartbeat():
                pass
            case _:
                pytest.fail(f"{event} is not for a table of NSQ's")
    return [frame for frame in found if frame]


@pytest.mark.parametrize("size", [1, 2, 7, 1_000_000_000], ids=["byte by byte", "by 2", "by 7", "whole"])
@pytest.mark.parametrize("transcript", [*TRANSCRIPTS, *DEPARTURES], ids=lambda t: t.name)
def test_ours_answers_as_the_table_says(transcript: Transcript, size: int) -> None:
    broker, client, normal = Broker(), ClientProtocol(), Normaliser()
    for sent, wanted in transcript.steps:
        data = normal.fill(sent)
        if len(data) > 100_000:
            size = max(size, 1_000)
        answer = b"".join(broker.receive(data[i : i + size]) for i in range(0, len(data), size))
        if transcript.shut:
            problem = broker.protocol.end()
            answer += frames.error(problem) if problem else b""
        found = seen(client, answer, normal)
        assert found == [(kind, normal.fill(text)) for kind, text in wanted]
    assert broker.protocol.closed == transcript.closes
    assert client.buffered == 0
