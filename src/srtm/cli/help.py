"""How `--help` looks: the summary, the options in two columns, and below them the longer explanation and examples.

A verb's docstring is its help. The first paragraph stands above the options, the rest below them; indented paragraphs
are examples and stay as they are. `ls` and `list`, `rm` and `delete` are the same verb in every group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_WIDTH = 100  # no line is longer, however wide the terminal
_NAMES_WIDTH = 34  # longer names of options have their help on the next line
_GLUED = str.maketrans("- ", "\u2011\xa0")  # not places to wrap: a flag or a default stays on one line
_UNGLUED = str.maketrans("\u2011\xa0", "- ")
_ALIASES = {"ls": "list", "list": "ls", "rm": "delete", "delete": "rm"}


def option_record(option: Any) -> tuple[str, str]:
    """The two columns of an option: its names with the value they take, and its help with default and variable."""
    names = ", ".join(sorted(option.opts, key=len))
    if option.secondary_opts:
        names = f"--[no-]{option.opts[0].removeprefix('--')}"
    elif not option.is_flag:
        names += f" {option.metavar}"
    if option.name == "help":
        return names, "Show this help and exit"
    facts = [f"default: {shown}"] if (shown := _default(option)) else []
    facts += [f"env: {option.envvar}"] if option.envvar else []
    facts += ["required"] if option.required else []
    brackets = f"[{'; '.join(fact.translate(_GLUED) for fact in facts)}]" if facts else ""
    return names, f"{_whole_words(option.help)} {brackets}".rstrip()


def _default(option: Any) -> str:
    if not option.show_default or isinstance(option.show_default, str):
        return option.show_default or ""
    if option.is_flag:
        return ("off", "on")[bool(option.default)] if option.secondary_opts and option.default is not None else ""
    value = getattr(option.default, "value", option.default)
    return "" if value in (None, "", (), []) else f"{value:g}" if isinstance(value, float) else str(value)


def _whole_words(text: str) -> str:
    return text.replace("-", "-".translate(_GLUED))


def _paragraphs(text: str | None) -> tuple[str, list[str]]:
    first, *others = (text or "").strip().split("\n\n")
    return " ".join(first.split()), others


def _write_details(formatter: Any, paragraphs: list[str]) -> None:
    """Paragraphs, filled; indented lines, such as examples, as they are."""
    for paragraph in paragraphs:
        lines = paragraph.splitlines()
        prose = [line for line in lines if not line.startswith("    ")]
        if prose:
            formatter.write_paragraph()
            formatter.write_text(_whole_words(" ".join(prose)))
        formatter.write("".join(f"{line[2:]}\n" for line in lines[len(prose) :]))


def _write_tables(formatter: Any, tables: dict[str, list[tuple[str, str]]]) -> None:
    """Two columns under each heading, of one width in all."""
    widest = max((len(name) for rows in tables.values() for name, _ in rows if len(name) <= _NAMES_WIDTH), default=0)
    for heading, rows in tables.items():
        with formatter.section(heading):
            formatter.write_dl([(name.ljust(widest), text) for name, text in rows], col_max=_NAMES_WIDTH)


def _write_usage(command: Any, ctx: Any, formatter: Any) -> None:
    pieces = [command.options_metavar]
    for each in command.get_params(ctx):
        if each.param_type_name == "argument":
            name = each.metavar if each.required else f"[{each.metavar}]"
            pieces.append(f"{name}..." if each.nargs == -1 else name)
    formatter.write_usage(ctx.command_path, " ".join(pieces))


def _write_help(command: Any, ctx: Any, formatter: Any, commands: dict[str, list[tuple[str, str]]]) -> None:
    summary, details = _paragraphs(command.help)
    formatter.write_text(summary)
    formatter.write_paragraph()
    command.format_usage(ctx, formatter)
    tables: dict[str, list[tuple[str, str]]] = dict(commands)
    for each in command.get_params(ctx):
        if each.param_type_name == "argument":
            tables.setdefault("Arguments", []).append((each.metavar, each.help))
        elif not each.hidden:
            panel = getattr(each, "rich_help_panel", None) or "Options"
            tables.setdefault(panel, []).append(option_record(each))
    _write_tables(formatter, tables)
    _write_details(formatter, details)
    formatter.buffer[:] = [line.translate(_UNGLUED) for line in formatter.buffer]


class Verb(TyperCommand):
    """A command that does something."""

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Write the usage: options, then arguments."""
        _write_usage(self, ctx, formatter)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        _write_help(self, ctx, formatter, {})


class Verbs(TyperGroup):
    """A command that has others, under headings (typer's `rich_help_panel`)."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, or of the other common name for it."""
        return super().get_command(ctx, cmd_name) or super().get_command(ctx, _ALIASES.get(cmd_name, cmd_name))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help: commands first."""
        tables: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            names = f"{name}, {_ALIASES[name]}" if name in _ALIASES else name
            heading = getattr(command, "rich_help_panel", None) or "Commands"
            tables.setdefault(heading, []).append((names, _paragraphs(command.help)[0]))
        _write_help(self, ctx, formatter, tables)


class App(typer.Typer):
    """A group of verbs whose help looks as described above."""

    def __init__(self, text: str, **more: Any) -> None:
        super().__init__(
            cls=Verbs,
            help=text,
            no_args_is_help=True,
            add_completion=False,
            pretty_exceptions_enable=False,
            rich_markup_mode=None,
            context_settings={"max_content_width": _WIDTH, "help_option_names": ["-h", "--help"]},
            **more,
        )

    def command(self, name: str | None = None, **more: Any) -> Callable[[Any], Any]:
        """Add a verb."""
        return super().command(name, cls=Verb, **more)
