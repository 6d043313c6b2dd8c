"""A conversation over HTTP: what is asked of a real nsqd and of our broker, one request after the other.

Requests change topics and channels, so their order counts; both servers begin empty.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
from dataclasses import dataclass, field
from struct import pack
from typing import Any

from tests.broker.running import PATIENCE_S

HEADERS = ("content-type", "x-nsq-content-type", "allow", "location")
OWN = {"start_time", "hostname", "tcp_port", "http_port"}  # of each server
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Ask:
    """One request."""

    method: str
    target: str
    body: bytes | None = b""  # None: without a Content-Length
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        shown = self.body[:24] if self.body else b""
        return f"{self.method} {self.target[:90]} {shown!r}".replace("\x00", "")


@dataclass(frozen=True)
class Answer:
    """What came back, as far as two servers can agree."""

    status: int
    headers: dict[str, str | None]
    body: Any


def binary(*bodies: bytes, count: int | None = None, after: bytes = b"") -> bytes:
    """The body of a binary /mpub."""
    framed = b"".join(pack(">i", len(body)) + body for body in bodies)
    return pack(">i", len(bodies) if count is None else count) + framed + after


def chunked(*parts: bytes) -> bytes:
    """A body in chunks."""
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


def ask(request: Ask, port: int) -> Answer:
    """Send a request as it is, and read the answer."""
    headers = {"Host": f"127.0.0.1:{port}", "Connection": "close", **request.headers}
    if request.body is not None and "Transfer-Encoding" not in headers:
        headers.setdefault("Content-Length", str(len(request.body)))
    lines = [f"{request.method} {request.target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
        sock.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + (request.body or b""))
        response = http.client.HTTPResponse(sock, method=request.method)
        response.begin()
        body = response.read()
    return Answer(response.status, {name: response.headers[name] for name in HEADERS}, _readable(body))


def _readable(text: bytes) -> Any:
    """A body without what no two servers share: times, memory, and what SRTM adds."""
    try:
        document = json.loads(text)
    except ValueError:
        return _shown(text)
    return _shared(document)


def _shared(found: Any) -> Any:
    if isinstance(found, list):
        return [_shared(each) for each in found]
    if not isinstance(found, dict):
        return found
    kept = {name: _shared(value) for name, value in found.items() if name != "srtm"}
    if isinstance(kept.get("memory"), dict):
        kept["memory"] = list(kept["memory"])  # its names, in order
    return kept | dict.fromkeys(kept.keys() & OWN, 0)


def _shown(text: bytes) -> bytes:
    """Text with times and sizes replaced; nsqd's name and Go's version follow ours."""
    text = re.sub(rb"(?m)^nsqd v1\.3\.0.*$", b"nsqd v1.3.0", text)
    text = re.sub(rb"(?m)^start_time .*$", b"start_time", text)
    text = re.sub(rb"(?m)^uptime .*$", b"uptime", text)
    return re.sub(rb"(?m)^(   (?:heap|gc|next)_\w+ +\t)\d+$", rb"\1N", text)


LONG = "t" * 64
TOO_LONG = "t" * 65
BIG = 1024 * 1024
BODY = 5 * 1024 * 1024

CONVERSATION: list[Ask] = [
    # How it is doing.
    Ask("GET", "/ping"),
    Ask("GET", "/ping?anything=goes"),
    Ask("GET", "/ping", headers={"Accept": "application/json"}),
    Ask("HEAD", "/ping"),
    Ask("POST", "/ping"),
    Ask("OPTIONS", "/ping"),
    Ask("GET", "/ping/"),
    Ask("GET", "/PING"),
    Ask("GET", "/info"),
    Ask("POST", "/info"),
    Ask("OPTIONS", "/info"),
    Ask("GET", "/stats?format=json"),
    Ask("GET", "/stats"),
    Ask("GET", "/stats?format=text"),
    Ask("GET", "/stats?format=JSON"),
    Ask("GET", "/stats?format=json&topic=unknown"),
    Ask("GET", "/stats?format=json&include_mem=false"),
    Ask("GET", "/stats?include_mem=0"),
    Ask("POST", "/stats"),
    Ask("HEAD", "/stats"),
    Ask("OPTIONS", "/stats"),
    # Paths and methods.
    Ask("GET", "/"),
    Ask("GET", "/nothing"),
    Ask("POST", "/nothing"),
    Ask("HEAD", "/nothing"),
    Ask("OPTIONS", "/nothing"),
    Ask("OPTIONS", "*"),
    Ask("GET", "/pub?topic=t"),
    Ask("PUT", "/pub?topic=t", b"x"),
    Ask("DELETE", "/topic/delete?topic=t"),
    Ask("HEAD", "/mpub"),
    Ask("OPTIONS", "/pub"),
    Ask("OPTIONS", "/topic/create"),
    Ask("PATCH", "/mpub", b"x"),
    Ask("BREW", "/ping"),
    Ask("GET", "/topic/create?topic=t"),
    Ask("GET", "/topic"),
    Ask("POST", "/topic/"),
    Ask("POST", "/topic/create/?topic=t"),
    Ask("POST", "/Topic/Create?topic=t"),
    Ask("GET", "/config"),
    Ask("GET", "/config/"),
    # Publishing.
    Ask("POST", "/pub", b"x"),
    Ask("POST", "/pub?topic=", b"x"),
    Ask("POST", "/pub?topic", b"x"),
    Ask("POST", "/pub?Topic=t", b"x"),
    Ask("POST", "/pub?topic=a%20b", b"x"),
    Ask("POST", "/pub?topic=a+b", b"x"),
    Ask("POST", "/pub?topic=%zz", b"x"),
    Ask("POST", "/pub?topic=t;x=1", b"x"),
    Ask("POST", f"/pub?topic={TOO_LONG}", b"x"),
    Ask("POST", "/pub?topic=%C3%A9", b"x"),
    Ask("POST", "/pub?topic=t&channel=%zz", b"x"),
    Ask("POST", "/pub?topic=t", b""),
    Ask("POST", "/pub", b""),
    Ask("POST", "/pub?topic=t", b"hello"),
    Ask("POST", "/pub?topic=t", b"hello", JSON),
    Ask("POST", "/pub?topic=t", b"topic=u", {"Content-Type": "application/x-www-form-urlencoded"}),
    Ask("POST", "/pub", b"topic=u", {"Content-Type": "application/x-www-form-urlencoded"}),
    Ask("POST", "/pub?topic=first&topic=second", b"x"),
    Ask("POST", "/pub?topic=bad+name&topic=second", b"x"),
    Ask("POST", f"/pub?topic={LONG}", b"x"),
    Ask("POST", "/pub?topic=e%23ephemeral", b"x"),
    Ask("POST", "/pub?topic=t", b"x" * BIG),
    Ask("POST", "/pub?topic=t", b"", {"Content-Length": str(BIG + 1), "Expect": "100-continue"}),
    Ask("POST", "/pub?topic=t", chunked(b"ab", b"c"), {"Transfer-Encoding": "chunked"}),
    Ask("POST", "/pub?topic=t", chunked(), {"Transfer-Encoding": "chunked"}),
    Ask("POST", "/pub?topic=t", chunked(b"x" * BIG, b"y"), {"Transfer-Encoding": "chunked"}),
    Ask("POST", "/pub?topic=t&defer=0", b"x"),
    Ask("POST", "/pub?topic=t&defer=", b"x"),
    Ask("POST", "/pub?topic=t&defer=+5", b"x"),
    Ask("POST", "/pub?topic=t&defer=%2B5", b"x"),
    Ask("POST", "/pub?topic=t&defer=-0", b"x"),
    Ask("POST", "/pub?topic=t&defer=-1", b"x"),
    Ask("POST", "/pub?topic=t&defer=1.5", b"x"),
    Ask("POST", "/pub?topic=t&defer=1_0", b"x"),
    Ask("POST", "/pub?topic=t&defer=0x10", b"x"),
    Ask("POST", "/pub?topic=t&defer=007", b"x"),
    Ask("POST", "/pub?topic=t&defer=3600000", b"x"),
    Ask("POST", "/pub?topic=t&defer=3600001", b"x"),
    Ask("POST", "/pub?topic=t&defer=9223372036854775808", b"x"),
    Ask("POST", "/pub?topic=t&defer=x&defer=5", b"x"),
    Ask("POST", "/pub?topic=t&defer=5&defer=x", b"x"),
    Ask("POST", "/pub?topic=new&defer=x", b"x"),
    Ask("POST", "/pub?topic=bad+name&defer=x", b"x"),
    # Several at once.
    Ask("POST", "/mpub", b"a\nb"),
    Ask("POST", "/mpub?topic=", b"a\nb"),
    Ask("POST", "/mpub?topic=bad+name", b"a\nb"),
    Ask("POST", "/mpub?topic=bad+name", b""),
    Ask("POST", "/mpub?topic=m", b""),
    Ask("POST", "/mpub?topic=m", b"\n\n\n"),
    Ask("POST", "/mpub?topic=m", b"a\nb\n\nc\n"),
    Ask("POST", "/mpub?topic=m", b"a\r\nb"),
    Ask("POST", "/mpub?topic=m", b"x" * (BIG + 1)),
    Ask("POST", "/mpub?topic=m", b"a\n" + b"x" * (BIG + 1)),
    Ask("POST", "/mpub?topic=m", b"", {"Content-Length": str(BODY + 1), "Expect": "100-continue"}),
    Ask("POST", "/mpub", b"", {"Content-Length": str(BODY + 1), "Expect": "100-continue"}),
    Ask("POST", "/mpub?topic=m", chunked(b"a\n", b"b"), {"Transfer-Encoding": "chunked"}),
    Ask("POST", "/mpub?topic=m&defer=5", b"a"),
    Ask("POST", "/mpub?topic=m&binary=false", b"a\nb"),
    Ask("POST", "/mpub?topic=m&binary=0", b"a\nb"),
    Ask("POST", "/mpub?topic=m&binary=true", binary(b"a", b"bc")),
    Ask("POST", "/mpub?topic=m&binary=1", binary(b"a", b"bc")),
    Ask("POST", "/mpub?topic=m&binary=yes", binary(b"a", b"bc")),
    Ask("POST", "/mpub?topic=m&binary=TRUE", binary(b"a")),
    Ask("POST", "/mpub?topic=m&binary=False", binary(b"a")),
    Ask("POST", "/mpub?topic=m&binary=", binary(b"a")),
    Ask("POST", "/mpub?topic=m&binary", binary(b"a")),
    Ask("POST", "/mpub?topic=m&binary=true&binary=false", binary(b"a")),
    Ask("POST", "/mpub?topic=m&binary=false&binary=true", b"line"),
    Ask("POST", "/mpub?topic=m&binary=true", binary(b"a\nb", b"\n")),
    Ask("POST", "/mpub?topic=m&binary=true", b""),
    Ask("POST", "/mpub?topic=m&binary=true", b"\x00\x00"),
    Ask("POST", "/mpub?topic=m&binary=true", binary()),
    Ask("POST", "/mpub?topic=m&binary=true", binary(count=-1)),
    Ask("POST", "/mpub?topic=m&binary=true", binary(b"a", count=2)),
    Ask("POST", "/mpub?topic=m&binary=true", binary(b"a", b"", b"c")),
    Ask("POST", "/mpub?topic=m&binary=true", binary(b"a", count=2, after=pack(">i", -1))),
    Ask("POST", "/mpub?topic=m&binary=true", binary(b"a", count=2, after=pack(">i", 10) + b"short")),
    Ask("POST", "/mpub?topic=m&binary=true", binary(b"x" * (BIG + 1))),
    Ask("POST", "/mpub?topic=m&binary=true", binary(b"a", count=1 << 30)),
    Ask("POST", "/mpub?topic=m&binary=true", binary(b"a", count=1, after=b"trailing")),
    Ask("POST", "/mpub?topic=m&binary=true", binary(b"a", b"b", count=1)),
    Ask("POST", "/mpub?topic=m&binary=true", b"plain text"),
    Ask("POST", "/mpub?topic=bad+name&binary=true", b"plain text"),
    # Topics.
    Ask("POST", "/topic/create"),
    Ask("POST", "/topic/create?topic="),
    Ask("POST", "/topic/create?topic=bad+name"),
    Ask("POST", "/topic/create?topic=%zz"),
    Ask("POST", "/topic/create?topic=made"),
    Ask("POST", "/topic/create?topic=made"),
    Ask("POST", "/topic/create?topic=made", b"a body that nobody reads"),
    Ask("POST", "/topic/create?topic=once&topic=twice"),
    *(
        Ask("POST", f"/topic/{verb}{query}")
        for verb in ("delete", "empty", "pause", "unpause")
        for query in ("", "?topic=", "?topic=bad+name", "?topic=%zz", "?topic=unknown")
    ),
    Ask("POST", "/topic/pause?topic=made"),
    Ask("POST", "/topic/pause?topic=made"),
    Ask("GET", "/stats?format=json&topic=made"),
    Ask("GET", "/stats?topic=made"),
    Ask("POST", "/topic/unpause?topic=made"),
    Ask("POST", "/pub?topic=made", b"kept"),
    Ask("POST", "/topic/empty?topic=made"),
    Ask("GET", "/stats?format=json&topic=made&include_clients=false&include_mem=false"),
    Ask("POST", "/topic/delete?topic=once&topic=made"),
    # Channels.
    *(
        Ask("POST", f"/channel/{verb}{query}")
        for verb in ("create", "delete", "empty", "pause", "unpause")
        for query in (
            "",
            "?topic=made",
            "?channel=c",
            "?topic=&channel=c",
            "?topic=bad+name&channel=also+bad",
            "?topic=made&channel=",
            "?topic=made&channel=bad+name",
            "?topic=unknown&channel=c",
            "?topic=%zz",
            *(("?topic=made&channel=unknown",) if verb != "create" else ()),
        )
    ),
    Ask("POST", "/channel/create?topic=made&channel=c&channel=d"),
    Ask("POST", "/channel/create?topic=made&channel=c"),
    Ask("GET", "/stats?format=json&topic=made&channel=c"),
    Ask("GET", "/stats?format=json&topic=made&channel=unknown"),
    Ask("GET", "/stats?format=json&channel=c"),
    Ask("GET", "/stats?topic=made&channel=unknown"),
    Ask("GET", "/stats?format=json&topic=made&include_clients=false"),
    Ask("GET", "/stats?format=json&topic=made&include_clients=FALSE"),
    Ask("GET", "/stats?format=json&topic=made&topic=t&include_clients=0"),
    Ask("GET", "/stats?format=json&topic="),
    Ask("GET", "/stats?topic=%zz"),
    Ask("GET", "/stats?format=json&format=text&topic=made"),
    Ask("POST", "/channel/pause?topic=made&channel=c"),
    Ask("GET", "/stats?topic=made"),
    Ask("GET", "/stats?format=json&topic=made"),
    Ask("POST", "/channel/unpause?topic=made&channel=c"),
    Ask("POST", "/channel/empty?topic=made&channel=c"),
    Ask("POST", "/channel/delete?topic=made&channel=c"),
    Ask("POST", "/channel/delete?topic=made&channel=c"),
    Ask("POST", "/channel/create?topic=made&channel=e%23ephemeral"),
    Ask("GET", "/stats?format=json&topic=made"),
    # Options.
    Ask("GET", "/config/nothing"),
    Ask("PUT", "/config/nothing", b"1"),
    Ask("PUT", "/config/nothing", b""),
    Ask("POST", "/config/log_level", b"info"),
    Ask("OPTIONS", "/config/log_level"),
    Ask("HEAD", "/config/log_level"),
    Ask("GET", "/config/log_level/more"),
    Ask("GET", "/config/nsqlookupd_tcp_addresses"),
    Ask("PUT", "/config/nsqlookupd_tcp_addresses", b"[]"),
    Ask("PUT", "/config/nsqlookupd_tcp_addresses", b""),
    Ask("PUT", "/config/nsqlookupd_tcp_addresses", b"x"),
    Ask("PUT", "/config/nsqlookupd_tcp_addresses", b'{"a": 1}'),
    Ask("PUT", "/config/nsqlookupd_tcp_addresses", b"[1]"),
    Ask("PUT", "/config/nsqlookupd_tcp_addresses", b"null"),
    Ask("GET", "/config/nsqlookupd_tcp_addresses"),
    Ask("GET", "/config/log_level"),
    Ask("PUT", "/config/log_level", b"warn"),
    Ask("GET", "/config/log_level"),
    Ask("PUT", "/config/log_level", b"FATAL"),
    Ask("GET", "/config/log_level"),
    Ask("PUT", "/config/log_level", b"nothing"),
    Ask("PUT", "/config/log_level", b""),
    Ask("PUT", "/config/log_level", b"info"),
    *(
        Ask("GET", f"/config/{name}")
        for name in (
            "max_msg_size",
            "max_body_size",
            "max_req_timeout",
            "max_rdy_count",
            "max_heartbeat_interval",
            "max_output_buffer_size",
            "max_output_buffer_timeout",
            "min_output_buffer_timeout",
            "output_buffer_timeout",
            "max_channel_consumers",
            "max_deflate_level",
            "msg_timeout",
            "max_msg_timeout",
            "deflate",
            "snappy",
            "auth_http_addresses",
            "tls_cert",
            "tls_client_auth_policy",
        )
    ),
    Ask("PUT", "/config/max_msg_size", b"10"),
    # In the end.
    Ask("POST", "/topic/delete?topic=made"),
    Ask("POST", "/topic/delete?topic=made"),
    Ask("GET", "/stats?format=json"),
    Ask("GET", "/stats"),
]

# Answered by nsqd and not by us: docs/protocol.md says why.
DEPARTURES: list[Ask] = [
    Ask("GET", "/debug/pprof/cmdline"),
    Ask("GET", "/config/mem_queue_size"),
    Ask("GET", "/config/statsd_interval"),
]
