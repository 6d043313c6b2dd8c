"""The durable log, and what it was chosen from: `python -m bench.log [NAME …] [--folder FOLDER]`.

Alternatives write the same messages (100 bytes of body) in turns, to fresh files in the same folder.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sqlite3
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import host
from bench.measure import show
from srtm.broker.disk.batch import Record, encode
from srtm.broker.disk.log import Log, LogOptions

GROUPS = (1, 10, 100, 1_000)
BODY = bytes(100)
RECORDS = [Record(n.to_bytes(16, "big"), 1_700_000_000_000_000_000 + n, f"p{n % 50}", BODY) for n in range(1_000)]

Commit = Callable[[int, list[Record]], None]


def database(path: Path, table: str, synchronous: str = "FULL") -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute(f"PRAGMA synchronous = {synchronous}")
    db.execute("PRAGMA wal_autocheckpoint = 0")
    db.execute(table)
    return db


def a_row_a_group(folder: Path, synchronous: str = "FULL") -> Commit:
    db = database(
        folder / f"group {synchronous}",
        "CREATE TABLE m (key INTEGER PRIMARY KEY, n INT, ns INT, data BLOB)",
        synchronous,
    )

    def commit(offset: int, records: list[Record]) -> None:
        db.execute("INSERT INTO m VALUES (?, ?, ?, ?)", (offset, len(records), 0, encode(records)))

    return commit


def not_synchronous(folder: Path) -> Commit:
    return a_row_a_group(folder, "NORMAL")


def a_row_a_message(folder: Path) -> Commit:
    table = "CREATE TABLE m (key INTEGER PRIMARY KEY, ns INT, publisher TEXT, id BLOB, body BLOB)"
    return rows(database(folder / "message", table), "INSERT INTO m VALUES (?, ?, ?, ?, ?)")


def without_rowid(folder: Path) -> Commit:
    table = "CREATE TABLE m (topic INT, o INT, ns INT, publisher TEXT, id BLOB, body BLOB, PRIMARY KEY (topic, o))"
    db = database(folder / "without", f"{table} WITHOUT ROWID")
    return rows(db, "INSERT INTO m VALUES (1, ?, ?, ?, ?, ?)")


def rows(db: sqlite3.Connection, insert: str) -> Commit:
    def commit(offset: int, records: list[Record]) -> None:
        db.execute("BEGIN")
        values = [(offset + i, r.arrival_ns, r.publisher, r.id, r.body) for i, r in enumerate(records)]
        db.executemany(insert, values)
        db.execute("COMMIT")

    return commit


def a_bare_file(folder: Path) -> Commit:
    descriptor = os.open(folder / "bare", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    head = struct.Struct("<QI")

    def commit(_: int, records: list[Record]) -> None:
        os.write(descriptor, b"".join([head.pack(r.arrival_ns, len(r.body)) + r.id + r.body for r in records]))
        os.fdatasync(descriptor)

    return commit


LAYOUTS = {
    "a row a group": a_row_a_group,
    "a row a message": a_row_a_message,
    "the same, WITHOUT ROWID": without_rowid,
    "a bare file (the floor)": a_bare_file,
    "a row a group, NORMAL": not_synchronous,
}
FILES = dict(zip(LAYOUTS, ("group FULL-wal", "message-wal", "without-wal", "bare", "group NORMAL-wal"), strict=True))


@contextmanager
def busy_interpreter(*, busy: bool) -> Iterator[None]:
    """Another thread that never waits, as a loop at its limit: it gives the interpreter up only when made to."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    thread = threading.Thread(target=spin)
    if busy:
        thread.start()
    yield
    stop.set()
    if busy:
        thread.join()


def layouts(folder: Path) -> None:
    """One thread commits groups of messages; alone, and beside a thread that computes."""
    for busy in (False, True):
        table = []
        for group in GROUPS:
            taken: dict[str, list[float]] = {name: [] for name in LAYOUTS}
            cpu = dict.fromkeys(LAYOUTS, 0.0)
            with tempfile.TemporaryDirectory(dir=folder) as fresh:
                commits = {name: layout(Path(fresh)) for name, layout in LAYOUTS.items()}
                rounds = 20 if busy else 100
                with busy_interpreter(busy=busy):
                    for turn in range(rounds):
                        for name, commit in commits.items():
                            began, used = time.perf_counter(), time.thread_time()
                            commit(turn * group, RECORDS[:group])
                            cpu[name] += time.thread_time() - used
                            taken[name].append(time.perf_counter() - began)
                written = {name: (Path(fresh) / FILES[name]).stat().st_size for name in LAYOUTS}
            for name, times in taken.items():
                table.append(
                    [
                        f"{group}, {name}",
                        *(f"{value * 1e3:.2f}" for value in (statistics.median(times), high(times))),
                        f"{cpu[name] / rounds / group * 1e6:.2f}",
                        f"{written[name] / rounds / group:,.0f}",
                    ]
                )
        show(
            f"{'beside a busy thread' if busy else 'alone'}: one commit (ms); of a message, CPU (µs) and bytes written",
            ["messages", "p50", "p99", "CPU", "bytes"],
            table,
        )


def files(folder: Path) -> None:
    """A commit with one message for each of several topics: in one file, and in a file for each."""
    table = []
    for topics in (1, 10, 100):
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            (Path(fresh) / "one").mkdir()
            own = []
            for topic in range(topics):
                (Path(fresh) / str(topic)).mkdir()
                own.append(a_row_a_group(Path(fresh) / str(topic)))
            log = Log.open(Path(fresh) / "one" / "log")
            one, many = [], []
            for turn in range(20):
                began = time.perf_counter()
                for topic in range(topics - 1):
                    log.append_nowait(f"t{topic}", RECORDS[:1], lambda _: None)
                log.append_wait(f"t{topics - 1}", RECORDS[:1])
                one.append(time.perf_counter() - began)
                began = time.perf_counter()
                for commit in own:
                    commit(turn, RECORDS[:1])
                many.append(time.perf_counter() - began)
            log.close()
        table.append([str(topics), *(f"{v * 1e3:.2f}" for v in (*both(one), *both(many)))])
    show(
        "one message to each topic, until all are durable (ms)",
        ["topics", "one file p50", "p99", "a file a topic p50", "p99"],
        table,
    )


def appends(folder: Path) -> None:
    """The log as a broker uses it: a loop, one append a turn, the next when the last is durable; 8 topics."""
    table = []
    for group in GROUPS:
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            table.append([str(group), *asyncio.run(appended(Path(fresh), group, 300 if group < 1_000 else 100))])
    show(
        "append through the log, one group at a time",
        ["messages", "messages/s", "commits/s", "flushes/commit", "p50 ms", "p99 ms", "loop µs", "writer µs"],
        table,
    )


async def appended(folder: Path, group: int, rounds: int) -> list[str]:
    log = Log.open(folder, asyncio.get_running_loop())
    for topic in range(8):
        await log.append(f"t{topic}", RECORDS[:1])
    times = []
    before, flushed, used = log.statistics(), flushes(), time.thread_time()
    writer = log.call(time.thread_time)
    started = time.perf_counter()
    for turn in range(rounds):
        began = time.perf_counter()
        await log.append(f"t{turn % 8}", RECORDS[:group])
        times.append(time.perf_counter() - began)
    seconds = time.perf_counter() - started
    used = time.thread_time() - used
    writer = log.call(time.thread_time) - writer
    after = log.statistics()
    commits, messages = after.commits - before.commits, after.messages - before.messages
    log.close()
    return [
        f"{messages / seconds:,.0f}",
        f"{commits / seconds:,.0f}",
        f"{(flushes() - flushed) / commits:.2f}",
        *(f"{value * 1e3:.2f}" for value in both(times)),
        f"{used / messages * 1e6:.2f}",
        f"{writer / messages * 1e6:.2f}",
    ]


def publishers(folder: Path) -> None:
    """Group commit: many publishers, each sends its next message when the last is acknowledged."""

    async def run(path: Path, count: int, each: int) -> list[str]:
        log = Log.open(path, asyncio.get_running_loop())
        times: list[float] = []

        async def publish(number: int) -> None:
            for _ in range(each):
                began = time.perf_counter()
                await log.append(f"t{number % 8}", RECORDS[number : number + 1])
                times.append(time.perf_counter() - began)

        used, started = time.thread_time(), time.perf_counter()
        await asyncio.gather(*(publish(number) for number in range(count)))
        seconds, used = time.perf_counter() - started, time.thread_time() - used
        commits = log.statistics().commits
        log.close()
        return [
            f"{len(times) / seconds:,.0f}",
            f"{commits / seconds:,.0f}",
            f"{len(times) / commits:.1f}",
            *(f"{value * 1e3:.2f}" for value in both(times)),
            f"{used / len(times) * 1e6:.1f}",
        ]

    table = []
    for count, each in ((1, 200), (10, 100), (100, 50), (1_000, 20)):
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            table.append([str(count), *asyncio.run(run(Path(fresh), count, each))])
    show(
        "publishers that wait for each OK",
        ["publishers", "messages/s", "commits/s", "messages/commit", "p50 ms", "p99 ms", "loop µs, awaits included"],
        table,
    )


def checkpoints(folder: Path) -> None:
    """How long an append waits for a checkpoint, by how much is checkpointed at once; never idle, 100 KB a commit."""
    table = []
    for size in (1 << 20, 4 << 20, 16 << 20, 64 << 20):
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            options = LogOptions(checkpoint_bytes=size, checkpoint_bytes_busy=size)
            log = Log.open(Path(fresh), options=options)
            times, largest = [], 0
            for _ in range(700):
                began = time.perf_counter()
                log.append_wait("a", RECORDS[:700])
                times.append(time.perf_counter() - began)
                largest = max(largest, log.statistics().wal_bytes)
            made = log.statistics()
            log.close()
        row = [*both(times), max(times), made.checkpoint_max_ns / 1e9]
        table.append(
            [f"{size >> 20} MB", str(made.checkpoints), f"{largest / 1e6:.1f}", *(f"{v * 1e3:.1f}" for v in row)]
        )
    show(
        "appends and checkpoints on one thread (ms)",
        ["checkpoint at", "checkpoints", "largest WAL, MB", "p50", "p99", "longest append", "longest checkpoint"],
        table,
    )


def replay(folder: Path) -> None:
    """Reading a topic from its beginning, by how it was written."""
    table = []
    for group in GROUPS:
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            log = Log.open(Path(fresh))
            total = min(100_000, group * 2_000)
            for _ in range(0, total, group):
                log.append_nowait("a", RECORDS[:group], lambda _: None)
                if group < 1_000:
                    log.call()  # no larger groups than these
            log.call()
            began, at = time.perf_counter(), 0
            while found := log.read("a", at, limit=10_000, max_bytes=4 << 20):
                at += len(found)
            seconds = time.perf_counter() - began
            log.close()
            began = time.perf_counter()
            Log.open(Path(fresh)).close()
            opened = time.perf_counter() - began
        table.append([str(group), f"{at:,}", f"{at / seconds:,.0f}", f"{opened * 1e3:.0f}"])
    show("replay", ["messages a commit", "messages", "messages/s", "open and close, ms"], table)


def flushes() -> int:
    """Flush requests that the kernel's disks completed."""
    path = Path("/proc/diskstats")
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(int(line.split()[18]) for line in lines if len(line.split()) > 18)


def high(times: list[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * 0.99))]


def both(times: list[float]) -> tuple[float, float]:
    return statistics.median(times), high(times)


ALL = {run.__name__: run for run in (layouts, files, appends, publishers, checkpoints, replay)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.log", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which: {', '.join(ALL)} (default: all)")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in ALL]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}: choose from {', '.join(ALL)}")
    print(f"{host.describe(0)}; SQLite {sqlite3.sqlite_version}")
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="srtm-bench-") as folder:
        for name in options.names or ALL:
            ALL[name](Path(folder))


if __name__ == "__main__":
    main()
