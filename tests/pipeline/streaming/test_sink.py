"""Keys of messages, and brokers to publish to: the parts of the sink that need no Spark."""

from __future__ import annotations

import base64
import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import InputError, PipelineError
from srtm.pipeline.streaming import sink
from srtm.pipeline.streaming.logs import Away
from srtm.pipeline.streaming.settings import Settings
from tests.broker.running import running
from tests.pipeline.streaming.topics import brokers, log_of, on_disk

KEY = {"query": "q", "batch": 7, "partition": 2, "sequence": 5}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(st.binary(min_size=1))
def test_bodies_are_as_they_are_unless_keys_are_asked_for(body: bytes) -> None:
    assert sink.wrapper("none", "q", 7, 2)(body, 5) == body


@given(st.binary(min_size=1))
def test_an_envelope_holds_any_body(body: bytes) -> None:
    found = json.loads(sink.wrapper("envelope", "q", 7, 2)(body, 5))
    assert found["srtm"] == KEY
    assert base64.b64decode(found["body"]) == body


@given(st.dictionaries(st.text(), json_values), st.sampled_from([None, 2]))
def test_a_field_is_added_to_any_object(document: dict[str, object], indent: int | None) -> None:
    body = f" {json.dumps(document, indent=indent)}\n".encode()
    assert json.loads(sink.wrapper("field", "q", 7, 2)(body, 5)) == document | {"srtm": KEY}


@pytest.mark.parametrize("body", [b"[1]", b"x", b'{"a": 1', b'"{}"'])
def test_a_field_needs_an_object(body: bytes) -> None:
    with pytest.raises(InputError, match="keys=field needs bodies that are JSON objects"):
        sink.wrapper("field", "q", 7, 2)(body, 5)


def test_without_a_controller_partitions_take_turns_and_pass_over_who_is_away(tmp_path: Path) -> None:
    with brokers(tmp_path) as start:
        one = start("one")
        with running(name="two") as gone:
            urls = (one.url, gone.url)
            ports = [one.broker.tcp_port, gone.broker.tcp_port]
            assert [sink._broker_of(urls, number) for number in range(3)] == [
                f"127.0.0.1:{ports[number % 2]}" for number in range(3)
            ]
        assert sink._broker_of(urls, 1) == f"127.0.0.1:{ports[0]}"
        with pytest.raises(Away, match=f"{gone.url}/info does not respond"):
            sink._broker_of((gone.url,), 0)


def test_messages_of_one_publisher_keep_their_order_and_large_ones_go_alone(tmp_path: Path) -> None:
    with brokers(tmp_path) as start, ExitStack() as stack:
        one = on_disk(start("one"))
        sender = sink._Sender(Settings("t", brokers=(one.url,)), "g", "own", 0, stack)
        sent: dict[str | None, list[bytes]] = {None: [], "other": []}
        for number in range(40):
            name = "other" if number % 3 else None
            body = f"{name} {number} ".encode() + bytes(300_000 if number % 7 == 0 else 10)
            sent[name].append(body)
            sender.add(name, body)
        sender.flush()
        sender.wait(0)
        found = log_of(one, "t")
        assert [body for body in found if body.startswith(b"None")] == sent[None]
        assert [body for body in found if body.startswith(b"other")] == sent["other"]


def test_a_broker_that_goes_away_is_waited_for_so_long() -> None:
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(PipelineError, match="no broker has accepted messages of topic 't'"))
        with running(name="one") as one:
            sender = sink._Sender(Settings("t", brokers=(one.url,), timeout_s=0.2), "g", "own", 0, stack)
            sender.add(None, b"first")
            sender.flush()
            sender.wait(0)
        sender.add(None, b"second")
        sender.flush()
        sender.wait(0)


def test_too_many_publishers_in_one_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "MOST_PUBLISHERS", 2)
    with brokers(tmp_path) as start, ExitStack() as stack:
        sender = sink._Sender(Settings("t", brokers=(start("one").url,)), "g", None, 0, stack)
        for name in "abc":
            sender.add(name, b"x")
        with pytest.raises(InputError, match=r"more than 2 publishers in one partition: repartition\('publisher'\)"):
            sender.flush()
