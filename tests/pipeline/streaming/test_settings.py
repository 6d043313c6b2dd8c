"""The options of the format: parsed, in any case, and all that is wrong with them at once."""

from __future__ import annotations

import pytest

from srtm.errors import InputError
from srtm.pipeline.streaming.settings import read_settings


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "topic is missing"),
        ({"topic": "a b"}, r"topic = 'a b': a topic name is 1 to 64 letters"),
        ({"topic": "t", "controller": "http://x:1", "brokers": "y:2"}, "controller and brokers are both set"),
        ({"topic": "t", "controller": "ftp://x"}, "controller = 'ftp://x': give an HTTP address"),
        ({"topic": "t", "brokers": " , "}, "brokers = ' , ': give the HTTP addresses"),
        ({"topic": "t", "maxRowsPerTrigger": "0"}, "maxRowsPerTrigger = '0': must be a whole number of at least 1"),
        ({"topic": "t", "startingOffsets": '{"b": -1}'}, "earliest or latest, or offsets by broker"),
        ({"topic": "t", "startingOffsets": "[3]"}, "earliest or latest, or offsets by broker"),
        ({"topic": "t", "startingOffsets": '{"b": {"log": "x"}}'}, "earliest or latest, or offsets by broker"),
        ({"topic": "t", "endingOffsets": "earliest"}, "must be latest, or offsets by broker"),
        ({"topic": "t", "failOnDataLoss": "no"}, "failOnDataLoss = 'no': must be true or false"),
        ({"topic": "t", "timeout": "soon"}, "timeout = 'soon': 'soon' is not a duration"),
        ({"topic": "t", "keys": "yes"}, "keys = 'yes': must be none, field or envelope"),
        ({"topic": "t", "rate": "-3"}, "rate = '-3': must be a positive number"),
        ({"topic": "t", "startingOffset": "latest"}, "unknown option startingoffset; did you mean startingOffsets"),
        ({"topic": "", "rate": "many"}, "topic = ''.*; rate = 'many'"),
    ],
)
def test_bad_options_are_named_all_at_once(options: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_settings(options)


def test_options_in_any_case() -> None:
    given = {"TOPIC": "t", "brokers": "a:1, https://b:2/", "timeout": "500ms", "checkpointLocation": "/x"}
    found = read_settings(given | {"startingoffsets": '{"a": 3}', "keys": "Field", "maxrowspertrigger": "7"})
    assert found.brokers == ("http://a:1", "https://b:2")
    assert (found.timeout_s, found.starting, found.keys, found.max_rows) == (0.5, {"a": 3}, "field", 7)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": "nsqd://a"}, "engine = 'nsqd://a': give NATS servers"),
        ({"engine": "nats://u:secret@a:x"}, r"engine = 'nats://…@a:x': invalid engine address 'a:x'"),
        ({"engine": "nats://a", "brokers": "b:1"}, "engine and brokers are both set"),
    ],
)
def test_bad_engines_are_named_without_their_secrets(options: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said) as raised:
        read_settings({"topic": "t", **options})
    assert "secret" not in str(raised.value)


def test_an_engine_needs_no_controller_but_may_have_one() -> None:
    given = {"topic": "t", "engine": "nats://u:secret@a,b:4333"}
    assert (read_settings(given).engine, read_settings(given).controller) == (given["engine"], "")
    assert read_settings({**given, "controller": "x:1"}).controller == "http://x:1"
    assert "secret" not in repr(read_settings(given))
