"""`srtm broker` without typer and the other verbs, which would triple the time that a broker takes to start."""

from __future__ import annotations

from srtm.broker.options import BrokerOptions
from srtm.cli import outcome
from srtm.cli.plain import plain_options
from srtm.options import check_logs


def run(arguments: list[str]) -> int | None:
    """Run one command line that begins with `broker`; return its exit code, or None if typer must read the line."""
    options = plain_options(BrokerOptions, arguments[1:])
    return None if options is None else outcome.run(lambda: serve(options), arguments)


def serve(options: BrokerOptions) -> None:
    """Run a broker until it is told to stop."""
    check_logs(options.log_format, options.log_level)
    from srtm import program
    from srtm.broker.run import run

    program.log_to_stderr(options.log_format, options.log_level)
    program.run(run(options))
