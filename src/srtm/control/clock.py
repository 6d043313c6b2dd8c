"""The control plane's clock: nanoseconds since 1970 that never go back, even if the host's clock is set."""

from __future__ import annotations

import time

_START_NS = time.time_ns() - time.monotonic_ns()


def now_ns() -> int:
    """The current time."""
    return _START_NS + time.monotonic_ns()
