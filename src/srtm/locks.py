"""A lock file: what one process uses, no other does. It ends with the process, however that ends."""

from __future__ import annotations

import fcntl
import os


def other_holder(lock: int) -> str | None:
    """Take the lock file that this descriptor is of, until it is closed; returns who has it, if somebody does."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        said = os.pread(lock, 200, 0).decode(errors="replace")
        return said.rpartition("used by ")[2].strip() or "another process"
    return None


def sign(lock: int, what: str) -> None:
    """Say in a lock file that is ours what it stands for, and who we are."""
    os.pwrite(lock, f"{what}; used by process {os.getpid():<10}\n".encode(), 0)
