"""`python -m bench.collector`: what a garbage collection costs a broker's process, before and after it is frozen."""

from __future__ import annotations

import gc
import statistics
import time

import srtm.broker.run  # noqa: F401  # the objects of a broker that has started
from bench import host

TIMES = 15


def cost_ms(generation: int) -> str:
    spent = []
    for _ in range(TIMES):
        begin_ns = time.process_time_ns()
        gc.collect(generation)
        spent.append((time.process_time_ns() - begin_ns) / 1e6)
    return f"{statistics.median(spent):.2f} ms (median), {max(spent):.2f} (most)"


def main() -> None:
    print(host.describe(1))
    gc.collect()
    print(f"{len(gc.get_objects())} objects; a full collection takes {cost_ms(2)} of processor time")
    gc.freeze()
    print(f"frozen, as in a broker that serves: {cost_ms(2)}")


if __name__ == "__main__":
    main()
