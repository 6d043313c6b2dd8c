"""How long this machine keeps a program waiting that wants to run: `python probe.py`, until SIGTERM.

It sleeps for a few milliseconds, again and again, and notes how much later it wakes up: whatever keeps it from a
processor keeps brokers and sensors from one, too. A line of JSON a second: the longest stall, and the time lost in
stalls that a p99 of the demo's SLO would notice.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress

PERIOD_S = 0.005
NOTICED_S = 0.010  # a fifth of the demo's SLO


def main() -> None:
    """Look, and tell each second."""
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
    with suppress(BrokenPipeError):  # nobody may be left to hear it
        main()
