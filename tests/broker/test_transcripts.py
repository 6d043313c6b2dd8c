"""The broker answers as nsqd does: the table that tests/protocol holds against a real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from srtm.protocol.names import Settings
from tests.broker.running import Running, running
from tests.protocol.transcripts import DEPARTURES, TRANSCRIPTS, WITH_AUTH, Transcript, run


@pytest.fixture(scope="module")
def plain() -> Iterator[Running]:
    with running(settings=Settings()) as broker:  # with nsqd's limits
        yield broker


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    with running(auth_http_addresses=("127.0.0.1:1",)) as broker:
        yield broker


@pytest.mark.parametrize("transcript", [*TRANSCRIPTS, *DEPARTURES], ids=lambda t: t.name)
def test_answers_as_nsqd(transcript: Transcript, plain: Running) -> None:
    run(transcript, plain.address)


@pytest.mark.parametrize("transcript", WITH_AUTH, ids=lambda t: t.name)
def test_answers_as_nsqd_with_an_authority(transcript: Transcript, guarded: Running) -> None:
    run(transcript, guarded.address)
