"""How a command line ends: exit codes, and errors in one line on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable

from srtm.cli.extras import remedy
from srtm.errors import InputError, SRTMError

STOPPED = 130  # the exit code that stands for Ctrl-C


def run(command: Callable[[], object], arguments: list[str]) -> int:
    """Run the command of a line; the exit code is 0 (done), 1 (failed) or 2 (bad usage); `srtm check` has its own."""
    try:
        command()
    except SystemExit as end:  # typer has printed usage errors itself
        if end.code == STOPPED:
            print("srtm: stopped", file=sys.stderr)
        code = end.code or 0
        return code if isinstance(code, int) and code <= 3 else 1  # a command that was stopped has failed
    except InputError as error:
        print(f"srtm: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        missing = remedy(arguments, error)
        if missing is None:
            raise
        print(f"srtm: {missing}", file=sys.stderr)
        return 1
    except (SRTMError, OSError) as error:
        print(f"srtm: {error}", file=sys.stderr)
        return 1
    return 0
