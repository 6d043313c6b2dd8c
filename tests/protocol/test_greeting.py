"""What is agreed with engines before they are used, word for word."""

from __future__ import annotations

import json

import pytest

from srtm.errors import InputError, ProtocolError
from srtm.protocol import client as say
from srtm.protocol import greeting
from srtm.protocol.engine import EngineAddress, parse
from srtm.protocol.names import MAGIC_V2


def engine(text: str) -> EngineAddress:
    found = parse(text)
    assert found is not None
    return found


def identify(*, tls: bool) -> bytes:
    return say.identify({"client_id": "me", "feature_negotiation": True, "tls_v1": tls})


def settled(**fields: bool) -> bytes:
    return json.dumps(fields).encode()


def test_nsqd_without_anything_is_asked_whether_it_requires_tls() -> None:
    steps = greeting.nsqd(engine("nsqd://a"), {"client_id": "me"})
    assert next(steps) == MAGIC_V2 + identify(tls=False)
    assert greeting.after(steps, settled(tls_v1=False)) == say.nop() + identify(tls=False)
    assert greeting.after(steps, settled(tls_v1=False)) is None


def test_nsqd_is_shown_the_secret_through_tls() -> None:
    steps = greeting.nsqd(engine("nsqd+tls://s%C3%A9cret@a"), {"client_id": "me"})
    assert next(steps) == MAGIC_V2 + identify(tls=True)
    assert greeting.after(steps, settled(tls_v1=True, auth_required=True)) == greeting.BEGIN_TLS
    assert greeting.after(steps, b"OK") == say.auth("sécret".encode())
    assert greeting.after(steps, b"{}") is None


@pytest.mark.parametrize(
    ("address", "answer", "problem"),
    [
        ("nsqd+tls://a", settled(tls_v1=False), "the server offers no TLS: start it with --tls-cert"),
        ("nsqd+tls://a", b"OK", "cannot decode the answer to IDENTIFY: b'OK'"),
        ("nsqd+tls://a", b"[]", "cannot decode the answer to IDENTIFY"),
    ],
)
def test_nsqd_that_does_not_agree(address: str, answer: bytes, problem: str) -> None:
    steps = greeting.nsqd(engine(address), {})
    next(steps)
    with pytest.raises((InputError, ProtocolError), match=problem):
        greeting.after(steps, answer)


@pytest.mark.parametrize(
    ("problem", "means"),
    [
        (
            ProtocolError("E_INVALID", "cannot NOP in current state (TLS required)"),
            "the server requires TLS: write nsqd+tls://",
        ),
        (
            ProtocolError("E_AUTH_FAILED", "AUTH failed"),
            "the server refuses the secret of the address (E_AUTH_FAILED AUTH failed)",
        ),
        (ProtocolError("E_BAD_BODY", "IDENTIFY"), "E_BAD_BODY IDENTIFY"),
    ],
)
def test_what_errors_of_nsqd_mean(problem: ProtocolError, means: str) -> None:
    assert str(greeting.nsqd_refuses(problem)) == means


@pytest.mark.parametrize(
    ("address", "info", "begins"),
    [
        ("nats://a", {}, False),
        ("nats://a", {"tls_available": True}, False),
        ("nats://a", {"tls_required": True}, "the server requires TLS: write nats\\+tls://"),
        ("nats+tls://a", {"tls_required": True}, True),
        ("tls://a", {"tls_available": True}, True),
        ("nats+tls://a", {}, "the server offers no TLS"),
        ("nats+tls://a", {"tls_required": True, "tls_verify": True}, "the server requires a client certificate"),
        ("nats+tls://a?cert=c", {"tls_required": True, "tls_verify": True}, True),
    ],
)
def test_when_tls_begins_with_nats(address: str, info: dict[str, bool], begins: bool | str) -> None:
    if isinstance(begins, str):
        with pytest.raises(InputError, match=begins):
            greeting.nats_tls(engine(address), info)
    else:
        assert greeting.nats_tls(engine(address), info) is begins
