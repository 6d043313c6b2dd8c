"""`python -m bench.prediction`: the service model, fitted on this host, against loads that the fit does not know.

A broker of its own, in memory and on disk: six loads for the fits, then single messages and batches of 10, one topic
and three, below 80 % of the capacity that the model gives. Latency counts from the write of a message, and the
prediction is for the writes as they happened, so the load's own lateness is in neither. Each load has several turns;
p50 and p99 are those of the turn with the median p99. Misses stay in the table.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from bench import host
from bench.measure import show
from srtm.cli.servers.trials import Kind, a_broker, fitted
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from srtm.cli.servers.trials import Point

WITHIN = 0.25
PARTS = (0.3, 0.7)  # of the capacity
MOST_MPS = {1: 18_000.0, 10: 120_000.0}  # beyond, the load generator needs a core of its own, and is throttled
SLOW_MPS = 2_000.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.prediction", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each load")
    parser.add_argument("--turns", type=int, default=3, help="turns of each load that is predicted")
    parser.add_argument("--ordinary", action="store_true", help="run with ordinary priority")
    options = parser.parse_args()
    realtime = not options.ordinary and _real_time()
    print(host.describe(1))
    print(f"{'SCHED_FIFO' if realtime else 'ordinary priority'}; load average {os.getloadavg()[0]:.1f}")
    rows, errors = [], []
    with a_broker(round(options.seconds * NS_PER_S)) as trial:
        for durability in ("memory", "disk"):
            found, _ = fitted(trial, durability, SLOW_MPS)
            print(f"{durability}: {found.service}; tails are {found.tail:.2f} times the model's")
            for batch in (1, 10):
                for topics in (1, 3):
                    for part in PARTS:
                        most = found.service.most_mps(batch)
                        rate_mps = part * min(most, MOST_MPS[batch] / PARTS[-1])
                        kind = Kind(rate_mps, batch, durability, topics)
                        runs = []
                        for _ in range(options.turns):
                            point, seen = trial.measured(kind)
                            runs.append((point, found.predicted_ns(seen.times_ns, seen.publisher_of)))
                        point, predicted = sorted(runs, key=lambda run: run[0].p99_ns)[len(runs) // 2]
                        errors.append(point.error(predicted))
                        rows.append(_row(kind, kind.rate_mps / most, point, predicted))
    show(
        "Latency from the write (µs): measured, predicted, error",
        ["load", "of capacity", "CPU µs/msg", "p50", "predicted", "error", "p99", "predicted", "error", "lateness p99"],
        rows,
    )
    for name, found_errors in (("p50", [p50 for p50, _ in errors]), ("p99", [p99 for _, p99 in errors])):
        good = sum(abs(error) <= WITHIN for error in found_errors)
        print(f"{name}: {good} of {len(errors)} within {WITHIN:.0%}, the worst {max(found_errors, key=abs):+.0%}")
    longest, lost = host.jitter_us()
    print(f"host jitter afterwards: longest gap {longest:.0f} µs, {lost:.2f} % of a second lost in gaps over 50 µs")


def _row(kind: Kind, part: float, point: Point, predicted: tuple[int, int]) -> list[str]:
    p50, p99 = point.error(predicted)
    return [
        str(kind),
        f"{part:.0%}",
        f"{point.cpu_ns / 1e3:.1f}",
        f"{point.p50_ns / 1e3:,.0f}",
        f"{predicted[0] / 1e3:,.0f}",
        f"{p50:+.0%}",
        f"{point.p99_ns / 1e3:,.0f}",
        f"{predicted[1] / 1e3:,.0f}",
        f"{p99:+.0%}",
        f"{point.late_ns / 1e3:,.0f}",
    ]


def _real_time() -> bool:
    """Put this process, and those that it starts, above all that is not real time."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return False
    return True


if __name__ == "__main__":
    main()
