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
    ],
)
def test_addresses(text: str, meant: EngineAddress | None) -> None:
    assert parse(text) == meant


def test_a_login_is_shown_to_nobody() -> None:
    found = parse("nats://me:secret@a:1")
    assert "secret" not in f"{found} {found!r}"
    with pytest.raises(InputError, match="'redis://…@a' is no engine") as problem:
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
