"""`python -m bench.shares [cycles|kills]`: how soon a contract that replaces another of its name is in force.

Four brokers and a controller on this machine, under a city's load (bench.live).
cycles: DELETE and PUT at once, from `lb` to `srtm` and back, every second time to a tenth of (r, b); every contract's
life is recorded, and Spark checks that it conformed.
kills: kill -9 of the broker that holds everything, of the controller, or of both, within half a second of a change; the
topic is on disk, and what publishers were answered must arrive.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import Progress

from bench import host
from bench.live import LANES, B, Live, Look, R, Wish, certain
from bench.measure import show
from srtm import program
from srtm.model.bucket import TokenBucket
from srtm.model.timeline import Timeline
from srtm.units import NS_PER_MS, NS_PER_S
from srtm.workload.trace import RECORDED_SCHEMA, encoded, writing

LB, SRTM = Wish("lb", R, B), Wish("srtm", R, B)
SMALL = Wish("srtm", R / 10, B / 10, LANES // 10)
OTHER = Wish("srtm", 0.9 * R, 0.9 * B)  # so that what was in force before can be told from what is
FIRST_S = 3.0  # after PUT, whose access delays count
SOON_S, TAIL_MS = 1.0, 50.0  # goals of cycles: in force, and the p99 of access, where it is not split
AGAIN_S = 32.0  # goal of kills: a lease and two exchanges
VICTIMS = ("broker", "controller", "both")
AROUND_S = 0.5  # of a change, when processes are killed
LONGEST_S = 6 * 3600  # that a busy loop may live, whatever happens to us
Step = Callable[[str], None]


@dataclass
class Change:
    """One contract in the place of another; times in seconds since PUT was sent."""

    group: str
    wish: Wish
    before: Wish
    sent_s: float  # by the wall clock
    answered_s: float
    ended_s: float = 0.0  # by the wall clock, before the next DELETE
    opened_s: float | None = None
    home_s: float | None = None  # every publisher was connected where it is placed
    in_force_s: float | None = None
    longest_dip_s: float = 0.0  # below that, later
    most_r: float = 0.0  # in force together, as a part of the contract
    most_b: float = 0.0
    longest_look_s: float = 0.0  # between two looks: how exact all this is
    p99_ms: float | None = None
    conforms: bool | None = None
    excess: float | None = None  # messages beyond b + r·Δt in the worst window
    missing: int = 0

    def judge(self, looks: list[Look]) -> None:
        """See when it was in force, whether it stayed so, and whether there was ever too much."""
        since_s = max(self.sent_s, self.answered_s)
        looks = [look for look in looks if look.began_s >= since_s]
        opened = next((number for number, look in enumerate(looks) if look.opened), len(looks))
        serving = [look for look in looks[opened:] if look.serves(self.wish)]
        if opened < len(looks):
            self.opened_s = looks[opened].ended_s - self.sent_s
        home = next((look for look in looks if look.placed == look.connected), None)
        self.home_s = home.ended_s - self.sent_s if home else None
        if serving:
            self.in_force_s = serving[0].ended_s - self.sent_s
            times = [look.ended_s for look in serving] + [looks[-1].ended_s]
            self.longest_dip_s = max(np.diff(times), default=0.0)
        if looks:
            self.longest_look_s = float(max(np.diff([since_s, *(look.ended_s for look in looks)])))
        larger = self.wish if self.wish.r >= self.before.r else self.before  # either may be in force before it opens
        for wish, part in ((larger, looks[: opened + 1]), (self.wish, looks[opened:])):
            for r, b in certain(part):
                self.most_r, self.most_b = max(self.most_r, r / wish.r), max(self.most_b, b / wish.b)

    @property
    def kept(self) -> bool:
        """Never more than the contract."""
        return max(self.most_r, self.most_b) <= 1 + 1e-9


async def cycles(options: argparse.Namespace, folder: Path, step: Step) -> tuple[list[Change], str]:
    """Two changes each: to `srtm`, and back to `lb`."""
    live, changes, before = Live(folder, "memory", options.seed), [], LB
    async with live.running(LB):
        await asyncio.sleep(options.seconds)
        for number in range(2 * options.cycles):
            wish = LB if number % 2 else SMALL if number % 4 == 2 else SRTM
            await live.record("start", f"{number:04}")
            sent_s, answered_s = await live.replace(wish, options.gap)
            change = Change(f"{_named(before)} → {_named(wish)}", wish, before, sent_s, answered_s)
            await asyncio.sleep(max(0.0, sent_s + options.seconds - time.time()))
            change.ended_s, before = time.time(), wish
            await live.record("stop")
            change.judge(live.watch.between(sent_s, change.ended_s))
            changes.append(change)
            step(f"{change.group}: {_seconds(change.in_force_s)}")
    return changes, live.load.summary()


def _named(wish: Wish) -> str:
    return f"{wish.policy}/10" if wish is SMALL else wish.policy


async def kills(options: argparse.Namespace, folder: Path, step: Step) -> tuple[list[Change], str]:
    """A change and a kill at about the same time, of each kind in turn."""
    rng = random.Random(options.seed)
    live, changes, before = Live(folder, "disk", options.seed), [], SRTM
    begins = []
    async with live.running(SRTM):
        await asyncio.sleep(options.seconds)
        for number in range(len(VICTIMS) * options.kills):
            victim, wish = VICTIMS[number % len(VICTIMS)], SRTM if number % 2 else OTHER
            begins.append(live.load.reports)
            moment_s = rng.uniform(-AROUND_S, AROUND_S)
            killing = asyncio.create_task(_kill(live, victim, AROUND_S + moment_s))
            await asyncio.sleep(AROUND_S)
            sent_s, answered_s = await live.replace(wish, options.gap)
            sent_s = max(sent_s, await killing)
            change = Change(victim, wish, before, sent_s, answered_s)
            await live.watch.until(max(sent_s, answered_s), wish, options.patience)
            await asyncio.sleep(options.seconds)  # does it stay? and who was started again is no longer young
            change.ended_s, before = time.time(), wish
            change.judge(live.watch.between(sent_s, change.ended_s))
            changes.append(change)
            step(f"{victim}: {_seconds(change.in_force_s)}")
        await live.remove()  # what waits for tokens need not
        await live.load.drained()
        for change, begin, end in zip(changes, begins, [*begins[1:], live.load.reports], strict=True):
            change.missing = live.load.missing(begin, end)
    return changes, live.load.summary()


async def _kill(live: Live, victim: str, after_s: float) -> float:
    """Kill -9, after a while; gives when."""
    await asyncio.sleep(after_s)
    held = (look.shares for look in reversed(live.watch.looks) if any(r for r, _ in look.shares.values()))
    shares = next(held, live.watch.looks[-1].shares)
    largest = max(live.cluster.brokers, key=lambda child: shares[child.name])
    victims = {"broker": [largest], "controller": [live.cluster.controller], "both": [largest, live.cluster.controller]}
    for child in victims[victim]:
        if child.process is not None and child.process.returncode is None:
            child.process.kill()
    return time.time()


def look_at_recordings(changes: list[Change], folder: Path) -> None:
    """Access delays after each PUT, and conformance while each contract was open."""
    from srtm.pipeline.conformance import conformance
    from srtm.pipeline.runtime import archive
    from srtm.pipeline.session import spark_session

    lives = folder / "lives"
    lives.mkdir()
    tables = [_recorded(folder / "traces", number) for number in range(len(changes))]
    arrival_ns, release_ns = (
        np.concatenate([table[name].to_numpy() for table in tables]) for name in ("arrival_ns", "release_ns")
    )
    contracts: dict[str, Timeline] = {}
    for number, (change, table) in enumerate(zip(changes, tables, strict=True)):
        begin_ns = round(change.sent_s * NS_PER_S)
        # Some were released in a later life, and are in its recording.
        first = (arrival_ns >= begin_ns) & (arrival_ns < begin_ns + FIRST_S * NS_PER_S)
        if first.any():
            change.p99_ms = float(np.percentile((release_ns - arrival_ns)[first], 99)) / NS_PER_MS
        if change.opened_s is not None:
            opened_ns, ended_ns = (round(at * NS_PER_S) for at in (change.sent_s + change.opened_s, change.ended_s))
            released_ns = table["release_ns"].to_numpy()
            rows = table.filter(pa.array((released_ns >= opened_ns) & (released_ns <= ended_ns)))
            rows = rows.set_column(0, "topic", pa.array([f"{number:04}"] * len(rows)))  # each life is judged by itself
            with writing(lives / f"{number:04}.parquet", RECORDED_SCHEMA, {}) as writer:
                writer.write_table(rows.cast(encoded(RECORDED_SCHEMA)))
            contracts[f"{number:04}"] = Timeline(TokenBucket.of(change.wish.r, change.wish.b))
    os.environ[archive.SWITCH] = "off"  # a process that makes one would outlive us
    with spark_session() as spark:
        for line in conformance(lives, contracts, spark):
            change = changes[int(line.topic)]
            change.conforms, change.excess = line.conforms, float(line.excess.tokens) if line.excess else None


def _recorded(folder: Path, number: int) -> pa.Table:
    return pa.concat_tables(pq.read_table(path) for path in sorted(folder.glob(f"{number:04}-*.parquet")))


def table_of_cycles(changes: list[Change]) -> dict[str, bool]:
    """Print it; gives the goals, and whether they are met."""
    rows, goals = [], {}
    for name, group in _groups(changes):
        soon = sum(each.in_force_s is not None and each.in_force_s <= SOON_S for each in group)
        goals[f"{name}: in force within {SOON_S:g} s each time"] = soon == len(group)
        tails = [np.inf if each.p99_ms is None else each.p99_ms for each in group]  # without one, nothing got a token
        if group[0].wish.policy == "srtm":  # lb splits the bucket, and what that costs is not judged here
            goals[f"{name}: p99 access {TAIL_MS:g} ms or less in the median"] = bool(np.median(tails) <= TAIL_MS)
        goals[f"{name}: never more than the contract"] = all(each.kept for each in group)
        goals[f"{name}: recordings conform"] = all(each.conforms for each in group)
        rows.append(
            [
                name,
                f"{soon}/{len(group)}",
                *_times([each.in_force_s for each in group]),
                _times([each.home_s for each in group])[0],
                f"{np.median(tails):.1f}, {max(tails):,.0f}",
                f"{max(each.longest_dip_s for each in group):.1f}",
                f"{max(each.most_r for each in group):.1%}, {max(each.most_b for each in group):.1%}",
                f"{sum(bool(each.conforms) for each in group)}/{len(group)}",
            ]
        )
    print("/10: a tenth of (r, b), and of the load; home: median until publishers are connected where they are placed")
    print(f"p99: access delay of the first {FIRST_S:g} s in ms, median and worst; dip: longest time below 99 % later")
    show(
        "From PUT until 99 % of r is in force where publishers are placed",
        ["change", f"≤ {SOON_S:g} s", *_COLUMNS, "home", "p99", "dip s", "most r, b", "conform"],
        rows,
    )
    return goals


def table_of_kills(changes: list[Change]) -> dict[str, bool]:
    """Print it; gives the goals, and whether they are met."""
    rows, goals = [], {}
    for name, group in _groups(changes):
        again = sum(each.in_force_s is not None and each.in_force_s <= AGAIN_S for each in group)
        missing = sum(each.missing for each in group)
        goals[f"kill -9 of {name}: in force within {AGAIN_S:g} s each time"] = again == len(group)
        goals[f"kill -9 of {name}: never more than the contract"] = all(each.kept for each in group)
        goals[f"kill -9 of {name}: nothing lost that was acknowledged"] = not missing
        most = f"{max(each.most_r for each in group):.1%}, {max(each.most_b for each in group):.1%}"
        rows.append([name, f"{again}/{len(group)}", *_times([each.in_force_s for each in group]), most, f"{missing:,}"])
    title = "From PUT or kill -9, whichever was later, until 99 % of r is in force where publishers are placed"
    show(title, ["killed", f"≤ {AGAIN_S:g} s", *_COLUMNS, "most r, b", "messages lost"], rows)
    return goals


_COLUMNS = ["median s", "p90", "worst", "never"]


def _times(found: list[float | None]) -> list[str]:
    """Median, p90, worst, and how many never came, which count as longer than any."""
    times = [np.inf if each is None else each for each in found]
    points = np.quantile(times, (0.5, 0.9, 1.0), method="inverted_cdf")
    return [*(f"{point:.2f}" if np.isfinite(point) else "never" for point in points), str(times.count(np.inf))]


def _groups(changes: list[Change]) -> list[tuple[str, list[Change]]]:
    return [(name, [each for each in changes if each.group == name]) for name in {each.group: 0 for each in changes}]


def _seconds(found: float | None) -> str:
    return "not in force" if found is None else f"in force after {found:.2f} s"


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Loops that do nothing, as fast as they can."""
    code = f"import time\nend = time.monotonic() + {LONGEST_S}\nwhile time.monotonic() < end: pass"
    loops = [subprocess.Popen([sys.executable, "-c", code], start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextmanager
def stepping(title: str, total: int) -> Iterator[Step]:
    """A line of progress on a terminal."""
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(title, total=total)
        yield lambda text: progress.update(task, advance=1, description=f"{title}: {text}")


def measure(part: str, options: argparse.Namespace) -> tuple[list[Change], dict[str, bool]]:
    """Run one part and print its table."""
    run, total = {"cycles": (cycles, 2 * options.cycles), "kills": (kills, len(VICTIMS) * options.kills)}[part]

    async def stoppable() -> tuple[list[Change], str]:
        this = asyncio.current_task()
        assert this is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
        return await run(options, folder, step)

    with tempfile.TemporaryDirectory(prefix="bench-shares-") as name:
        folder = Path(name)
        with busy(options.busy), stepping(part, total) as step:
            changes, summary = program.run(stoppable())
        print(
            f"{part}: {summary}; looks {max(each.longest_look_s for each in changes):.2f} s apart or less", flush=True
        )
        if part == "kills":
            return changes, table_of_kills(changes)
        look_at_recordings(changes, folder)
        return changes, table_of_cycles(changes)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.shares", description=__doc__)
    parser.add_argument("parts", nargs="*", help="cycles, kills (default: both)")
    parser.add_argument("--cycles", type=int, default=100, help="two changes each")
    parser.add_argument("--kills", type=int, default=20, help="of each kind")
    parser.add_argument("--seconds", type=float, default=6.0, help="between two changes")
    parser.add_argument("--gap", type=float, default=0.0, help="seconds between DELETE and PUT, to compare with")
    parser.add_argument("--patience", type=float, default=45.0, help="seconds to wait after a kill")
    parser.add_argument("--busy", type=int, default=0, help="busy loops beside")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for every change")
    options = parser.parse_args()
    if unknown := [part for part in options.parts if part not in ("cycles", "kills")]:
        parser.error(f"unknown part {unknown[0]!r}; known parts: cycles, kills")
    described = host.describe(options.seed)
    print(f"{described}\n{options.busy} busy loops beside; {options.seconds:g} s between changes", flush=True)
    found: dict[str, Any] = {"host": described, "options": {**vars(options), "json": str(options.json)}}
    goals: dict[str, bool] = {}
    try:
        for part in options.parts or ("cycles", "kills"):
            changes, met = measure(part, options)
            found[part], goals = [asdict(each) for each in changes], goals | met
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("stopped", file=sys.stderr)
        return 130
    longest, lost = host.jitter_us()
    print(f"host jitter afterwards: longest gap {longest:.0f} µs, {lost:.2f} % of a second lost in gaps over 50 µs")
    for goal, met_ in goals.items():
        if not met_:
            print(f"missed: {goal}")
    if options.json:
        options.json.write_text(json.dumps({**found, "goals": goals}, indent=1))
    return int(not all(goals.values()))


if __name__ == "__main__":
    sys.exit(main())
