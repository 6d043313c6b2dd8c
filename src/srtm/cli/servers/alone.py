"""`srtm broker` without the other verbs, whose imports would double the time that a broker takes to start."""

from __future__ import annotations

from srtm.cli import outcome
from srtm.cli.help import App
from srtm.cli.servers.broker import broker

_app = App("Run one broker.", name="srtm")
_app.callback()(lambda: None)  # with it, the verb keeps its name
_app.command()(broker)


def run(arguments: list[str]) -> int:
    """Run one command line that begins with `broker`; return its exit code."""
    return outcome.run(_app, arguments)
