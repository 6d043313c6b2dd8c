"""The help of every verb, the names that people type for verbs, and errors about flags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from itertools import groupby
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from srtm.broker.options import BrokerOptions
from srtm.cli.app import app, run
from srtm.control.options import ControllerOptions
from srtm.model.broker_models import BROKER_MODELS
from srtm.model.placement import POLICIES
from srtm.net.sockets import listen

# Names that scripts, unit files and documents rely on.
BROKER_FLAGS = [
    "--host",
    "--tcp-port",
    "--http-port",
    "--tcp-socket",
    "--http-socket",
    "--name",
    "--broadcast-address",
    "--data-path",
    "--engine",
    "--retain-bytes",
    "--retain-age",
    "--retain-acknowledged",
    "--trace-folder",
    "--kernel-time",
    "--no-kernel-time",
    "--lookupd-tcp-address",
    "--controller",
    "--control-token-file",
    "--broker-token-file",
    "--log-format",
    "--log-level",
    "--max-msg-size",
    "--max-body-size",
    "--msg-timeout",
    "--max-msg-timeout",
    "--max-req-timeout",
    "--client-timeout",
    "--max-heartbeat-interval",
    "--max-rdy-count",
    "--max-channel-consumers",
    "--max-output-buffer-size",
    "--output-buffer-timeout",
    "--min-output-buffer-timeout",
    "--max-output-buffer-timeout",
    "--deflate",
    "--no-deflate",
    "--max-deflate-level",
    "--snappy",
    "--no-snappy",
    "--max-held-messages",
    "--max-held-bytes",
    "--tls-cert",
    "--tls-key",
    "--tls-required",
    "--plain-http",
    "--https-port",
    "--tls-client-auth-policy",
    "--tls-root-ca-file",
    "--tls-min-version",
    "--auth-http-address",
]


def verbs(group: TyperGroup, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, TyperGroup):
            yield from verbs(command, (*path, name))


def root() -> TyperGroup:
    found = typer.main.get_command(app)
    assert isinstance(found, TyperGroup)
    return found


VERBS = dict(verbs(root()))


def help_of(path: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> str:
    assert run([*path, "--help"]) == 0
    return capfd.readouterr().out


def cells(text: str) -> Iterator[list[str]]:
    """The lines of each help cell: that of a name, and those below it that have nothing in the first column."""
    tables, _, _ = text.partition("\n\nThe ")
    for indented, lines in groupby(tables.splitlines(), key=lambda line: line.startswith("  ")):
        cell: list[str] = []
        for line in lines if indented else ():
            if line[2] != " " and cell:
                yield cell
                cell = []
            cell.append(line)
        yield cell


def test_there_are_verbs() -> None:
    assert len(VERBS) > 30


@pytest.mark.parametrize("path", [(), *VERBS], ids=" ".join)
def test_help_fits_100_columns(
    path: tuple[str, ...], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    said = help_of(path, capfd)
    assert max(map(len, said.splitlines())) <= 100
    assert max(map(len, cells(said))) <= 2, "a help cell of more than two lines belongs into the docstring"
    monkeypatch.setenv("COLUMNS", "80")
    narrow = help_of(path, capfd)
    assert max(len(line) for line in narrow.partition("Example")[0].splitlines()) <= 80
    assert max(map(len, cells(narrow))) <= 3


@pytest.mark.parametrize("path", [(), *VERBS], ids=" ".join)
def test_help_says_what_a_value_is_and_breaks_no_word(
    path: tuple[str, ...], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = help_of(path, capfd)
    assert "None" not in said  # an option without a metavar or help
    assert not re.search(r"\w-$", said, re.MULTILINE)
    for option in VERBS[path].params if path else ():
        if option.param_type_name == "option":
            assert option.metavar or option.is_flag, option.name
            assert not option.help.endswith("."), option.name
            assert option.help[0].isupper() or option.help.split()[0] in ("p99", "nsqlookupd"), option.help


@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_the_first_paragraph_is_one_line(path: tuple[str, ...]) -> None:
    first = (VERBS[path].help or "").partition("\n\n")[0]
    assert 0 < len(first) <= 85
    assert first.endswith(".")
    assert "Example" not in first


def test_broker_flags_and_their_variables_stay() -> None:
    options = [each for each in VERBS[("broker",)].params if each.name != "help"]
    assert sorted(name for each in options for name in (*each.opts, *each.secondary_opts)) == sorted(BROKER_FLAGS)
    variables = {each.opts[0]: each.envvar for each in options if each.envvar}
    assert variables == {"--engine": "SRTM_ENGINE"}
    secrets = {each.name: each.metadata["envvar"] for each in fields(BrokerOptions) if each.metadata.get("secret")}
    assert secrets == {"control_token": "SRTM_CONTROL_TOKEN", "broker_token": "SRTM_BROKER_TOKEN"}


def test_defaults_in_help_are_those_of_the_options(capfd: pytest.CaptureFixture[str]) -> None:
    for path, options in {("broker",): BrokerOptions, ("controller",): ControllerOptions}.items():
        flagged = [each for each in fields(options) if "help" in each.metadata]
        by_name = {each.name: each for each in VERBS[path].params}
        assert {each.name for each in flagged} == by_name.keys() - {"help"}
        for each in flagged:
            plain = each.metadata["parse"] is None and not isinstance(each.default, tuple)
            assert by_name[each.name].default == (each.default if plain else None)
        assert run([*path, "--help"]) == 0
        said = capfd.readouterr().out
        assert "[default: 127.0.0.1]" in said
        assert "60s" in said or path == ("controller",)


@pytest.mark.parametrize("path", [("topic", "create"), ("topic", "set"), ("load",), ("plan",)], ids=" ".join)
def test_help_lists_the_policies_that_exist(path: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    said = help_of(path, capfd)
    assert all(name in said for name in POLICIES)


@pytest.mark.parametrize("path", [("plan",), ("report",), ("controller",), ("up",)], ids=" ".join)
def test_the_same_flag_chooses_the_broker_model(path: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    said = help_of(path, capfd)
    assert "--broker-model MODEL" in said
    assert all(name in said for name in BROKER_MODELS)
    (option,) = [each for each in VERBS[path].params if "--broker-model" in each.opts]
    assert option.default == "srtm-broker"


def test_one_default_for_the_quantile_and_the_slo() -> None:
    for name, verbs_with_it, default in (
        ("--quantile", [("profile",), ("load",)], "0.995"),
        ("--slo-p99", [("topic", "create"), ("load",), ("plan",), ("report",), ("calibrate",)], "1ms"),
    ):
        found = [each.default for path in verbs_with_it for each in VERBS[path].params if name in each.opts]
        assert found == [default] * len(verbs_with_it)


def test_the_scale_of_live_runs_is_shown_as_it_is() -> None:
    from srtm.lab.live.paced import Paced
    from srtm.lab.live.world import Live

    shown = {each.opts[0]: each.show_default for each in VERBS[("lab", "run")].params}
    scale, paced = Live(), Paced()
    assert shown["--publishers"] == f"{scale.publishers}"
    assert shown["--rate"] == f"{scale.rate_mps:g}"
    assert shown["--seconds"] == f"{scale.seconds:g}; {paced.seconds:g} if paced"
    assert shown["--patience"] == f"{paced.patience_s:g}s"


@pytest.mark.parametrize(
    ("typed", "meant"), [("topic list", "topic ls"), ("topic delete", "topic rm"), ("lab ls", "lab list")]
)
def test_other_names_of_verbs(typed: str, meant: str, capfd: pytest.CaptureFixture[str]) -> None:
    as_typed = help_of(tuple(typed.split()), capfd).replace(typed, meant)
    assert as_typed == help_of(tuple(meant.split()), capfd)
    first, second = typed.split()
    assert re.search(rf"\b{second}\b", help_of((first,), capfd))


def test_an_unknown_verb_is_answered_with_the_nearest(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["topc"]) == 2
    assert "No such command 'topc'. Did you mean 'topic'" in capfd.readouterr().err


def test_an_unknown_policy_is_answered_with_the_known_ones(capfd: pytest.CaptureFixture[str]) -> None:
    for verb in (["topic", "create", "t", "--r", "1", "--b", "1"], ["topic", "set", "t"], ["load", "t"]):
        assert run([*verb, "--policy", "best"]) == 2
        known = ", ".join(POLICIES)
        assert capfd.readouterr().err == f"srtm: unknown policy 'best'; known policies: {known}\n"


def test_an_unknown_broker_model_is_answered_with_the_known_ones(capfd: pytest.CaptureFixture[str]) -> None:
    for verb in (["plan"], ["controller", "--tcp-port", "0", "--http-port", "0", "--web-port", "none"]):
        assert run([*verb, "--broker-model", "best"]) == 2
        assert "unknown broker model 'best'; known models: srtm-broker, paper-testbed" in capfd.readouterr().err


@pytest.mark.parametrize("verb", ["up", "broker", "controller"])
def test_only_the_flag_that_is_wrong_is_named(verb: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--log-format", "foo"]) == 2
    assert capfd.readouterr().err == "srtm: --log-format must be text or json, not 'foo'\n"
    assert run([verb, "--log-level", "foo"]) == 2
    assert capfd.readouterr().err == "srtm: --log-level must be debug or info or warning or error, not 'foo'\n"


@pytest.mark.processes
def test_a_taken_port_is_answered_with_flags_that_up_has(capfd: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.2", 0) as taken:
        assert run(["up", "--host", "127.0.0.2", "--brokers", "1", "--web-port", str(taken.getsockname()[1])]) == 1
    assert "--free-ports" in capfd.readouterr().err.splitlines()[-1]
