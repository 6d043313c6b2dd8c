"""How long this machine delays a program that is ready to run: `python probe.py`, until SIGTERM.

The probe sleeps for a few milliseconds at a time and measures how late it wakes up; the same stalls hit brokers and
sensors. It prints a line of JSON per second: the longest stall, and the time lost in stalls that a p99 under the demo's
SLO would show.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress

PERIOD_S = 0.005
NOTICED_S = 0.010  # a fifth of the demo's SLO


def main() -> None:
    """Measure, and report each second."""
    due = told = time.monotonic()
    longest_s = lost_s = 0.0
    while True:
        due += PERIOD_S
        time.sleep(max(0.0, due - time.monotonic()))
        now = time.monotonic()
        stall_s = now - due
        longest_s = max(longest_s, stall_s)
        if stall_s >= NOTICED_S:
            lost_s += stall_s
            due = now
        if now - told >= 1:
            print(json.dumps({"at_s": time.time(), "longest_s": longest_s, "lost_s": lost_s}), flush=True)
            told, longest_s, lost_s = now, 0.0, 0.0


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the reader may be gone
        main()
