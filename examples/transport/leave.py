"""How the demo's processes end: nothing keeps running, and the last line says what happened and what to do."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE_S = 15.0  # `srtm up` gives its brokers ten


class Over(Exception):
    """The demo cannot continue: something that it needs is gone."""


def adopt() -> None:
    """Become the parent of descendants whose own parents die."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def end_children() -> None:
    """Terminate all children, adopted ones included, and wait for them; kill those that are late."""
    told: set[int] = set()
    until = time.monotonic() + _PATIENCE_S
    while children := _children():
        for pid in children:
            late = time.monotonic() > until
            if late or pid not in told:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                told.add(pid)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)


def ended(code: int) -> str:
    """How a process ended, in words."""
    return f"was killed ({signal.Signals(-code).name})" if code < 0 else f"failed (exit code {code})"


def note_why(folder: Path, reason: str) -> None:
    """Leave the reason for the end to the supervising process."""
    with suppress(OSError):  # a full disk may be why
        (folder / "why").write_text(reason)


def why(folder: Path) -> str:
    """The reason that the demo left, or an empty string."""
    with suppress(OSError):
        return (folder / "why").read_text()
    return ""


def last_line(reason: str) -> None:
    """Print what happened, and what to do."""
    with suppress(OSError):  # stderr may be closed
        ending = "Nothing is left running; start again with `make demo`."
        print(f"\nThe demo ended early: {reason.rstrip('.')}. {ending}", file=sys.stderr)


def _children() -> list[int]:
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]
