"""How engines are named, and what they cannot take."""

from __future__ import annotations

import pytest

from srtm.errors import InputError
from srtm.protocol.engine import EngineAddress, parse, refusal


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("local", None),
        ("nsqd://10.0.0.1:5150", EngineAddress("nsqd", (("10.0.0.1", 5150),))),
        ("nsqd://host", EngineAddress("nsqd", (("host", 4150),))),
        ("nsqd:///run/nsqd.sock", EngineAddress("nsqd", (("/run/nsqd.sock", 0),))),
        ("nats://a", EngineAddress("nats", (("a", 4222),))),
        ("nats://a:1,b,[::1]:3?replicas=3", EngineAddress("nats", (("a", 1), ("b", 4222), ("::1", 3)), 3)),
        ("nats://a:1,nats://b:2", EngineAddress("nats", (("a", 1), ("b", 2)))),
        ("nats://me:se%40cret@a:1", EngineAddress("nats", (("a", 1),), 1, "me", "se@cret")),
        ("nats://token@a:1", EngineAddress("nats", (("a", 1),), 1, "token")),
        ("nats://a?creds=u", EngineAddress("nats", (("a", 4222),), creds="u")),
        ("nsqd://s%3Fe:c@a", EngineAddress("nsqd", (("a", 4150),), user="s?e:c")),
        ("nsqd://s@/run/nsqd.sock", EngineAddress("nsqd", (("/run/nsqd.sock", 0),), user="s")),
        ("nsqd+tls://a", EngineAddress("nsqd", (("a", 4150),), tls=True)),
        ("tls://a:1,tls://b:2", EngineAddress("nats", (("a", 1), ("b", 2)), tls=True)),
        (
            "nats+tls://me:x@a:1?replicas=3&ca=%2Fc&cert=d&key=e%20e",
            EngineAddress("nats", (("a", 1),), 3, "me", "x", tls=True, ca="/c", cert="d", key="e e"),
        ),
    ],
)
def test_addresses(text: str, meant: EngineAddress | None) -> None:
    assert parse(text) == meant


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("http://a", "with TLS nsqd\\+tls:// or nats\\+tls://"),
        ("nats://a?ca=x", "option ca requires TLS: write nats\\+tls://"),
        ("nsqd+tls://a?creds=x", "unknown option 'creds' for nsqd; known options: ca, cert, key"),
        (
            "nats+tls://a?insecure=1",
            "unknown option 'insecure' for nats; known options: creds, handshake_first, replicas, ca, cert, key",
        ),
        ("nats+tls://a?ca=", "option ca is empty"),
        ("nats+tls://a?key=x", "give cert, too"),
        ("nats://a?replicas=9", "replicas must be 1 to 5, not '9'"),
        ("nats://me@a?creds=x", "invalid engine 'nats://…@a\\?creds=x': give a login or creds, not both"),
        ("nsqd://secret@a,b", "invalid engine 'nsqd://…@a,b': an nsqd has exactly one host:port"),
    ],
)
def test_addresses_that_are_none(text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        parse(text)


def test_a_login_is_shown_to_nobody() -> None:
    found = parse("nats://me:secret@a:1")
    assert "secret" not in f"{found} {found!r}"
    assert str(parse("tls://me:secret@a:1?ca=x&replicas=3")) == "nats+tls://a:1"
    with pytest.raises(InputError, match="invalid engine 'redis://…@a'") as problem:
        parse("redis://me:secret@a")
    assert "secret" not in str(problem.value)


@pytest.mark.parametrize(
    ("kind", "topic", "why"),
    [
        ("local", "a..b#ephemeral", None),
        ("nsqd", "a..b", None),
        ("nsqd", "t#ephemeral", None),
        ("nats", "a.b-c_d", None),
        ("nats", "t#ephemeral", "cannot be ephemeral"),
        ("nats", ".a", "no part between its dots may be empty"),
        ("nats", "a.", "no part between its dots may be empty"),
    ],
)
def test_what_an_engine_cannot_have(kind: str, topic: str, why: str | None) -> None:
    found = refusal(kind, topic)
    assert (found is None) if why is None else (found is not None and why in found)
