"""A probe: a subscriber of one topic at its engine that measures the latency from publisher to consumer.

In: messages as they are sent to the engine, and as the engine delivers them. Out: latencies, kernel arrival at the
broker to arrival at the probe, over the last ten seconds. JetStream delivers our ids with the messages. NSQ does not,
so the probe recognises a message by its body, and of equal messages in flight times only the first. The probe writes
nothing into messages. It is off by default, because the engine must serve one more consumer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from srtm.broker.statistics import ProbeStatistics
from srtm.errors import InputError, ProtocolError
from srtm.model.latency import Distribution
from srtm.net.explain import explained
from srtm.net.sockets import open_streams
from srtm.protocol import client as nsq
from srtm.protocol import greeting, nats
from srtm.protocol.client import ClientProtocol, Error, Heartbeat, Response
from srtm.protocol.client import Message as Delivered
from srtm.protocol.nats import Err, Info, Msg, NatsProtocol, Ping, Pong
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from srtm.broker.message import Message
    from srtm.net.credentials import Credentials
    from srtm.protocol.engine import EngineAddress

log = logging.getLogger(__name__)

CHANNEL = "srtm-probe#ephemeral"
_WINDOW_NS = 10 * NS_PER_S
_MOST = 10_000  # messages expected at a time, and latencies kept
_AGAIN_S = 1.0


class Server(Protocol):
    """The server that an engine is connected to, and the credentials for it."""

    place: tuple[str, int]
    address: EngineAddress
    credentials: Credentials

    @property
    def server_name(self) -> str:
        """The name that the server's certificate must bear."""


class Probe(ABC):
    """The probe of one topic; `stop` ends it."""

    def __init__(self, topic: str, engine: Server) -> None:
        self.problem: str | None = None
        self._topic = topic
        self._engine = engine
        self._expected: dict[bytes, int] = {}
        self._seen: deque[tuple[int, int]] = deque(maxlen=_MOST)
        self._task = asyncio.get_running_loop().create_task(self._keep())

    def expect(self, messages: list[Message]) -> None:
        """Messages are on their way to the engine."""
        while self._expected and len(self._expected) + len(messages) > _MOST:
            del self._expected[next(iter(self._expected))]
        for message in messages:
            self._expected.setdefault(self._key(message), message.arrival_ns)

    def statistics(self) -> ProbeStatistics:
        """Return a snapshot."""
        since_ns = time.time_ns() - _WINDOW_NS
        found = np.array([taken_ns for at_ns, taken_ns in self._seen if at_ns > since_ns], np.int64)
        return ProbeStatistics(len(found), Distribution.of(found) if len(found) else None, self.problem)

    def stop(self) -> None:
        """Unsubscribe."""
        self._task.cancel()

    @abstractmethod
    def _key(self, message: Message) -> bytes:
        """Return what identifies a message when it is delivered."""

    @abstractmethod
    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Subscribe, and call `_came` for every message."""

    def _came(self, key: bytes) -> None:
        arrival_ns = self._expected.pop(key, None)
        if arrival_ns is not None:
            now_ns = time.time_ns()
            self._seen.append((now_ns, now_ns - arrival_ns))

    async def _keep(self) -> None:
        while True:
            try:
                await self._once()
            except (OSError, EOFError, ProtocolError, InputError) as problem:
                self.problem = explained(problem)
                log.warning("TOPIC(%s): probe disconnected: %s", self._topic, self.problem)
            await asyncio.sleep(_AGAIN_S)

    async def _once(self) -> None:
        reader, writer = await open_streams(*self._engine.place)
        try:
            await self._listen(reader, writer)
        finally:
            writer.close()

    async def _secure(self, writer: asyncio.StreamWriter) -> None:
        """Begin TLS."""
        engine = self._engine
        assert engine.credentials.tls is not None
        await writer.start_tls(engine.credentials.tls, server_hostname=engine.server_name)


class NsqdProbe(Probe):
    """A consumer in an ephemeral channel of its own."""

    def _key(self, message: Message) -> bytes:
        return message.body

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        protocol, address = ClientProtocol(), self._engine.address
        identity = {"client_id": "srtm-probe", "output_buffer_timeout": -1, "output_buffer_size": -1}
        steps, agreed = greeting.nsqd(address, identity), False
        writer.write(next(steps))
        if address.tls:
            protocol.pause_after_response()
        while data := await reader.read(65536):
            for event in protocol.feed(data):
                if isinstance(event, Delivered):
                    self._came(event.body)
                    writer.write(nsq.fin(event.id))
                elif isinstance(event, Heartbeat):
                    writer.write(nsq.nop())
                elif isinstance(event, Error):
                    raise event.problem if agreed else greeting.nsqd_refuses(event.problem)
                elif agreed:
                    self.problem = None
                elif isinstance(event, Response):
                    said = greeting.after(steps, event.data)
                    if said is None:
                        agreed = True
                        writer.write(nsq.sub(self._topic, CHANNEL) + nsq.rdy(1_000))
                    elif said == greeting.BEGIN_TLS:
                        protocol = ClientProtocol()
                        await self._secure(writer)
                    else:
                        writer.write(said)
        raise EOFError("the engine closed the connection")


class NatsProbe(Probe):
    """An ephemeral consumer of the stream that has the topic; ids begin with `prefix`."""

    def __init__(self, topic: str, engine: Server, prefix: bytes) -> None:
        self._prefix = prefix
        super().__init__(topic, engine)

    def _key(self, message: Message) -> bytes:
        return b"%b-%b" % (self._prefix, message.id)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        protocol, inbox = NatsProtocol(), b"_INBOX.%b." % secrets.token_hex(6).encode()
        topic, engine = self._topic, self._engine
        greeted = False
        if engine.address.handshake_first:
            await self._secure(writer)
        while data := await reader.read(65536):
            for event in protocol.feed(data):
                if isinstance(event, Info):
                    if greeted:
                        continue
                    greeted = True
                    secured = greeting.nats_tls(engine.address, event.fields)
                    if secured:
                        protocol = NatsProtocol()
                        await self._secure(writer)
                    login = engine.credentials.login(str(event.fields.get("nonce", "")))
                    writer.write(nats.connect(verbose=False, headers=True, no_responders=True, **login))
                    # A consumer delivers only to a subject that has a subscription without wildcards.
                    names = (b"names", b"made", b"messages")
                    writer.write(b"".join(nats.subscribe(inbox + each, sid) for sid, each in enumerate(names, 1)))
                    writer.write(nats.PING)
                    if secured:
                        break  # ignore what else came in the clear
                elif isinstance(event, Pong):
                    asked = msgspec.json.encode({"subject": topic})
                    writer.write(nats.publish(b"$JS.API.STREAM.NAMES", inbox + b"names", asked))
                elif isinstance(event, Ping):
                    writer.write(nats.PONG)
                elif isinstance(event, Err):
                    raise ProtocolError("E_INVALID", event.text)
                elif isinstance(event, Msg) and event.subject == inbox + b"names":
                    writer.write(_consumer(event, topic, inbox))
                elif isinstance(event, Msg) and event.subject == inbox + b"made":
                    if event.status or (problem := nats.fields(event.body).get("error")):
                        raise ProtocolError("E_INVALID", f"cannot create a consumer for the probe: {problem}")
                    self.problem = None
                elif isinstance(event, Msg):
                    self._came(event.message_id)
        raise EOFError("the engine closed the connection")


def _consumer(answer: Msg, topic: str, inbox: bytes) -> bytes:
    """Return the request for a consumer of the stream that the server named."""
    streams = (nats.fields(answer.body) if answer.body else {}).get("streams")
    if not streams:
        raise ProtocolError("E_INVALID", f"no stream has the subject {topic}")
    wanted = {
        "stream_name": streams[0],
        "config": {
            "deliver_subject": (inbox + b"messages").decode(),
            "deliver_policy": "new",
            "ack_policy": "none",
            "filter_subject": topic,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": 5 * NS_PER_S,
        },
    }
    return nats.publish(
        b"$JS.API.CONSUMER.CREATE.%b" % str(streams[0]).encode(), inbox + b"made", msgspec.json.encode(wanted)
    )
