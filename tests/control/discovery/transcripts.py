"""Conversations with a lookup service, over TCP and HTTP: what is sent, and what comes back.

The table is true of nsqlookupd 1.3.0 (test_transcripts.py asks it) and of ours. `run` speaks it to a service that knows
nothing before, and leaves nothing behind. Brokers are named: a @name stands for the address that the broker of that
name connects from. Left out of the comparison, since they differ from run to run: the order of lists, times (but
whether there is one), the ports of the service.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from struct import unpack
from typing import Any

from srtm.protocol import lookup
from srtm.protocol.names import MAGIC_V1
from tests.broker.running import PATIENCE_S

NSQ = "nsq; version=1.0"
OK = b"OK"
ME = b'{"broadcast_address":"127.0.0.1","hostname":"%b","http_port":%d,"tcp_port":%d,"version":"1.3.0"}'
NEVER = -6795364578871345152  # Go's zero time in nanoseconds since 1970


@dataclass(frozen=True)
class Service:
    """Where a lookup service listens."""

    tcp: int
    http: int


@dataclass(frozen=True)
class Say:
    """A broker sends, and is answered; None is the service's answer to IDENTIFY."""

    broker: str
    sent: bytes
    answers: tuple[bytes | None, ...]


@dataclass(frozen=True)
class Leave:
    """A broker closes its connection."""

    broker: str


@dataclass(frozen=True)
class Ask:
    """A request, and its answer: JSON, text or nothing."""

    method: str
    path: str
    status: int
    answer: Any
    allow: str | None = None


Step = Say | Leave | Ask


@dataclass(frozen=True)
class Transcript:
    """Steps, and what the service is told at its start about time."""

    name: str
    steps: tuple[Step, ...]
    limits: dict[str, float] = field(default_factory=dict)


def peer(broker: str) -> lookup.PeerInfo:
    """A broker that nobody finds: a name instead of an address would keep the resolver busy."""
    return lookup.PeerInfo(f"127.1.1.{ord(broker[-1])}", f"host-{broker}", 4150, 4151, "1.3.0-x")


def of_nsqd(broker: str) -> dict[str, Any]:
    """The fields that nsqd knows."""
    return {name: value for name, value in peer(broker)._asdict().items() if name != "https_port"}


def identify(broker: str) -> Say:
    return Say(broker, lookup.identify(peer(broker)), (None,))


def say(broker: str, *lines: str) -> Say:
    return Say(broker, "".join(f"{line}\n" for line in lines).encode(), (OK,) * len(lines))


def brokers(*names: str) -> tuple[Say, ...]:
    return tuple(identify(name) for name in names)


def get(path: str, answer: Any) -> Ask:
    return Ask("GET", path, 200, answer)


def post(path: str) -> Ask:
    return Ask("POST", path, 200, None)


def refused(method: str, path: str, status: int, message: str, allow: str | None = None) -> Ask:
    return Ask(method, path, status, {"message": message}, allow)


def described(broker: str) -> dict[str, Any]:
    found = of_nsqd(broker)
    return {"remote_address": f"@{broker}", **found}


def found(topic: str, producers: str = "", channels: str = "") -> Ask:
    """What /lookup gives for a topic."""
    answer = {"channels": channels.split(), "producers": [described(each) for each in producers.split()]}
    return get(f"/lookup?topic={topic.replace('#', '%23')}", answer)


def nodes(**topics: str) -> Ask:
    """What /nodes gives: each broker's topics, tombstoned ones with a minus."""
    return get("/nodes", {"producers": [_node(name, text.split()) for name, text in topics.items()]})


def _node(broker: str, topics: list[str]) -> dict[str, Any]:
    names = [topic.removeprefix("-") for topic in topics]
    return described(broker) | {"tombstones": [topic.startswith("-") for topic in topics], "topics": names}


def debug(**keys: str) -> Ask:
    """What /debug gives; in keys, _ is a colon; tombstoned brokers with a minus."""
    return get("/debug", {key.replace("_", ":"): [_entry(each) for each in text.split()] for key, text in keys.items()})


def _entry(broker: str) -> dict[str, Any]:
    name = broker.removeprefix("-")
    tombstoned = broker != name
    return {
        **of_nsqd(name),
        "id": f"@{name}",
        "last_update": "a time",
        "tombstoned": tombstoned,
        "tombstoned_at": "a time" if tombstoned else NEVER,
    }


def topics(names: str = "") -> Ask:
    return get("/topics", {"topics": names.split()})


def channels(topic: str, names: str = "") -> Ask:
    return get(f"/channels?topic={topic.replace('#', '%23')}", {"channels": names.split()})


AB = brokers("a", "b")
AT_ONCE = 1e-9

TRANSCRIPTS = [
    Transcript("nobody is there", (topics(), nodes(), debug(), channels("t"))),
    Transcript("a broker without topics", (*brokers("a"), nodes(a=""), topics(), debug(client__="a"))),
    Transcript("two brokers, one topic", (
        *AB, say("a", "REGISTER t"), say("b", "REGISTER t c"), found("t", "a b", "c"), nodes(a="t", b="t"),
        topics("t"), channels("t", "c"), debug(client__="a b", topic_t_="a b", channel_t_c="b"))),
    Transcript("a channel brings its topic", (*brokers("a"), say("a", "REGISTER t c"), found("t", "a", "c"))),
    Transcript("the same again changes nothing", (
        *brokers("a"), say("a", "REGISTER t c", "REGISTER t c", "REGISTER t", "PING"), found("t", "a", "c"),
        debug(client__="a", topic_t_="a", channel_t_c="a"))),
    Transcript("the same broker twice is two producers", (
        identify("a"), Say("b", lookup.identify(peer("a")), (None,)), say("a", "REGISTER t"), say("b", "REGISTER t"),
        get("/lookup?topic=t", {"channels": [], "producers": [
            described("a"), described("a") | {"remote_address": "@b"}]}))),
    Transcript("PING comes before IDENTIFY", (say("a", "PING"), nodes(), identify("a"), nodes(a=""))),
    Transcript("many commands in one write", (
        Say("a", lookup.identify(peer("a")) + b"REGISTER t\nREGISTER t c\nPING\n", (None, OK, OK, OK)),
        found("t", "a", "c"))),
    # going
    Transcript("names stay when a broker goes", (
        *AB, say("a", "REGISTER t c", "REGISTER e#ephemeral x#ephemeral"), Leave("a"), found("t", "", "c"),
        found("e#ephemeral", "", "x#ephemeral"), nodes(b=""), topics("t e#ephemeral"), debug(client__="b"))),
    Transcript("names stay when a topic is unregistered", (
        *brokers("a"), say("a", "REGISTER t c", "UNREGISTER t"), found("t", "", "c"), nodes(a=""), topics("t"))),
    Transcript("a topic goes with its channels", (
        *AB, say("a", "REGISTER t c", "REGISTER t d", "REGISTER u c"), say("b", "REGISTER t c"),
        say("a", "UNREGISTER t"), found("t", "b", "c d"), nodes(a="u", b="t"),
        debug(client__="a b", topic_t_="b", topic_u_="a", channel_t_c="b", channel_u_c="a"))),
    Transcript("a channel goes alone", (
        *brokers("a"), say("a", "REGISTER t c", "UNREGISTER t c"), found("t", "a", "c"),
        debug(client__="a", topic_t_="a"))),
    Transcript("an ephemeral channel goes with its last broker", (
        *AB, say("a", "REGISTER t x#ephemeral"), say("b", "REGISTER t x#ephemeral"),
        say("a", "UNREGISTER t x#ephemeral"), channels("t", "x#ephemeral"),
        say("b", "UNREGISTER t x#ephemeral"), channels("t"), found("t", "a b"))),
    Transcript("an ephemeral channel that others created", (
        *brokers("a"), post("/channel/create?topic=t&channel=x%23ephemeral"), channels("t", "x#ephemeral"),
        say("a", "UNREGISTER t x#ephemeral"), channels("t"), topics("t"))),
    Transcript("an ephemeral topic goes with its last broker", (
        *AB, say("a", "REGISTER e#ephemeral"), say("b", "REGISTER e#ephemeral"), say("a", "UNREGISTER e#ephemeral"),
        topics("e#ephemeral"), say("b", "UNREGISTER e#ephemeral"), topics(),
        refused("GET", "/lookup?topic=e%23ephemeral", 404, "TOPIC_NOT_FOUND"))),
    Transcript("its channels stay, though", (
        *brokers("a"), say("a", "REGISTER e#ephemeral c", "REGISTER e#ephemeral x#ephemeral", "UNREGISTER e#ephemeral"),
        topics(), channels("e#ephemeral", "c x#ephemeral"), post("/topic/delete?topic=e%23ephemeral"),
        channels("e#ephemeral"))),
    Transcript("what nobody has cannot be lost", (*brokers("a"), say("a", "UNREGISTER t", "UNREGISTER t c"), topics())),
    Transcript("an error ends a broker", (
        *AB, say("a", "REGISTER t"), Say("a", b"REGISTER $\n", (b"E_BAD_TOPIC REGISTER topic name '$' is not valid",)),
        Leave("a"), found("t"), nodes(b=""))),
    Transcript("what came before an error is done", (
        *brokers("a"), Say("a", b"REGISTER t\nHELLO\n", (OK, b"E_INVALID invalid command HELLO")), Leave("a"),
        topics("t"))),
    # operators
    Transcript("create and delete a topic", (
        post("/topic/create?topic=t"), post("/topic/create?topic=t"), found("t"), topics("t"), debug(),
        post("/topic/delete?topic=t"), topics(), refused("GET", "/lookup?topic=t", 404, "TOPIC_NOT_FOUND"),
        post("/topic/delete?topic=t"))),
    Transcript("create and delete a channel", (
        post("/channel/create?topic=t&channel=c"), found("t", "", "c"), channels("t", "c"),
        post("/channel/delete?topic=t&channel=c"), found("t"),
        refused("POST", "/channel/delete?topic=t&channel=c", 404, "CHANNEL_NOT_FOUND"))),
    Transcript("delete what brokers have", (
        *AB, say("a", "REGISTER t c", "REGISTER u c"), say("b", "REGISTER t"), post("/topic/delete?topic=t"),
        topics("u"), nodes(a="u", b=""), channels("t"), post("/channel/delete?topic=u&channel=c"), found("u", "a"),
        say("a", "UNREGISTER t", "REGISTER t"), found("t", "a"))),
    Transcript("a star is every topic", (
        *AB, say("a", "REGISTER t c", "REGISTER u d"), say("b", "REGISTER u"), found("*", "a b", "c d"),
        channels("*", "c d"), post("/topic/delete?topic=*"), topics(), channels("*"), nodes(a="", b=""),
        refused("GET", "/lookup?topic=*", 404, "TOPIC_NOT_FOUND"),
        refused("POST", "/topic/create?topic=*", 400, "INVALID_ARG_TOPIC"))),
    Transcript("a tombstone", (
        *AB, say("a", "REGISTER t c", "REGISTER u"), say("b", "REGISTER t"),
        post("/topic/tombstone?topic=t&node=127.1.1.97:4151"), found("t", "b", "c"), found("u", "a"),
        nodes(a="-t u", b="t"),
        debug(client__="a b", topic_t_="-a b", topic_u_="a", channel_t_c="a"),
        say("a", "REGISTER t"), found("t", "b", "c"),
        say("a", "UNREGISTER t", "REGISTER t"), found("t", "a b", "c"), nodes(a="t u", b="t"))),
    Transcript("a tombstone for nobody", (
        *brokers("a"), say("a", "REGISTER t"), post("/topic/tombstone?topic=t&node=127.1.1.97:4150"),
        post("/topic/tombstone?topic=x&node=127.1.1.97:4151"), post("/topic/tombstone?topic=t&node="),
        found("t", "a"))),
    Transcript("a tombstone that has ended", (
        *brokers("a"), say("a", "REGISTER t"), post("/topic/tombstone?topic=t&node=127.1.1.97:4151"), found("t", "a"),
        nodes(a="t"), debug(client__="a", topic_t_="-a")), {"tombstone_s": AT_ONCE}),
    Transcript("a broker that is silent", (
        *brokers("a"), say("a", "REGISTER t c", "PING"), found("t", "", "c"), nodes(), topics("t"),
        debug(client__="a", topic_t_="a", channel_t_c="a")), {"inactive_after_s": AT_ONCE}),
    # requests
    Transcript("pages", (
        get("/ping", "OK"), get("/info", {"version": "1.3.0"}), get("/info?x=%zz", {"version": "1.3.0"}),
        get("/ping?x;y", "OK"))),
    Transcript("the first argument counts", (post("/topic/create?x=1&topic=t&topic=u&topic=$"), topics("t"))),
    Transcript("arguments in the body do not", (refused("POST", "/topic/create", 400, "MISSING_ARG_TOPIC"),)),
    *(Transcript(f"{page} without a topic", (refused(method, page, 400, "MISSING_ARG_TOPIC"),)) for method, page in [
        ("GET", "/lookup"), ("GET", "/channels"), ("GET", "/lookup?Topic=t"), ("POST", "/topic/create"),
        ("POST", "/topic/delete"), ("POST", "/topic/tombstone"), ("POST", "/channel/create?channel=c"),
        ("POST", "/channel/delete?channel=c")]),
    *(Transcript(f"{page} is broken", (refused(method, page, 400, "INVALID_REQUEST"),)) for method, page in [
        ("GET", "/lookup?topic=%"), ("GET", "/lookup?topic=%f"), ("GET", "/lookup?topic=t&x=%fg"),
        ("GET", "/channels?topic=t;x=y"), ("POST", "/topic/create?%zz=1&topic=t"), ("POST", "/topic/delete?;"),
        ("POST", "/topic/tombstone?topic=%zz"), ("POST", "/channel/create?topic=t&channel=%"),
        ("POST", "/channel/delete?topic=t&channel=%")]),
    *(Transcript(f"{page} has a bad name", (refused("POST", page, 400, f"INVALID_ARG_{which}"), topics()))
      for page, which in [
        ("/topic/create?topic=", "TOPIC"), ("/topic/create?topic=a+b", "TOPIC"), ("/topic/create?topic=%ff", "TOPIC"),
        (f"/topic/create?topic={'a' * 65}", "TOPIC"), ("/channel/create?topic=$", "TOPIC"),
        ("/channel/create?topic=t&channel=$", "CHANNEL"), ("/channel/delete?topic=t&channel=*", "CHANNEL")]),
    Transcript("missing others", (
        refused("POST", "/topic/tombstone?topic=t", 400, "MISSING_ARG_NODE"),
        refused("POST", "/channel/create?topic=t", 400, "MISSING_ARG_CHANNEL"),
        refused("POST", "/channel/delete?topic=t", 400, "MISSING_ARG_CHANNEL"))),
    Transcript("names that cannot be are not found", (
        refused("GET", "/lookup?topic=$", 404, "TOPIC_NOT_FOUND"),
        refused("GET", "/lookup?topic", 404, "TOPIC_NOT_FOUND"), channels("$"), post("/topic/delete?topic=$"))),
    Transcript("no such page", (
        refused("GET", "/", 404, "NOT_FOUND"), refused("GET", "/lookups", 404, "NOT_FOUND"),
        refused("POST", "/topic", 404, "NOT_FOUND"), refused("GET", "/topic/x", 404, "NOT_FOUND"),
        refused("OPTIONS", "/x", 404, "NOT_FOUND"), refused("POST", "/create_topic?topic=t", 404, "NOT_FOUND"))),
    *(Transcript(f"{page} by another method", (
        refused(other, page, 405, "METHOD_NOT_ALLOWED", allow), refused("PUT", page, 405, "METHOD_NOT_ALLOWED", allow),
        Ask("OPTIONS", page, 200, None, allow), Ask("HEAD", page, 405, None, allow)))
      for other, allow, pages in [
        ("POST", "GET, OPTIONS", ("/ping", "/info", "/lookup", "/topics", "/channels", "/nodes", "/debug")),
        ("GET", "OPTIONS, POST", ("/topic/create", "/topic/delete", "/topic/tombstone", "/channel/create",
                                  "/channel/delete"))]
      for page in pages),
]  # fmt: skip


class Conversation:
    """A service, and the brokers that talk to it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.brokers: dict[str, socket.socket] = {}
        self.addresses: dict[str, str] = {}

    def step(self, step: Step) -> None:
        match step:
            case Say(broker, sent, answers):
                self.connection(broker).sendall(sent)
                for answer in answers:
                    assert self.answer(broker) == (self.me() if answer is None else answer)
            case Leave(broker):
                self.leave(broker)
            case Ask():
                self.ask(step)

    def connection(self, broker: str) -> socket.socket:
        if broker not in self.brokers:
            connection = socket.create_connection(("127.0.0.1", self.service.tcp), timeout=PATIENCE_S)
            connection.sendall(MAGIC_V1)
            self.brokers[broker] = connection
            self.addresses[f"127.0.0.1:{connection.getsockname()[1]}"] = f"@{broker}"
        return self.brokers[broker]

    def answer(self, broker: str) -> bytes:
        (size,) = unpack(">i", _read(self.brokers[broker], 4))
        return _read(self.brokers[broker], size)

    def me(self) -> bytes:
        return ME % (socket.gethostname().encode(), self.service.http, self.service.tcp)

    def leave(self, broker: str) -> None:
        """Close a connection, and wait until the service knows."""
        connection = self.brokers.pop(broker)
        address = f"127.0.0.1:{connection.getsockname()[1]}"
        connection.close()
        until = time.monotonic() + PATIENCE_S
        while any(each["id"] == address for each in self.fetch("GET", "/debug")[2].get("client::", ())):
            assert time.monotonic() < until, f"{broker} is still there"
            time.sleep(0.005)

    def ask(self, ask: Ask) -> None:
        status, headers, answer = self.fetch(ask.method, ask.path)
        assert (status, self.canonical(answer)) == (ask.status, self.canonical(ask.answer)), ask
        assert headers["Allow"] == ask.allow
        has_body = isinstance(ask.answer, dict) or ask.method == "HEAD"
        kind = "text/plain; charset=utf-8" if isinstance(ask.answer, str) else None
        assert headers["Content-Type"] == ("application/json; charset=utf-8" if has_body else kind)
        plain = isinstance(ask.answer, str) or (ask.method == "OPTIONS" and status == 200)
        assert headers["X-NSQ-Content-Type"] == (None if plain else NSQ)

    def fetch(self, method: str, path: str) -> tuple[int, Any, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.service.http, timeout=PATIENCE_S)
        try:
            connection.request(method, path, body=b"topic=in-the-body" if method == "POST" else None)
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        is_json = (response.headers["Content-Type"] or "").startswith("application/json")
        return response.status, response.headers, json.loads(body) if is_json and body else body.decode() or None

    def canonical(self, value: Any) -> Any:
        """The value without what differs from run to run."""
        if isinstance(value, list):
            return sorted((self.canonical(each) for each in value), key=json.dumps)
        if not isinstance(value, dict):
            return value
        value = dict(value)
        if "tombstones" in value:  # in the order of the topics
            value["topics"] = dict(zip(value["topics"], value.pop("tombstones"), strict=True))
        for name in ("id", "remote_address"):
            if name in value:
                value[name] = self.addresses.get(value[name], value[name])
        for name in ("last_update", "tombstoned_at"):
            if isinstance(value.get(name), int) and value[name] > 1_500_000_000 * 10**9:
                value[name] = "a time"
        return {key: self.canonical(each) for key, each in sorted(value.items())}


def run(transcript: Transcript, start: Callable[[dict[str, float]], Service]) -> None:
    """Hold the conversation; AssertionError where the service answers anything else."""
    conversation = Conversation(start(transcript.limits))
    try:
        for step in transcript.steps:
            conversation.step(step)
    finally:
        for broker in list(conversation.brokers):
            conversation.leave(broker)
        conversation.ask(post("/topic/delete?topic=*"))


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        assert more, f"closed after {data!r}"
        data += more
    return data
