"""Real-time scheduling for what is measured, if the host permits it: ordinary programs would add gaps of their own.

Brokers at work and loads that send come first. What cells need besides, such as controllers and connecting, must not
wait for ordinary programs either, but never delays those. Programs start as ordinary ones.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

FIRST, SECOND = 10, 5


def hurry(priority: int = FIRST, process: int = 0) -> None:
    """Schedule this thread, or a process, before ordinary programs.

    Processes that this one starts are ordinary. Threads of another process inherit its priority, or one that writes a
    recording would hold the interpreter while others keep it from running.
    """
    with suppress(OSError, AttributeError):  # not permitted, or not Linux
        kind = os.SCHED_RR if process else os.SCHED_RR | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(process, kind, os.sched_param(priority))


@contextmanager
def hurried(priority: int = SECOND) -> Iterator[None]:
    """Hurry for the time of a block; what is measured in it may `hurry` more."""
    before = (os.sched_getscheduler(0), os.sched_getparam(0)) if hasattr(os, "sched_getscheduler") else None
    hurry(priority)
    try:
        yield
    finally:
        if before is not None:
            with suppress(OSError):
                os.sched_setscheduler(0, *before)
