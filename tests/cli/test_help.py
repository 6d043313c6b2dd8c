"""What every verb says of itself, and of flags that it cannot take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from srtm.cli.app import app, run
from srtm.net.sockets import listen


def commands(group: TyperGroup) -> Iterator[Any]:
    for command in group.commands.values():
        yield command
        if isinstance(command, TyperGroup):
            yield from commands(command)


def test_lists_of_verbs_have_no_example_without_one() -> None:
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    found = list(commands(root))
    assert len(found) > 30
    for command in found:
        first = (command.help or "").partition("\n\n")[0]
        assert first, command.name
        assert not first.rstrip().endswith("Example:"), command.name


@pytest.mark.parametrize("verb", ["up", "broker", "controller"])
def test_only_the_flag_that_is_wrong_is_named(verb: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--log-format", "foo"]) == 2
    assert capfd.readouterr().err == "srtm: --log-format is text or json, not 'foo'\n"
    assert run([verb, "--log-level", "foo"]) == 2
    assert capfd.readouterr().err == "srtm: --log-level is debug or info or warning or error, not 'foo'\n"


def test_a_taken_port_is_answered_with_flags_that_up_has(capfd: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.2", 0) as taken:
        assert run(["up", "--host", "127.0.0.2", "--brokers", "1", "--web-port", str(taken.getsockname()[1])]) == 1
    assert "--free-ports" in capfd.readouterr().err.splitlines()[-1]
