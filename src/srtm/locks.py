"""Lock files, which give one process exclusive use of something. The kernel drops a lock when its process ends."""

from __future__ import annotations

import fcntl
import os


def other_holder(lock: int) -> str | None:
    """Lock the file of a descriptor until that is closed; return the holder if another process has the lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        said = os.pread(lock, 200, 0).decode(errors="replace")
        return said.rpartition("used by ")[2].strip() or "another process"
    return None


def sign(lock: int, what: str) -> None:
    """Write into a lock file that this process holds what it protects, and the process id."""
    os.pwrite(lock, f"{what}; used by process {os.getpid():<10}\n".encode(), 0)
