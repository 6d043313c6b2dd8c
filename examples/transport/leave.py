"""How the demo's processes leave: nothing runs on, and the last line says what happened and what to do."""

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


def adopt() -> None:
    """From now on, processes whose parents die below this one become its children."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def end_children() -> None:
    """End all children, kindly at first, and wait until there are none; who loses a parent meanwhile is one of them."""
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
    """In words, how a process ended."""
    return f"was killed ({signal.Signals(-code).name})" if code < 0 else f"failed (exit code {code})"


def note_why(folder: Path, reason: str) -> None:
    """Tell the process that watches why the play is over."""
    with suppress(OSError):  # a full disk may be why
        (folder / "why").write_text(reason)


def why(folder: Path) -> str:
    """What the play said about its end, or nothing."""
    with suppress(OSError):
        return (folder / "why").read_text()
    return ""


def last_line(reason: str) -> None:
    """What happened, and what to do."""
    with suppress(OSError):  # nobody may be there to read it
        ending = "Nothing is left running; `make demo` starts it anew."
        print(f"\nThe demo is over: {reason.rstrip('.')}. {ending}", file=sys.stderr)


def _children() -> list[int]:
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]
