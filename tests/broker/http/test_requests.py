"""Our broker answers HTTP requests as a real nsqd does, one conversation with both."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker.http.requests import CONVERSATION, DEPARTURES, Answer, Ask, ask
from tests.broker.running import Client, Running, running
from tests.programs import nsqd

pytestmark = pytest.mark.needs("nsqd")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[Answer, Answer]]]:
    """What nsqd and our broker answered to each request."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.INFO)  # as in a program; the conversation changes it
    with running(broadcast_address="127.0.0.1") as ours, nsqd(tmp_path_factory.mktemp("nsqd")) as (_, port):
        yield [(ask(each, port), ask(each, ours.broker.http_port)) for each in [*CONVERSATION, *DEPARTURES]]
    root.setLevel(level)


@pytest.mark.parametrize("number", range(len(CONVERSATION)), ids=lambda n: f"{n} {CONVERSATION[n].name}")
def test_answers_as_nsqd(number: int, answers: list[tuple[Answer, Answer]]) -> None:
    theirs, ours = answers[number]
    assert ours == theirs


@pytest.mark.parametrize("number", range(len(DEPARTURES)), ids=lambda n: DEPARTURES[n].name)
def test_departures_are_still_departures(number: int, answers: list[tuple[Answer, Answer]]) -> None:
    theirs, ours = answers[len(CONVERSATION) + number]
    assert theirs.status == 200
    assert (ours.status, ours.body) in [(404, {"message": "NOT_FOUND"}), (400, {"message": "INVALID_OPTION"})]


def text_with_clients(address: tuple[str, int], http_port: int) -> bytes:
    """`/stats` of a server that has one publisher and one consumer, which holds a message."""
    with Client(address, hostname="p", user_agent="one") as publisher, Client(address, hostname="c") as consumer:
        consumer.subscribe("t", "c", ready=1)
        publisher.publish("t", b"x", b"y")
        consumer.message()
        text: bytes = ask(Ask("GET", "/stats"), http_port).body
    text = re.sub(rb"(\[V2 [pc]):\d+ ", rb"\1:PORT ", text)
    return re.sub(rb"connected: \d+s", b"connected: Ns", re.sub(rb" +\]", b"]", text))


def test_the_text_of_stats_lists_clients(tmp_path: Path, broker: Running) -> None:
    with nsqd(tmp_path) as (tcp_port, http_port):
        theirs = text_with_clients(("127.0.0.1", tcp_port), http_port)
    assert text_with_clients(broker.address, broker.broker.http_port) == theirs
