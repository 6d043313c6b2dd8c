"""IDENTIFY: the negotiation between client and server.

In: the JSON body of IDENTIFY and the server's settings. Out: an `Identity`, settled by nsqd's rules in nsqd's order,
and the body of the response. Times are whole milliseconds, as on the wire; 0 means off.

SRTM's clients add `"srtm": {"publisher": str, "group": str or null, "topic": str or null}`. nsqd ignores it; our
response repeats it to clients that sent it. A subscriber that reads a log from an offset on adds
`"srtm": {"replay": {"offset": n, "log": id}}`; without `log`, it reads the topic's current log. A broker that delivers
through an engine tells every client so, by `"srtm": {"engine": address}`, before a SUB is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from srtm.errors import ProtocolError
from srtm.protocol import gojson
from srtm.protocol.names import Settings, valid_name

MAX_SRTM_NAME = 256  # characters of a publisher's or group's name: a key in the controller's store

_DEFAULT_DEFLATE_LEVEL = 6
_FIELDS: gojson.Fields = {
    "client_id": "",
    "hostname": "",
    "user_agent": "",
    "heartbeat_interval": 0,
    "output_buffer_size": 0,
    "output_buffer_timeout": 0,
    "sample_rate": 0,
    "msg_timeout": 0,
    "feature_negotiation": False,
    "tls_v1": False,
    "deflate": False,
    "deflate_level": 0,
    "snappy": False,
    "srtm": None,
}
_INT32 = frozenset({"sample_rate"})


class Declared(NamedTuple):
    """A publisher's declaration: its id, its correlation group, and the topic that it will publish to."""

    publisher: str
    group: str | None
    topic: str | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """A connection as negotiated; before IDENTIFY, the server's defaults."""

    heartbeat_ms: int
    output_buffer_size: int
    output_buffer_timeout_ms: int
    msg_timeout_ms: int
    client_id: str = ""
    hostname: str = ""
    user_agent: str = ""
    sample_rate: int = 0
    feature_negotiation: bool = False
    tls_v1: bool = False
    deflate: bool = False
    deflate_level: int = _DEFAULT_DEFLATE_LEVEL
    snappy: bool = False
    srtm: Declared | None = None
    replay: int | None = None  # the offset at which its subscription begins
    replay_log: str | None = None  # the id of the log that the offset belongs to, if given

    @classmethod
    def default(cls, settings: Settings) -> Identity:
        """Return the identity of a client that has not sent IDENTIFY."""
        return cls(
            settings.heartbeat_ms,
            settings.output_buffer_size,
            settings.output_buffer_timeout_ms,
            settings.msg_timeout_ms,
        )

    @property
    def upgrades(self) -> bool:
        """Whether the bytes after the response are TLS or compressed."""
        return self.tls_v1 or self.deflate or self.snappy


def negotiate(body: bytes, settings: Settings, before: Identity) -> Identity:
    """Return the identity after an IDENTIFY; fields that it omits keep their value from `before`."""
    try:
        asked = gojson.read(body, _FIELDS, int32=_INT32)
    except ValueError as problem:
        raise ProtocolError("E_BAD_BODY", "IDENTIFY failed to decode JSON body", cause=str(problem)) from None
    heartbeat_ms = _heartbeat(asked["heartbeat_interval"], settings, before)
    output_buffer_size, output_buffer_timeout_ms = _output_buffer(asked, settings, before)
    replay, replay_log = _replay(asked["srtm"]) or (before.replay, before.replay_log)
    identity = Identity(
        heartbeat_ms,
        output_buffer_size,
        output_buffer_timeout_ms,
        sample_rate=_sample_rate(asked["sample_rate"], settings),
        msg_timeout_ms=_msg_timeout(asked["msg_timeout"], settings, before),
        client_id=asked["client_id"],
        hostname=asked["hostname"],
        user_agent=asked["user_agent"],
        feature_negotiation=asked["feature_negotiation"],
        srtm=_declared(asked["srtm"]) or before.srtm,
        replay=replay,
        replay_log=replay_log,
    )
    if not identity.feature_negotiation:
        return identity
    deflate, snappy = settings.deflate and asked["deflate"], settings.snappy and asked["snappy"]
    if deflate and snappy:
        raise ProtocolError("E_IDENTIFY_FAILED", "cannot enable both deflate and snappy compression")
    level = asked["deflate_level"] if deflate and asked["deflate_level"] > 0 else _DEFAULT_DEFLATE_LEVEL
    return replace(
        identity,
        tls_v1=settings.tls_v1 and asked["tls_v1"],
        deflate=deflate,
        deflate_level=min(level, settings.max_deflate_level),
        snappy=snappy,
    )


def response(identity: Identity, settings: Settings, engine: str | None = None) -> bytes:
    """Return the body of the answer to IDENTIFY: OK, or the settled values if the client negotiates.

    `engine` is the address of the engine that delivers the broker's messages, if there is one.
    """
    if not identity.feature_negotiation:
        return b"OK"
    settled: dict[str, Any] = {
        "max_rdy_count": settings.max_rdy_count,
        "version": settings.version,
        "max_msg_timeout": settings.max_msg_timeout_ms,
        "msg_timeout": identity.msg_timeout_ms,
        "tls_v1": identity.tls_v1,
        "deflate": identity.deflate,
        "deflate_level": identity.deflate_level,
        "max_deflate_level": settings.max_deflate_level,
        "snappy": identity.snappy,
        "sample_rate": identity.sample_rate,
        "auth_required": settings.auth_required,
        "output_buffer_size": identity.output_buffer_size,
        "output_buffer_timeout": identity.output_buffer_timeout_ms,
    }
    ours: dict[str, Any] = identity.srtm._asdict() if identity.srtm else {}
    if identity.replay is not None:
        named = {} if identity.replay_log is None else {"log": identity.replay_log}
        ours["replay"] = {"offset": identity.replay, **named}
    if engine is not None:
        ours["engine"] = engine
    if ours:
        settled["srtm"] = ours
    return gojson.write(settled)


def _heartbeat(asked: int, settings: Settings, before: Identity) -> int:
    if asked == 0:
        return before.heartbeat_ms
    if asked == -1:
        return 0
    if settings.min_heartbeat_ms <= asked <= settings.max_heartbeat_ms:
        return asked
    raise _invalid("heartbeat interval", asked)


def _output_buffer(asked: gojson.Fields, settings: Settings, before: Identity) -> tuple[int, int]:
    size, timeout_ms = asked["output_buffer_size"], asked["output_buffer_timeout"]
    settled_ms = before.output_buffer_timeout_ms
    if timeout_ms == -1:
        settled_ms = 0
    elif settings.min_output_buffer_timeout_ms <= timeout_ms <= settings.max_output_buffer_timeout_ms:
        settled_ms = timeout_ms
    elif timeout_ms:
        raise _invalid("output buffer timeout", timeout_ms)
    if size == 0:
        return before.output_buffer_size, settled_ms
    if size == -1:
        return 1, 0
    if settings.min_output_buffer_size <= size <= settings.max_output_buffer_size:
        return size, settled_ms
    raise _invalid("output buffer size", size)


def _sample_rate(asked: int, settings: Settings) -> int:
    if 0 <= asked <= settings.max_sample_rate:
        return asked
    raise _invalid("sample rate", asked)


def _msg_timeout(asked: int, settings: Settings, before: Identity) -> int:
    if asked == 0:
        return before.msg_timeout_ms
    if settings.min_msg_timeout_ms <= asked <= settings.max_msg_timeout_ms:
        return asked
    raise _invalid("msg timeout", asked)


def _invalid(what: str, value: int) -> ProtocolError:
    return ProtocolError("E_BAD_BODY", f"IDENTIFY {what} ({value}) is invalid", value=value)


def _declared(found: Any) -> Declared | None:
    if found is None:
        return None
    if not isinstance(found, dict):
        raise ProtocolError("E_BAD_BODY", "IDENTIFY srtm must be an object")
    if "replay" in found and "publisher" not in found:  # it only subscribes
        return None
    publisher: Any = found.get("publisher")
    group: Any = found.get("group")
    if not _name(publisher):
        raise ProtocolError("E_BAD_BODY", f"IDENTIFY srtm publisher must be 1 to {MAX_SRTM_NAME} characters")
    if group is not None and not _name(group):
        raise ProtocolError("E_BAD_BODY", f"IDENTIFY srtm group must be null or 1 to {MAX_SRTM_NAME} characters")
    topic: Any = found.get("topic")
    if topic is not None and not (isinstance(topic, str) and valid_name(topic)):
        raise ProtocolError("E_BAD_BODY", "IDENTIFY srtm topic must be null or a valid topic name")
    return Declared(gojson.text(publisher), None if group is None else gojson.text(group), topic)


def _replay(found: Any) -> tuple[int, str | None] | None:
    asked: Any = found.get("replay") if isinstance(found, dict) else None
    if asked is None:
        return None
    offset: Any = asked.get("offset") if isinstance(asked, dict) else None
    log: Any = asked.get("log") if isinstance(asked, dict) else None
    if log is not None and not _name(log):
        raise ProtocolError("E_BAD_BODY", "IDENTIFY srtm replay log must be the id of a log, or left out")
    if type(offset) is not int or offset < 0:
        raise ProtocolError("E_BAD_BODY", 'IDENTIFY srtm replay must be {"offset": n} with an integer n of at least 0')
    return offset, None if log is None else gojson.text(log)


def _name(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_SRTM_NAME
