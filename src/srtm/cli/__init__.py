"""The `srtm` command: one file per verb, which imports what it works with only when it runs."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `srtm` command. Exit codes: 0 done, 1 failed, 2 bad usage."""
    from srtm.cli.app import run

    sys.exit(run(sys.argv[1:]))
