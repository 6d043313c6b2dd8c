"""`python -m bench.demo [--runs N] [--busy M]`: the demo, N times, alone or beside M programs that keep a core busy.

A row a run: p99 access under lb and srtm, the least part of r in force, stalls of the machine, and how long it took.
Exits with 1 if srtm's p99 access was above 10 ms or not below lb's in any run, or if a demo failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import host
from bench.measure import show
from srtm.units import NS_PER_MS, format_ns

if TYPE_CHECKING:
    from collections.abc import Iterator

DEMO = Path(__file__).parents[1] / "examples" / "transport" / "demo.py"
TOLERATED_MS = 10.0  # of srtm's p99 access; its bucket is one, and nothing should wait
WITHIN_S = 600.0  # a demo that takes longer hangs
COLUMNS = [
    "run",
    "host jitter",
    "p99 access, lb / srtm",
    "srtm, first",
    "p99 total, lb / srtm",
    "r in force",
    "stalled",
    "took",
    "verdict",
]


@contextmanager
def busy(programs: int) -> Iterator[None]:
    """Programs that do nothing but keep a core busy, at the usual priority."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(programs)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def run_demo(folder: Path) -> dict[str, Any] | None:
    """The figures of one demo; None, with its last lines on stderr, if it failed."""
    figures = folder / "figures.json"
    figures.unlink(missing_ok=True)
    command = [sys.executable, str(DEMO), "--json", str(figures)]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=WITHIN_S)
    except subprocess.TimeoutExpired:
        print(f"the demo did not end within {WITHIN_S:g} s", file=sys.stderr)
        return None
    if done.returncode or not figures.exists():
        print("\n".join((done.stdout + done.stderr).splitlines()[-5:]), file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(figures.read_text())
    return found


def judged(figures: dict[str, Any]) -> tuple[list[str], bool]:
    """The cells of a run, and whether it showed what the demo is there to show."""
    lb, srtm = figures["runs"]
    good = is_good(lb["p99_access_ms"], srtm["p99_access_ms"])
    return [
        f"{_ms(lb['p99_access_ms'])} / {_ms(srtm['p99_access_ms'])}",
        _ms(srtm["first"]["access_ms"]),
        f"{_ms(lb['p99_total_ms'])} / {_ms(srtm['p99_total_ms'])}",
        " / ".join(_percent(run["recorded"]["in_force"]) for run in (lb, srtm)),
        " / ".join(_percent(run["recorded"]["stalled"]) for run in (lb, srtm)),
        f"{figures['seconds']:.0f} s",
        "good" if good else "BAD",
    ], good


def is_good(lb_ms: float | None, srtm_ms: float | None) -> bool:
    """Whether srtm's p99 access was next to nothing, and less than lb's."""
    return lb_ms is not None and srtm_ms is not None and srtm_ms <= TOLERATED_MS and srtm_ms < lb_ms


def _ms(value: float | None) -> str:
    return "—" if value is None else format_ns(round(value * NS_PER_MS))


def _percent(part: float | None) -> str:
    return "—" if part is None else f"{part:.1%}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.demo", description=__doc__)
    parser.add_argument("--runs", type=int, default=10, help="how often (%(default)s)")
    parser.add_argument("--busy", type=int, default=0, help="programs that keep a core busy meanwhile (%(default)s)")
    options = parser.parse_args()
    rows, bad = [], 0
    with tempfile.TemporaryDirectory(prefix="srtm-bench-demo-") as folder, busy(options.busy):
        for number in range(1, options.runs + 1):
            longest_us, lost = host.jitter_us()
            figures = run_demo(Path(folder))
            cells, good = judged(figures) if figures else (["—"] * 6 + ["FAILED"], False)
            bad += not good
            rows.append([str(number), f"{longest_us / 1000:.1f} ms, {lost:.1f} %", *cells])
            print("  ".join(rows[-1]), file=sys.stderr, flush=True)
            for cause in [cause for run in (figures or {"runs": []})["runs"] for cause in run["causes"]]:
                print(f"    {cause}", file=sys.stderr, flush=True)
    beside = f" beside {options.busy} busy cores" if options.busy else ""
    show(f"{options.runs} demos{beside}, {bad} bad", COLUMNS, rows)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
