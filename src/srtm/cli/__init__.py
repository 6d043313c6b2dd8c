"""The `srtm` command: one file per verb; a verb imports what it needs when it runs."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Entry point of the `srtm` command. Exit codes: 0 done, 1 failed, 2 bad usage."""
    # SIGTERM from a service manager cleans up as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = _run(sys.argv[1:])
    except KeyboardInterrupt:  # typer handles Ctrl-C in commands, but not in its own code
        print("srtm: stopped", file=sys.stderr)
        code = 1
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["broker"]:
        from srtm.cli.servers import alone

        code = alone.run(arguments)
        if code is not None:
            return code
    from srtm.cli import app

    return app.run(arguments)
