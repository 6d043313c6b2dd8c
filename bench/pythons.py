"""`python -m bench.pythons NAME=PYTHON …`: our broker on several interpreters, in one run.

Each PYTHON is a program that can import SRTM's dependencies, for example of a virtual environment; the interpreter that
runs this is the first. Loads are those of bench.broker: interpreters take turns, each on the same core, and sleep while
others are measured. The tables give the median of processor time, and of ratios to the first in the same turn.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import platform
import statistics

from bench import host, peers
from bench.broker import cpu, loading, median, percentile
from bench.measure import show

LOADS = ((1, 5_000), (1, 20_000), (10, 20_000), (10, 50_000))


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.pythons", description=__doc__)
    parser.add_argument("pythons", nargs="*", metavar="NAME=PYTHON")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-realtime", action="store_true", help="do not put programs ahead of other processes")
    options = parser.parse_args()
    realtime = not options.no_realtime and peers.can_be_realtime()
    print(host.describe(options.seed))
    print(f"{'SCHED_FIFO' if realtime else 'ordinary priority'}; load average {os.getloadavg()[0]:.1f}")
    made = [peers.srtm(name=platform.python_version())]
    for text in options.pythons:
        name, _, program = text.partition("=")
        made.append(dataclasses.replace(made[0], name=name, command=(program, *made[0].command[1:])))
    first, rows = made[0].name, []
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(peers.running(peer, realtime=realtime)) for peer in made]
        for batch, rate in LOADS:
            run = loading(rate, batch, 1.0, options.seed)
            runs: dict[str, list[peers.Run]] = {peer.name: [] for peer in made}
            for turn in range(options.turns):
                order = found[turn % len(found) :] + found[: turn % len(found)]  # nobody always comes first
                for peer in order:
                    runs[peer.peer.name].append(run(peer, turn))
            for name, mine in runs.items():
                ratio = statistics.median(
                    one.cpu_us / other.cpu_us for one, other in zip(mine, runs[first], strict=True)
                )
                rows.append(
                    [
                        f"{rate:,}/s by {batch}: {name}",
                        f"{median(mine, cpu):.1f}",
                        f"{ratio:.2f}",
                        *(f"{median(mine, percentile(q)):,.0f}" for q in (0.5, 0.99)),
                    ]
                )
        memory = {peer.peer.name: peer.peak_mb() for peer in found}
    show("The broker on several interpreters", ["", "CPU µs/msg", f"× {first}", "p50 µs", "p99 µs"], rows)
    print("memory:", ", ".join(f"{name} {mb:.0f} MB" for name, mb in memory.items()))
    print(host.jitter_line())


if __name__ == "__main__":
    main()
