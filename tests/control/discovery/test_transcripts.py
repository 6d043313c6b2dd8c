"""The tables of transcripts hold for a real nsqlookupd, and for ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.control.discovery.transcripts import TRANSCRIPTS, Service, Transcript, run
from tests.control.running import controller
from tests.programs import nsqlookupd
from tests.protocol.test_lookup import CASES, OURS, converse

Start = Callable[[dict[str, float]], Service]
FLAGS = {"inactive_after_s": "--inactive-producer-timeout", "tombstone_s": "--tombstone-lifetime"}


def once_each(serve: Callable[[dict[str, float]], Service]) -> Start:
    """Gives a service with these limits, one for all transcripts that want the same."""
    running: dict[frozenset[tuple[str, float]], Service] = {}

    def get(limits: dict[str, float]) -> Service:
        key = frozenset(limits.items())
        if key not in running:
            running[key] = serve(limits)
        return running[key]

    return get


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    with ExitStack() as stack:

        def serve(limits: dict[str, float]) -> Service:
            flags = [f"{FLAGS[name]}={value:.9f}s" for name, value in limits.items()]
            return Service(*stack.enter_context(nsqlookupd(tmp_path_factory.mktemp("nsqlookupd"), *flags)))

        yield once_each(serve)


@pytest.fixture(scope="module")
def ours() -> Iterator[Start]:
    with ExitStack() as stack:
        yield once_each(lambda limits: stack.enter_context(controller(**limits)))


@pytest.mark.needs("nsqlookupd")
@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda t: t.name)
def test_nsqlookupd_answers_as_the_table_says(transcript: Transcript, theirs: Start) -> None:
    run(transcript, theirs)


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda t: t.name)
def test_ours_answers_as_the_table_says(transcript: Transcript, ours: Start) -> None:
    run(transcript, ours)


@pytest.mark.parametrize(("sent", "wanted"), [*CASES, *OURS], ids=lambda value: repr(value)[:50])
def test_ours_understands_what_nsqlookupd_does(sent: bytes, wanted: list[object], ours: Start) -> None:
    converse(sent, wanted, ("127.0.0.1", ours({}).tcp))
