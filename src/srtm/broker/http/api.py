"""HTTP of a broker: nsqd's endpoints, and what the control plane asks and orders.

Publishing goes the way of TCP: through the topic's bucket, at the time of the request. Errors are nsqd's:
`{"message": "INVALID_TOPIC"}` with its status.
"""

from __future__ import annotations

import hmac
import re
import time
from http import HTTPStatus
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import srtm
from srtm.broker.http import stats as snapshot
from srtm.broker.options import retained_ns
from srtm.errors import (
    BrokerError,
    ExchangeRefused,
    InputError,
    LogError,
    LogReplaced,
    OffsetTrimmed,
    ProtocolError,
    PublishRefused,
    SRTMError,
)
from srtm.model.bucket import TokenBucket
from srtm.protocol import exchange
from srtm.protocol.exchange import RefusalCode
from srtm.protocol.names import VERSION, valid_name
from srtm.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

    from starlette.datastructures import QueryParams
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from srtm.broker.broker import Broker
    from srtm.broker.channel import Channel
    from srtm.broker.disk.batch import Record
    from srtm.broker.disk.durable import Durable
    from srtm.broker.disk.rows import Retention
    from srtm.broker.receipts import Receipt
    from srtm.broker.topic import Topic


_REFUSALS: dict[str, Callable[[PublishRefused], tuple[int, str]]] = {
    "full": lambda _: (503, "TOPIC_FULL"),
    "defer": lambda problem: (400, f"INVALID_DEFER: {problem}"),
    "size": lambda problem: (413, f"MSG_TOO_BIG: {problem}"),
}
_DECIMAL = re.compile(r"[0-9]{1,30}(?:\.[0-9]{0,30})?(?:[eE][+-]?[0-9]{1,2})?")


class Refused(Exception):
    """A request that gets nsqd's error, and a code beside it if a program has to tell refusals apart."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def app(broker: Broker, *, tls: bool = False) -> ASGIApp:
    """The HTTP application of a broker, as it is reached with TLS or without."""
    options = broker.options
    if options.settings.tls_required and not options.plain_http and not tls:
        return _tls_required(broker)
    pages = Pages(broker)
    posts = {
        "/pub": pages.pub,
        "/mpub": pages.mpub,
        "/topic/create": pages.topic_create,
        "/topic/delete": pages.topic_delete,
        "/topic/empty": pages.topic_empty,
        "/topic/pause": pages.topic_pause,
        "/topic/unpause": pages.topic_unpause,
        "/topic/limit": pages.topic_limit,
        "/srtm/log/trim": pages.log_trim,
        "/channel/create": pages.channel_create,
        "/channel/delete": pages.channel_delete,
        "/channel/empty": pages.channel_empty,
        "/channel/pause": pages.channel_pause,
        "/channel/unpause": pages.channel_unpause,
        "/srtm/exchange": pages.exchange,
        "/srtm/probe": pages.probe,
        "/srtm/trace/start": pages.trace_start,
        "/srtm/trace/stop": pages.trace_stop,
    }
    gets = {"/ping": pages.ping, "/info": pages.info, "/stats": pages.stats, "/metrics": pages.metrics}
    gets |= {"/srtm/log": pages.log_extent, "/srtm/log/read": pages.log_read}
    routes = [Route(path, _answered(page), methods=["POST"]) for path, page in posts.items()]
    routes += [Route(path, _answered(page), methods=["GET"]) for path, page in gets.items()]
    return Starlette(routes=routes, exception_handlers={404: _no_such, 405: _no_such})


async def _no_such(_: Request, problem: Exception) -> Response:
    status = problem.status_code if isinstance(problem, HTTPException) else 404
    return JSONResponse({"message": HTTPStatus(status).name}, status)


def _tls_required(broker: Broker) -> ASGIApp:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        document = {"message": "TLS_REQUIRED", "https_port": broker.https_port}
        await JSONResponse(document, 403, {"X-NSQ-Content-Type": "nsq; version=1.0"})(scope, receive, send)

    return refuse


def _answered(page: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return await page(request)
        except ClientDisconnect:  # in the middle of its body; nobody is there to be answered
            return Response(status_code=400)
        except Refused as problem:
            document = {"message": str(problem)} | ({"code": problem.code} if problem.code else {})
            return JSONResponse(document, status_code=problem.status)

    return answer


class Pages:
    """One method an endpoint."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    async def ping(self, _: Request) -> Response:
        """Whether it is healthy."""
        return PlainTextResponse("OK")

    async def info(self, _: Request) -> Response:
        """Who this is."""
        options = self.broker.options
        return JSONResponse(
            {
                "version": VERSION,
                "broadcast_address": options.address,
                "hostname": options.name,
                "http_port": self.broker.http_port,
                "tcp_port": self.broker.tcp_port,
                "start_time": self.broker.started_ns // NS_PER_S,
                "max_heartbeat_interval": options.settings.max_heartbeat_ms * NS_PER_MS,
                "max_output_buffer_size": options.settings.max_output_buffer_size,
                "max_output_buffer_timeout": options.settings.max_output_buffer_timeout_ms * NS_PER_MS,
                "max_deflate_level": options.settings.max_deflate_level,
                "topology_zone": "",
                "topology_region": "",
                "srtm": srtm.__version__,
            }
        )

    async def pub(self, request: Request) -> Response:
        """Publish the body as one message."""
        body = await _body(request, self.broker.options.settings.max_msg_size, "MSG_TOO_BIG")
        self._check_size(len(body), self.broker.options.settings.max_msg_size, "MSG")
        topic = self._named_topic(request, make=True)
        delay_ns = self._delay_ns(request)
        await self._publish(topic, [body], delay_ns, request)
        return PlainTextResponse("OK")

    async def mpub(self, request: Request) -> Response:
        """Publish the body's lines, or, with ?binary=true, its sized messages."""
        settings = self.broker.options.settings
        body = await _body(request, settings.max_body_size, "BODY_TOO_BIG")
        self._check_size(len(body), settings.max_body_size, "BODY")
        topic = self._named_topic(request, make=True)
        if request.query_params.get("binary", "false").lower() in ("1", "true", ""):
            bodies = _sized(body)
        else:
            bodies = [line for line in body.split(b"\n") if line]
        for each in bodies:
            self._check_size(len(each), settings.max_msg_size, "MSG")
        await self._publish(topic, bodies, 0, request)
        return PlainTextResponse("OK")

    async def topic_create(self, request: Request) -> Response:
        """Make a topic; with ?durability=disk, one whose messages are on disk before they are answered.

        A disk topic may be told what it keeps, now or later: &retain_bytes=…&retain_age=…&retain_acknowledged=….
        """
        named = request.query_params.get("durability")
        wanted = named or "memory"
        told = _retention(request.query_params)
        if wanted not in ("memory", "disk"):
            raise Refused(400, "INVALID_DURABILITY: it is memory or disk")
        topic = self._named_topic(request, make=True)
        if wanted == "disk" and topic.durable is None:
            if self.broker.durable is None:
                raise Refused(400, "INVALID_DURABILITY: this broker has no --data-path")
            if topic.messages or topic.ephemeral:
                raise Refused(400, "INVALID_DURABILITY: the topic is ephemeral, or has messages in memory")
            self.broker.durable.adopt(topic)
        if named == "memory" and topic.durable is not None:
            raise Refused(400, "INVALID_DURABILITY: the topic is on disk; delete it to make it one in memory")
        if told and topic.durable is None:
            raise Refused(400, "INVALID_RETENTION: only disk topics keep messages; add durability=disk")
        if topic.durable is not None and self.broker.durable is not None:
            try:
                await self.broker.durable.keep(topic, **told)
            except LogError as problem:
                raise Refused(503, f"CREATE_FAILED: {problem}") from None
        return Response()

    async def log_extent(self, request: Request) -> Response:
        """What a disk topic keeps: {"log", "begin", "end", "bytes", "retention"}."""
        topic, durable = self._on_disk(request)
        return JSONResponse({**durable.extent(topic), "retention": _told(durable.retention(topic))})

    async def log_read(self, request: Request) -> Response:
        """A range of a disk topic as an Arrow stream: ?topic=…&begin=…&limit=…; the same range gives the same rows.

        With &log=ID it does so for ever: 410 if the topic was deleted and created again since that log was read.
        """
        topic, durable = self._on_disk(request)
        begin, limit = self._number(request, "begin"), self._number(request, "limit", 10_000)
        try:
            records = await durable.read(topic, begin, min(limit, 100_000), request.query_params.get("log"))
        except OffsetTrimmed as problem:
            raise Refused(410, f"OFFSET_TRIMMED: {problem}") from None
        except LogReplaced as problem:
            raise Refused(410, f"LOG_REPLACED: {problem}") from None
        except LogError as problem:
            raise Refused(400, f"INVALID_OFFSET: {problem}") from None
        # Beside the loop, as the reading is: a megabyte of small messages takes ten milliseconds.
        rows = await self.broker.turn.loop.run_in_executor(None, _arrow, topic.name, begin, records)
        return Response(rows, media_type="application/vnd.apache.arrow.stream")

    async def log_trim(self, request: Request) -> Response:
        """Forget what is older than an offset: ?topic=…&before=…, and &finished=true for what all channels finished.

        With &log=ID, of that log alone.
        """
        topic, durable = self._on_disk(request)
        finished = request.query_params.get("finished", "false")
        if finished not in ("true", "false"):
            raise Refused(400, f"INVALID_FINISHED: true or false, not {finished!r}")
        try:
            before, log = self._number(request, "before"), request.query_params.get("log")
            await durable.trim(topic, before, finished=finished == "true", log=log)
        except LogReplaced as problem:
            raise Refused(410, f"LOG_REPLACED: {problem}") from None
        except LogError as problem:
            raise Refused(400, f"INVALID_OFFSET: {problem}") from None
        return Response()

    def _on_disk(self, request: Request) -> tuple[Topic, Durable]:
        topic = self._named_topic(request)
        if topic.durable is None or self.broker.durable is None:
            raise Refused(400, "NOT_ON_DISK: only disk topics have a log")
        return topic, self.broker.durable

    def _number(self, request: Request, name: str, default: int | None = None) -> int:
        text = request.query_params.get(name, "" if default is None else str(default))
        found = _whole(text)
        if found is None:
            raise Refused(400, f"INVALID_{name.upper()}: it must be a whole number")
        return found

    async def topic_delete(self, request: Request) -> Response:
        """Forget a topic and all that it holds; its consumers are disconnected."""
        topic = self._named_topic(request)
        self.broker.topics.delete(topic)
        return await self._noted(topic)

    async def topic_empty(self, request: Request) -> Response:
        """Forget the messages that no channel has yet."""
        topic = self._named_topic(request)
        if topic.durable is not None and self.broker.durable is not None:
            try:
                await self.broker.durable.empty(topic)
            except LogError as problem:
                raise Refused(503, f"EMPTY_FAILED: {problem}") from None
        topic.empty(time.time_ns())
        if self.broker.topics.alive(topic):
            self.broker.turn.touch(topic)  # publishers that leave wait no longer for what is gone
        return Response()

    async def topic_pause(self, request: Request) -> Response:
        """Give no messages to channels for a while."""
        topic = self._named_topic(request)
        topic.pause(time.time_ns(), on=True)
        return await self._noted(topic)

    async def topic_unpause(self, request: Request) -> Response:
        """Go on."""
        topic = self._named_topic(request)
        topic.pause(time.time_ns(), on=False)
        self.broker.turn.touch(topic)
        return await self._noted(topic)

    async def topic_limit(self, request: Request) -> Response:
        """Set the sub-token bucket: ?topic=…&r=…&b=…, or none without r and b."""
        r, b = request.query_params.get("r"), request.query_params.get("b")
        try:
            bucket = TokenBucket.of(_decimal(r), _decimal(b)) if r is not None and b is not None else None
        except InputError as problem:
            raise Refused(400, f"INVALID_BUCKET: {problem}") from None
        if (r is None) != (b is None):
            raise Refused(400, "INVALID_BUCKET: give r and b, or neither")
        topic = self._named_topic(request, make=True)
        if self.broker.control.holds(topic.name):
            raise Refused(409, "UNDER_CONTRACT: the controller decides on (r, b) of this topic; ask it")
        topic.by_hand = bucket
        topic.limit(bucket, time.time_ns())
        self.broker.turn.touch(topic)
        return await self._noted(topic)

    async def _noted(self, topic: Topic) -> Response:
        """What an operator did is in force; it is answered when it also outlives a restart."""
        if self.broker.durable is not None:
            try:
                await self.broker.durable.noted(topic)
            except LogError as problem:
                raise Refused(503, f"NOT_SAVED: it is in force until the broker ends, but {problem}") from None
        return Response()

    async def channel_create(self, request: Request) -> Response:
        """Make a channel."""
        topic = self._named_topic(request)
        try:
            self.broker.topics.channel(topic, self._channel_name(request))
        except BrokerError as problem:
            raise Refused(409, f"NO_CHANNELS: {problem}") from None
        self.broker.turn.wake()
        return Response()

    async def channel_delete(self, request: Request) -> Response:
        """Forget a channel and all that it holds; its consumers are disconnected."""
        topic, channel = self._named_channel(request)
        self.broker.topics.delete_channel(topic, channel)
        return await self._noted(topic)

    async def channel_empty(self, request: Request) -> Response:
        """Forget a channel's messages."""
        self._named_channel(request)[1].empty()
        return Response()

    async def channel_pause(self, request: Request) -> Response:
        """Give no messages to consumers for a while."""
        topic, channel = self._named_channel(request)
        channel.paused = True
        return await self._noted(topic)

    async def channel_unpause(self, request: Request) -> Response:
        """Go on."""
        topic, channel = self._named_channel(request)
        channel.paused = False
        self.broker.turn.pump(channel)
        return await self._noted(topic)

    async def exchange(self, request: Request) -> Response:
        """What the controller says, and what it wants to know (`protocol.exchange`)."""
        if self.broker.options.controller is None:
            raise Refused(
                409, "NOT_MANAGED: this broker has no controller; start it with --controller", RefusalCode.NOT_MANAGED
            )
        token = self.broker.options.control_token
        if token is not None and not _shows(request, token):
            raise Refused(
                401, "UNAUTHORIZED: the controller must send this broker's --control-token", RefusalCode.UNAUTHORIZED
            )
        try:
            body = await _body(request, exchange.MAX_BODY, f"INVALID_EXCHANGE: more than {exchange.MAX_BODY} bytes")
            said = exchange.read(body, exchange.Exchange)
            answer = self.broker.control.exchange(said, time.time_ns(), time.monotonic_ns())
        except ProtocolError as problem:
            raise Refused(400, f"INVALID_EXCHANGE: {problem}", RefusalCode.INVALID_EXCHANGE) from None
        except ExchangeRefused as problem:
            raise Refused(409, f"{problem.code}: {problem}", problem.code) from None
        return Response(exchange.write(answer), media_type="application/json")

    async def probe(self, request: Request) -> Response:
        """Time a topic's messages to a consumer of its engine: ?topic=…, and &on=false to end that."""
        topic, on = self._named_topic(request), request.query_params.get("on", "true")
        if on not in ("true", "false"):
            raise Refused(400, f"INVALID_ON: true or false, not {on!r}")
        engine = self.broker.topics.engine
        if engine is None:
            raise Refused(409, "NO_ENGINE: this broker delivers by itself, and measures to its subscribers anyway")
        engine.lane(topic).watch(on=on == "true")
        return Response()

    async def trace_start(self, request: Request) -> Response:
        """Record every message from now on: ?file=NAME.parquet, in the folder that was configured."""
        from srtm.broker.recorder import Recorder

        folder, name = self.broker.options.trace_folder, request.query_params.get("file", "")
        if folder is None:
            raise Refused(403, "TRACE_DISABLED: start the broker with --trace-folder")
        if Path(name).name != name or name.startswith(".") or not name.endswith(".parquet"):
            raise Refused(400, "INVALID_ARG_FILE: a name that ends with .parquet, without a folder")
        if self.broker.turn.recorder is not None:
            raise Refused(409, "TRACE_RUNNING")
        path = Path(folder) / name
        if path.exists():
            raise Refused(409, "TRACE_EXISTS")
        broker = self.broker
        recorder = Recorder(path, broker.options.name, broker.control.groups, broker.turn.loop, broker.control.birth)
        recorder.start()
        self.broker.turn.recorder = recorder
        return JSONResponse({"file": str(path)})

    async def trace_stop(self, _: Request) -> Response:
        """Record no more; the file is there when this is answered."""
        recorder, self.broker.turn.recorder = self.broker.turn.recorder, None
        if recorder is None:
            raise Refused(409, "TRACE_NOT_RUNNING")
        try:
            await recorder.stop()
        except SRTMError as problem:
            raise Refused(500, f"TRACE_FAILED: {problem}") from None
        return JSONResponse({"file": str(recorder.path), "messages": recorder.rows})

    async def stats(self, request: Request) -> Response:
        """What it does: nsqd's shape with ?format=json, or text; ours under `srtm`."""
        query = request.query_params
        with_clients = query.get("include_clients", "true").lower() not in ("false", "0")
        document = snapshot.of(self.broker, query.get("topic"), query.get("channel"), with_clients=with_clients)
        if query.get("format") == "json":
            return JSONResponse(document)
        return PlainTextResponse(snapshot.as_text(document))

    async def metrics(self, _: Request) -> Response:
        """The same for Prometheus."""
        from srtm.broker.http import metrics

        return Response(metrics.page(self.broker), media_type=metrics.MEDIA_TYPE)

    async def _publish(self, topic: Topic, bodies: list[bytes], delay_ns: int, request: Request) -> None:
        """Give messages to the intake, and wait until they are safe."""
        broker = self.broker
        publisher = f"{request.client.host}:{request.client.port}" if request.client else "http"
        sender = HttpSender(publisher, broker.turn.loop.create_future())
        try:
            receipt = broker.intake.publish(sender, topic.name, bodies, broker.turn.now_ns(), delay_ns)
        except PublishRefused as problem:
            raise Refused(*_REFUSALS[problem.facts["reason"]](problem)) from None
        broker.turn.wake()
        if receipt is not None and (failure := await sender.answer):
            raise Refused(503, f"PUB_FAILED: {failure}")

    def _named_topic(self, request: Request, *, make: bool = False) -> Topic:
        name = request.query_params.get("topic")
        if not name:
            raise Refused(400, "MISSING_ARG_TOPIC")
        if not valid_name(name):
            raise Refused(400, "INVALID_TOPIC" if make else "INVALID_ARG_TOPIC")
        topic = self.broker.topics.get(name)
        if topic is None and not make:
            raise Refused(404, "TOPIC_NOT_FOUND")
        try:
            return topic or self.broker.topics.touch(name)
        except BrokerError as problem:
            raise Refused(400, f"INVALID_TOPIC: {problem}") from None

    def _channel_name(self, request: Request) -> str:
        name = request.query_params.get("channel")
        if not name:
            raise Refused(400, "MISSING_ARG_CHANNEL")
        if not valid_name(name):
            raise Refused(400, "INVALID_ARG_CHANNEL")
        return name

    def _named_channel(self, request: Request) -> tuple[Topic, Channel]:
        name, topic = self._channel_name(request), self._named_topic(request)
        if name not in topic.channels:
            raise Refused(404, "CHANNEL_NOT_FOUND")
        return topic, topic.channels[name]

    def _delay_ns(self, request: Request) -> int:
        delay_ms = _whole(request.query_params.get("defer", "0"))
        if delay_ms is None or delay_ms > self.broker.options.settings.max_req_timeout_ms:
            raise Refused(400, "INVALID_DEFER")
        return delay_ms * NS_PER_MS

    def _check_size(self, size: int, limit: int, what: str) -> None:
        if size > limit:
            raise Refused(413, f"{what}_TOO_BIG")
        if not size:
            raise Refused(400, f"{what}_EMPTY")


class HttpSender:
    """A request that publishes. It cannot be made to wait: a crowded topic refuses it."""

    def __init__(self, publisher: str, answer: asyncio.Future[str | None]) -> None:
        """`answer` becomes None when the messages are safe, or the reason why they never will be."""
        self.publisher = publisher
        self.too_full: Callable[[Topic], bool] | None = attrgetter("crowded")
        self.answer = answer

    def settle(self) -> None:
        """The messages are safe."""
        if not self.answer.done():
            self.answer.set_result(None)

    def refused(self, _receipt: Receipt, problem: str) -> None:
        """They never will be."""
        if not self.answer.done():
            self.answer.set_result(problem)

    def block(self, _topic: Topic) -> bool:
        """Do not wait."""
        return False

    def unblock(self, topic: Topic) -> None:
        """Nothing was blocked."""

    def hold(self) -> None:
        """A request has said everything."""

    def release(self) -> None:
        """A request has said everything."""

    def slow(self) -> None:
        """A request has said everything."""


async def _body(request: Request, limit: int, problem: str) -> bytes:
    """The body of a request. One that is too large is refused as soon as that is known; what still comes is dropped."""
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told) > limit:
        raise Refused(413, problem)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise Refused(413, problem)
    return bytes(body)


def _shows(request: Request, token: str) -> bool:
    shown = request.headers.get("authorization", "")
    return hmac.compare_digest(shown.encode(), f"Bearer {token}".encode())


def _told(retention: Retention) -> dict[str, Any]:
    """A retention in the words of the flags."""
    return {
        "max_bytes": retention.max_bytes,
        "max_age_ns": retention.max_age_ns,
        "retain_acknowledged": not retention.acknowledged,
    }


def _retention(query: QueryParams) -> dict[str, Any]:
    """The fields of a `Retention` that a request names; `none` takes a limit away."""
    told: dict[str, Any] = {}
    size, age, finished = (query.get(f"retain_{name}") for name in ("bytes", "age", "acknowledged"))
    if size is not None:
        told["max_bytes"] = None if size == "none" else _whole(size)
        if size != "none" and not told["max_bytes"]:
            raise Refused(400, f"INVALID_RETAIN_BYTES: a whole number of at least 1, or none, not {size!r}")
    if age is not None:
        try:
            told["max_age_ns"] = None if age == "none" else retained_ns(age)
        except InputError as problem:
            raise Refused(400, f"INVALID_RETAIN_AGE: {problem}") from None
    if finished is not None:
        if finished not in ("true", "false"):
            raise Refused(400, f"INVALID_RETAIN_ACKNOWLEDGED: true or false, not {finished!r}")
        told["acknowledged"] = finished == "false"
    return told


def _whole(text: str) -> int | None:
    """A whole number that fits 64 bits; None if it is none. Signs, underscores and other scripts' digits are not."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def _decimal(text: str) -> str:
    """The text, if it is a decimal number that can be one of tokens."""
    if _DECIMAL.fullmatch(text) is None:
        raise InputError(f"a number of tokens is written as 2.5 or 1e3, not {text!r}", value=text)
    return text


def _arrow(topic: str, begin: int, records: list[Record]) -> bytes:
    """Rows of the log, as Spark reads them."""
    import pyarrow as pa

    table = pa.table(
        {
            "topic": pa.array([topic] * len(records), pa.string()),
            "offset": pa.array(range(begin, begin + len(records)), pa.int64()),
            "arrival_ns": pa.array([record.arrival_ns for record in records], pa.int64()),
            "publisher": pa.array([record.publisher for record in records], pa.string()),
            "body": pa.array([record.body for record in records], pa.binary()),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue())


def _sized(body: bytes) -> list[bytes]:
    """The messages of a binary MPUB: [count 4]{[size 4][body]}…"""
    bodies, at = [], 4
    for _ in range(int.from_bytes(body[:4], "big")):
        size = int.from_bytes(body[at : at + 4], "big")
        if not 0 < size <= len(body) - at - 4:
            raise Refused(413, "BAD_MESSAGE")
        bodies.append(body[at + 4 : at + 4 + size])
        at += 4 + size
    if at != len(body) or not bodies:
        raise Refused(413, "BAD_BODY")
    return bodies
