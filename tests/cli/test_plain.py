"""Plain command lines of a broker: the options are typer's, typer judges all other lines, and little is loaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from srtm.broker.options import BrokerOptions
from srtm.cli.app import app
from srtm.cli.plain import plain_options
from srtm.cli.servers import alone, broker
from srtm.options import Flag, flags

FLAGS = flags(BrokerOptions)
# What would keep a broker from serving soon; each is loaded later, if it is needed at all.
NOT_BEFORE_IT_SERVES = {
    "fastapi",
    "httpx",
    "numba",
    "numpy",
    "prometheus_client",
    "pyarrow",
    "pydantic",
    "pyspark",
    "re2",
    "rich",
    "sqlite3",
    "typer",
}


def values(flag: Flag) -> list[str]:
    """Texts that the flag takes."""
    how = flag.field.metadata
    if flag.secret:
        return ["/proc/sys/kernel/ostype"]  # a file with one word in it
    if how["parse"]:
        return ["20ms", "5s"]
    if flag.kind in (int, int | None):
        least = how["limits"].get("min", 0)
        return [str(least), str(how["limits"].get("max", least + 7))]
    return ["a", "host name:4150", "größe"]


WORDS = [
    st.sampled_from(
        [[name] for name in (flag.name, flag.off) if name]
        if flag.kind is bool
        else [words for text in values(flag) for words in ([flag.name, text], [f"{flag.name}={text}"])]
    )
    for flag in FLAGS
]
LINES = st.lists(st.one_of(WORDS), max_size=8).map(lambda words: [word for pair in words for word in pair])


VERB = typer.main.get_command(app).commands["broker"]  # type: ignore[attr-defined]


def by_typer(arguments: Sequence[str]) -> BrokerOptions:
    """The options with which typer runs the verb."""
    ran: list[BrokerOptions] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broker, "serve", ran.append)
        VERB.main([*arguments], standalone_mode=False)
    return ran[0]


@given(line=LINES)
def test_a_plain_line_sets_what_typer_would_set(line: list[str]) -> None:
    options = plain_options(BrokerOptions, line)
    assert options is not None
    assert options == by_typer(line)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_every_flag_can_be_given_plainly(flag: Flag) -> None:
    for words in [[flag.name]] if flag.kind is bool else [[flag.name, text] for text in values(flag)]:
        assert plain_options(BrokerOptions, words) == by_typer(words)


def test_variables_count_unless_a_flag_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SRTM_ENGINE", "nsqd://localhost")
    for line in ([], ["--engine", "local"]):
        options = plain_options(BrokerOptions, line)
        assert options is not None
        assert options == by_typer(line)
        assert options.engine == ("local" if line else "nsqd://localhost")
    monkeypatch.setenv("SRTM_ENGINE", "")  # typer knows what that means
    assert plain_options(BrokerOptions, []) is None


@pytest.mark.parametrize(
    "line",
    [
        ["--help"],
        ["-h"],
        ["--"],
        ["word"],
        ["--tcp"],
        ["--nothing", "1"],
        ["--tcp-port"],
        ["--tcp-port", "-1"],
        ["--tcp-port", "65536"],
        ["--tcp-port", "1_0"],
        ["--tcp-port", "٣"],
        ["--host", ""],
        ["--host", "--tcp-port"],
        ["--name", "a\nb"],
        ["--name", "\udcff"],
        ["--tls-required=yes"],
        ["--msg-timeout", "soon"],
    ],
    ids=" ".join,
)
def test_typer_judges_lines_that_are_not_plain(line: list[str]) -> None:
    assert plain_options(BrokerOptions, line) is None
    assert alone.run(["broker", *line]) is None


@pytest.mark.processes
def test_a_broker_loads_little_before_it_serves() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "srtm", "broker", "--tcp-port", "0", "--http-port", "0"]
    loaded = set()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if ": TCP 127.0.0.1:" in line:
                    break
                if line.startswith("import time:"):
                    loaded.add(line.rpartition("|")[2].strip().partition(".")[0])
            else:
                pytest.fail("it does not serve")
        finally:
            process.terminate()
    assert {"srtm", "uvicorn"} <= loaded
    assert loaded & NOT_BEFORE_IT_SERVES == set()
