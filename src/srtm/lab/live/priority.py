"""Real-time scheduling for what is measured, if the host permits it: ordinary programs would add gaps of their own."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PRIORITY = 10


def hurry(process: int = 0) -> None:
    """Schedule this thread, or a process, before ordinary programs; what it starts from now on is ordinary."""
    with suppress(OSError, AttributeError):  # not permitted, or not Linux
        os.sched_setscheduler(process, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(_PRIORITY))


@contextmanager
def hurried() -> Iterator[None]:
    """Let what calls `hurry` in this block be ordinary again afterwards: starting must not delay others at work."""
    before = (os.sched_getscheduler(0), os.sched_getparam(0)) if hasattr(os, "sched_getscheduler") else None
    try:
        yield
    finally:
        if before is not None:
            with suppress(OSError):
                os.sched_setscheduler(0, *before)
