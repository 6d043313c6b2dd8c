"""The `srtm` command: one file per verb, which imports what it works with only when it runs."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Entry point of the `srtm` command. Exit codes: 0 done, 1 failed, 2 bad usage."""
    # A service manager that ends a command must leave as little behind as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from srtm.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # typer handles it, but not where it strikes typer itself
        print("srtm: stopped", file=sys.stderr)
        code = 1
    sys.exit(code)
