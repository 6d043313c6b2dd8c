"""The durable log on real files: against a dict, beside readers, on full and broken disks, and under kill -9."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srtm.broker.disk.batch import Record
from srtm.broker.disk.file import FILE
from srtm.broker.disk.log import Log, LogOptions, Retention
from srtm.broker.disk.work import Call
from srtm.errors import InputError, LogError, LogFull, OffsetTrimmed, SRTMError
from tests.broker.disk.test_batch import in_rows
from tests.conftest import ROOT

KILLS = int(os.environ.get("SRTM_KILLS", "25"))


def made(begin: int, count: int, size: int = 10) -> list[Record]:
    return [
        Record(n.to_bytes(16, "big"), n, f"p{n % 3}", bytes([n % 256]) * size, None if n % 2 else "g")
        for n in range(begin, begin + count)
    ]


def everything(log: Log, topic: str, limit: int = 1_000) -> list[Record]:
    records: list[Record] = []
    begin = log.begin(topic)
    while piece := log.read(topic, begin + len(records), limit):
        records += piece
    return records


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    opened = Log.open(tmp_path / "log")
    yield opened
    opened.close()


TOPICS = st.sampled_from(["a", "b", "c"])
STEPS = st.one_of(
    st.tuples(st.just("append"), TOPICS, st.integers(1, 40), st.integers(0, 600)),
    st.tuples(st.just("read"), TOPICS, st.integers(0, 60), st.integers(1, 3_000)),
    st.tuples(st.just("trim"), TOPICS, st.integers(0, 80), st.none()),
    st.tuples(st.just("reopen"), TOPICS, st.none(), st.none()),
    st.tuples(st.just("delete"), TOPICS, st.none(), st.none()),
)


@settings(max_examples=min(60, settings().max_examples))
@given(st.lists(STEPS, max_size=25))
def test_any_history_reads_as_a_dict_would(steps: list[tuple[str, str, int, int]]) -> None:
    options = LogOptions(batch_bytes=1_000)
    kept: dict[str, tuple[int, list[Record]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        log = Log.open(Path(folder), options=options)
        for step, topic, number, size in steps:
            begin, records = kept.get(topic, (0, []))
            if step == "append":
                new = made(len(records), number, size)
                assert log.append_wait(topic, new) == len(records)
                kept[topic] = begin, records + new
            elif step == "read" and number < begin:
                with pytest.raises(OffsetTrimmed, match=f"begins at {begin}"):
                    log.read(topic, number)
            elif step == "read" and number <= len(records):
                found = log.read(topic, number, limit=20, max_bytes=size)
                assert found == records[number : number + len(found)]
                assert found or number == len(records)
                assert sum(len(record.body) for record in found[1:]) <= size
                columns = in_rows(log.pieces(topic, number, limit=20, max_bytes=size))
                assert columns == [(record.arrival_ns, record.publisher, record.body) for record in found]
            elif step == "trim":
                log.trim(topic, number)
                log.call()
                kept[topic] = max(begin, min(number, len(records))), records
            elif step == "delete":
                log.delete_topic(topic)
                log.call()
                kept.pop(topic, None)
            elif step == "reopen":
                log.close()
                log = Log.open(Path(folder), options=options)
            for name, (first, stored) in kept.items():
                assert (log.begin(name), log.end(name)) == (first, len(stored))
        for name, (first, stored) in kept.items():
            assert everything(log, name, limit=7) == stored[first:]
        log.check()
        log.close()


def test_reads_outside_of_the_log_say_so(log: Log) -> None:
    log.append_wait("a", made(0, 10))
    assert log.read("a", 10) == []
    assert log.read("unknown", 0) == []
    with pytest.raises(LogError, match="no offset 11: it ends at 10"):
        log.read("a", 11)
    with pytest.raises(InputError, match="at least one"):
        log.append_nowait("a", [], print)


def test_what_cannot_be_stored_fails_alone(log: Log) -> None:
    with pytest.raises(InputError, match="16 bytes"):
        log.append_wait("a", [Record(b"", 0, "p", b"")])
    with pytest.raises(TypeError):
        log.append_wait("a", [Record(bytes(16), 0, "p", None)])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="does not fit"):
        log.append_wait("a", [Record(bytes(16), 1 << 63, "p", b"")])
    assert log.append_wait("a", made(0, 1)) == 0


def test_a_large_backlog_is_several_commits(tmp_path: Path) -> None:
    log = Log.open(tmp_path, options=LogOptions(group_messages=10, group_bytes=1_000))
    release = threading.Event()
    log._work.put(Call(release.wait, print, lambda _: None))
    offsets: list[int | SRTMError] = []
    for number in range(0, 100, 5):
        log.append_nowait("a", made(number, 5), offsets.append)
    assert log.statistics().waiting == 100
    release.set()
    log.call()
    assert offsets == list(range(0, 100, 5))
    assert log.statistics().commits == 10
    log.close()


def test_appends_of_one_turn_are_one_commit(tmp_path: Path) -> None:
    async def publish() -> tuple[list[int], int]:
        log = Log.open(tmp_path, asyncio.get_running_loop())
        await log.append("a", made(0, 1))
        before = log.statistics().commits
        offsets = await asyncio.gather(*(log.append("a", made(n, 2)) for n in range(1, 401, 2)))
        commits = log.statistics().commits - before
        assert log.statistics().waiting == 0
        log.close()
        return offsets, commits

    offsets, commits = asyncio.run(publish())
    assert offsets == list(range(1, 401, 2))
    assert commits < 100


def test_readers_see_a_growing_prefix(log: Log) -> None:
    failures: list[str] = []
    done = threading.Event()

    def follow() -> None:
        at = 0
        while not (done.is_set() and at == log.end("a")):
            found = log.read("a", at, limit=64)
            if not found:
                time.sleep(0.001)
            for record in found:
                if record.arrival_ns != at:
                    failures.append(f"{record.arrival_ns} at {at}")
                    return
                at += 1

    readers = [threading.Thread(target=follow) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(0, 3_000, 30):
        log.append_wait("a", made(number, 30, size=200))
    done.set()
    for reader in readers:
        reader.join(20)
    assert not failures
    assert not any(reader.is_alive() for reader in readers)


def test_channels_resume_after_what_they_finished(tmp_path: Path) -> None:
    log = Log.open(tmp_path)
    log.append_wait("a", made(0, 10))
    cursor = log.cursor("a", "c", start=2)
    for offset in (2, 3, 5, 9):
        cursor.finish(offset)
    late = log.cursor("a", "late")
    log.close()
    log = Log.open(tmp_path)
    assert list(log.cursor("a", "c").unfinished(10)) == [(4, 5), (6, 9)]
    assert log.cursor("a", "late").low == late.low == 10
    log.delete_channel("a", "c")
    log.close()
    log = Log.open(tmp_path)
    assert [cursor.channel for cursor in log.cursors("a")] == ["late"]
    log.delete_topic("a")
    log.close()
    log = Log.open(tmp_path)
    assert (log.topics, log.cursors("a")) == ([], [])
    log.close()


def test_a_new_channel_is_durable_with_the_next_append(tmp_path: Path) -> None:
    log = Log.open(tmp_path / "live", options=LogOptions(save_s=1_000))
    log.append_wait("a", made(0, 3))
    log.cursor("a", "c")
    log.append_wait("a", made(3, 3))
    shutil.copytree(tmp_path / "live", tmp_path / "copy")  # as a kill would leave it
    log.close()
    copy = Log.open(tmp_path / "copy")
    assert [(cursor.channel, cursor.low) for cursor in copy.cursors("a")] == [("c", 3)]
    copy.close()


def test_retention_by_acknowledgement_size_and_age(log: Log) -> None:
    for number in range(0, 100, 10):
        log.append_wait("a", made(number, 10, size=1_000))
    first, second = log.cursor("a", "1", start=0), log.cursor("a", "2", start=0)
    for offset in range(35):
        first.finish(offset)
        second.finish(offset)
    second.finish(35)
    log.retain("a", Retention(acknowledged=True), 0)
    log.call()
    assert log.begin("a") == 35
    log.retain("a", Retention(max_age_ns=30), now_ns=80)  # arrival times are the numbers
    log.call()
    assert log.begin("a") == 50
    log.retain("a", Retention(max_bytes=25_000), 0)
    log.call()
    assert log.begin("a") == 80
    log.call()
    assert log.size("a") <= 25_000
    assert log.read("a", 80)[0].arrival_ns == 80
    assert first.skip_to(log.begin("a")) == 45


def test_trimmed_space_is_used_again(log: Log, tmp_path: Path) -> None:
    def grown() -> int:
        for number in range(100):
            log.append_wait("a", made(number, 10, size=1_000))
        log.trim("a", log.end("a"))
        time.sleep(0.05)
        log.call()
        log.call(log._store.checkpoint)
        return (tmp_path / "log" / FILE).stat().st_size

    grown()
    second = grown()
    assert grown() <= second * 1.1


def test_the_write_ahead_log_is_bounded(tmp_path: Path) -> None:
    log = Log.open(tmp_path, options=LogOptions(checkpoint_bytes=100_000, checkpoint_bytes_busy=100_000))
    for number in range(200):
        log.append_wait("a", made(number, 10, size=2_000))
        log.read("a", number)
    assert log.statistics().wal_bytes < 500_000
    assert log.statistics().checkpoints > 10
    log.close()


def test_queues_of_memory_topics_survive_a_stop_until_they_are_dropped_or_saved_again(tmp_path: Path) -> None:
    waiting = [record._replace(attempts=3) for record in made(0, 20, size=1_000_000)]
    log = Log.open(tmp_path)
    log.save_queues([("m", None, waiting), ("m", "c", waiting[:2]), ("m", "d", [])])
    log.close()
    log = Log.open(tmp_path)
    found = log.load_queues()
    assert [record for piece in found[:-1] for record in piece.records] == waiting
    assert {(piece.topic, piece.channel) for piece in found[:-1]} == {("m", None)}
    assert found[-1][1:] == ("m", "c", waiting[:2])
    log.drop_queues([piece.number for piece in found[:-1]])
    assert log.load_queues() == found[-1:]
    log.save_queues([("n", None, waiting[:1])])
    assert [piece[1:] for piece in log.load_queues()] == [("n", None, waiting[:1])]
    log.close()


def test_a_folder_has_one_broker(log: Log, tmp_path: Path) -> None:
    with pytest.raises(LogError, match=f"in use by process {os.getpid()}: give each broker a folder of its own"):
        Log.open(tmp_path / "log")
    log.append_wait("a", made(0, 1))


def test_a_folder_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LogError, match="Not a directory; name a folder"):
        Log.open(tmp_path / "file" / "log")


OPENING = """
import sys
from pathlib import Path
from srtm.broker.disk.log import Log
from srtm.errors import LogError
try:
    Log.open(Path(sys.argv[1])).close()
except LogError as error:
    print(error)
"""


@pytest.mark.processes
def test_what_may_not_be_written_is_refused(tmp_path: Path) -> None:
    """In a user namespace where the tests are root's, who may write everywhere else."""
    powerless = ["unshare", "--user"] if os.geteuid() == 0 else []
    if powerless and (not shutil.which("unshare") or subprocess.run([*powerless, "true"]).returncode):
        pytest.skip("root may write everywhere, and there are no user namespaces")

    def refusal(folder: Path) -> str:
        command = [*powerless, sys.executable, "-c", OPENING, str(folder)]
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout

    file = stored(tmp_path / "log")
    file.chmod(0o400)
    assert "let this user write" in refusal(tmp_path / "log")
    tmp_path.chmod(0o500)
    assert "Permission denied; name a folder" in refusal(tmp_path / "other")
    tmp_path.chmod(0o700)


def test_a_closed_log_says_so(tmp_path: Path) -> None:
    log = Log.open(tmp_path)
    log.close()
    log.close()
    with pytest.raises(LogError, match="is closed"):
        log.append_wait("a", made(0, 1))


def stored(folder: Path) -> Path:
    """A closed log of 300 messages; its file."""
    log = Log.open(folder)
    for number in range(0, 300, 10):
        log.append_wait("a", made(number, 10, size=500))
    log.close()
    return folder / FILE


def overwritten(file: Path) -> None:
    file.write_bytes(b"no database, this " * 1_000)


def halved(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def emptied(file: Path) -> None:
    os.truncate(file, 0)


def last_message_changed(file: Path) -> None:
    data = bytearray(file.read_bytes())
    at = data.rindex(bytes([299 % 256]) * 500)
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [overwritten, halved, emptied, last_message_changed, Path.unlink])
def test_a_damaged_file_is_refused_and_left_alone(damage: object, tmp_path: Path) -> None:
    file = stored(tmp_path)
    damage(file)  # type: ignore[operator]
    left = file.read_bytes() if file.exists() else None
    for _ in range(2):
        with pytest.raises(LogError, match=rf"{file} is (damaged|missing).*restore") as caught:
            Log.open(tmp_path)
        assert caught.value.facts["path"] == str(file)
    assert left == (file.read_bytes() if file.exists() else None)


def test_damage_in_the_middle_is_found_when_it_is_read(tmp_path: Path) -> None:
    file = stored(tmp_path)
    data = bytearray(file.read_bytes())
    data[data.index(bytes([77]) * 500)] ^= 1
    file.write_bytes(data)
    log = Log.open(tmp_path)
    assert len(log.read("a", 0, limit=70)) == 70
    with pytest.raises(LogError, match=r"messages at offset 70 .* are corrupt"):
        log.read("a", 70)
    with pytest.raises(LogError, match="damaged"):
        log.check()
    log.close()


def test_a_foreign_database_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("CREATE TABLE other (x)")
    db.close()
    with pytest.raises(LogError, match="not a log of this version"):
        Log.open(tmp_path)


def test_a_torn_tail_leaves_a_prefix(tmp_path: Path) -> None:
    log = Log.open(tmp_path / "live")
    for number in range(60):
        log.append_wait("a", made(number, 1, size=700))
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    log.close()
    whole = (tmp_path / "killed" / f"{FILE}-wal").stat().st_size
    seen = set()
    chance = random.Random(1)
    for _ in range(12):
        torn = tmp_path / "torn"
        shutil.copytree(tmp_path / "killed", torn)
        os.truncate(torn / f"{FILE}-wal", chance.randrange(whole // 2, whole))
        log = Log.open(torn)
        assert everything(log, "a") == made(0, log.end("a"), size=700)
        seen.add(log.end("a"))
        assert log.append_wait("a", made(0, 1)) == log.end("a") - 1
        log.close()
        shutil.rmtree(torn)
    assert len(seen) > 5


def outcome(log: Log, topic: str, records: list[Record]) -> int | SRTMError:
    try:
        return log.append_wait(topic, records)
    except SRTMError as error:
        return error


def test_a_log_without_room_refuses_and_recovers(log: Log) -> None:
    log.append_wait("a", made(0, 10))
    log.call(lambda: log._store._db.execute("PRAGMA max_page_count = 60").fetchone())
    good = 10
    while isinstance(outcome(log, "a", made(good, 10, size=3_000)), int):
        good += 10
    assert 10 < good < 100
    failed = outcome(log, "new", made(0, 100, size=3_000))
    assert isinstance(failed, LogFull)
    assert "free some of the disk" in str(failed)
    assert log.topics == ["a"]
    assert log.end("a") == good
    log.call(lambda: log._store._db.execute("PRAGMA max_page_count = 1000000").fetchone())
    assert log.append_wait("a", made(good, 10)) == good
    assert log.append_wait("new", made(0, 1)) == 0
    assert [record.arrival_ns for record in everything(log, "a")] == list(range(good + 10))


def test_a_log_that_may_not_be_written_says_so_and_lives(log: Log) -> None:
    log.append_wait("a", made(0, 10))
    log.call(lambda: log._store._db.execute("PRAGMA query_only = ON"))
    failed = outcome(log, "a", made(10, 1))
    assert "let this user write to the folder" in str(failed)
    log.call(lambda: log._store._db.execute("PRAGMA query_only = OFF"))
    assert log.append_wait("a", made(10, 1)) == 10


SMALL = LogOptions(checkpoint_bytes=100_000, checkpoint_bytes_busy=200_000, reserve_bytes=400_000, retry_s=0.2)


@pytest.fixture
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB, or of as many as a parameter says."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={getattr(request, 'param', 2)}m", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.processes
def test_a_full_disk_loses_nothing_acknowledged(small_disk: Path) -> None:
    log = Log.open(small_disk / "log", options=SMALL)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(800_000))
    stored: list[Record] = []
    refused = 0
    for _ in range(300):
        new = made(len(stored), 5, size=1_500)
        result = outcome(log, "a", new)
        if isinstance(result, int):
            assert result == len(stored)
            stored += new
        else:
            assert isinstance(result, LogFull), result
            refused += 1
            if refused == 20:
                break
    assert refused
    assert everything(log, "a") == stored
    filler.unlink()
    assert log.append_wait("a", made(len(stored), 5)) == len(stored)
    stored += made(len(stored), 5)
    log.close()
    log = Log.open(small_disk / "log", options=SMALL)
    assert everything(log, "a") == stored
    log.close()


@pytest.mark.processes
def test_a_disk_that_fills_up_again_and_again(small_disk: Path) -> None:
    """Whoever fills it: the log itself, or another program."""
    log = Log.open(small_disk / "log", options=SMALL)
    filler = small_disk / "filler"
    stored: list[Record] = []
    for turn in range(4):
        refused = 0
        if turn % 2:
            filler.write_bytes(bytes(filled := free(small_disk) - 100_000))
            assert filled > 0
        while refused < 5:
            new = made(len(stored), 5, size=1_500)
            result = outcome(log, "a", new)
            refused += isinstance(result, LogFull)
            if isinstance(result, int):
                stored += new
        assert log.problem is not None
        filler.unlink(missing_ok=True)
        if not turn % 2:
            log.trim("a", len(stored) - 5)
        until(lambda: looked(log) is None)
        new = made(len(stored), 5, size=1_500)
        assert log.append_wait("a", new) == len(stored)
        stored += new
    begin = log.begin("a")
    log.close()
    log = Log.open(small_disk / "log", options=SMALL)
    assert log.begin("a") <= begin
    assert everything(log, "a") == stored[log.begin("a") :]
    log.close()


def free(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def until(holds: Callable[[], object]) -> None:
    ends = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.02)


def looked(log: Log) -> str | None:
    """What is wrong with a log, after it has looked."""
    log.look()
    log.call()
    return log.problem


def removed(folder: Path) -> None:
    shutil.rmtree(folder)


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def replaced(folder: Path) -> None:
    moved(folder)
    shutil.copytree(folder.with_name("elsewhere"), folder)


def without_its_write_ahead_log(folder: Path) -> None:
    (folder / f"{FILE}-wal").unlink()


@pytest.mark.parametrize("lose", [removed, moved, replaced, without_its_write_ahead_log])
def test_a_folder_that_vanishes_is_noticed(lose: Callable[[Path], None], tmp_path: Path) -> None:
    log = Log.open(tmp_path / "log")
    log.append_wait("a", made(0, 10))
    lose(tmp_path / "log")
    until(lambda: looked(log))  # though nobody writes
    for _ in range(2):
        with pytest.raises(LogError, match="was removed, moved or replaced while the broker uses it: put it back"):
            log.append_wait("a", made(10, 1))
    log.close()


def test_a_folder_that_comes_back_is_used_again(tmp_path: Path) -> None:
    log = Log.open(tmp_path / "log")
    log.append_wait("a", made(0, 10))
    moved(tmp_path / "log")
    assert isinstance(outcome(log, "a", made(10, 1)), LogError)
    (tmp_path / "elsewhere").rename(tmp_path / "log")
    assert log.append_wait("a", made(10, 1)) == 10
    assert log.problem is None
    log.close()
    log = Log.open(tmp_path / "log")
    assert everything(log, "a") == made(0, 11)
    log.close()


@pytest.mark.processes
def test_retention_makes_room_on_a_full_disk(small_disk: Path) -> None:
    log = Log.open(small_disk / "log", options=SMALL)
    number = 0
    while isinstance(outcome(log, "a", made(number, 5, size=1_500)), int):
        number += 5
    log.trim("a", number)
    deadline = time.monotonic() + 5
    while isinstance(result := outcome(log, "a", made(number, 5, size=1_500)), SRTMError):
        assert time.monotonic() < deadline, result
        time.sleep(0.02)
    assert result == number
    for _ in range(20):  # and again, in what was freed
        number += 5
        log.append_wait("a", made(number, 5, size=1_500))
        log.trim("a", number)
    log.close()


ONE_BY_ONE = """
import os, sys
from pathlib import Path
from srtm.broker.disk.log import Log, Record
log = Log.open(Path(sys.argv[1]))
for number in range(20):
    os.write(1, b"A %d" % log.append_wait("a", [Record(bytes(16), number, "p", b"x")]))
log.close()
"""


@pytest.mark.processes
def test_the_disk_is_told_to_keep_each_append_before_its_answer(tmp_path: Path) -> None:
    """What no kill can show: the page cache outlives a process."""
    trace = tmp_path / "trace"
    strace = ["strace", "-f", "-o", str(trace), "-e", "trace=write,fsync,fdatasync"]
    if shutil.which("strace") is None or subprocess.run([*strace, "true"], capture_output=True).returncode:
        pytest.skip("needs strace, and the right to use it")
    command = [*strace, sys.executable, "-c", ONE_BY_ONE, str(tmp_path / "log")]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    answers = synced = 0
    for line in trace.read_text().splitlines():
        if "sync" in line and line.endswith("= 0"):  # also "<... fdatasync resumed>"
            synced += 1
        elif 'write(1, "A ' in line:
            assert synced, f"answer {answers} came before its messages were on the disk"
            answers, synced = answers + 1, 0
    assert answers == 20


def killed(folder: Path, chance: random.Random) -> list[str]:
    """Run an appender, kill it at a random point, and give what it said."""
    command = [sys.executable, "-m", "tests.broker.disk.appender", str(folder), str(chance.randrange(1 << 30))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        assert process.stdout is not None
        lines = []
        if chance.random() < 0.85:  # the others may die while they open the log
            lines.append(process.stdout.readline())
        time.sleep(chance.random() ** 2 * 0.25)
        process.kill()
        lines += process.stdout.read().splitlines()
    return [line.strip() for line in lines]


@pytest.mark.processes
def test_killed_at_random_points_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    chance = random.Random(KILLS)
    finished = trimmed = 0
    durable: dict[str, int] = {}
    acknowledged = 0
    for _ in range(KILLS):
        for line in killed(tmp_path, chance):
            kind, *facts = line.split()
            if kind == "A":
                topic, first, count, begin = facts[0], *map(int, facts[1:])
                assert first == begin, line
                durable[topic] = max(durable.get(topic, 0), first + count)
                acknowledged += count
            elif kind == "F":
                finished = max(finished, int(facts[0]) + 1)
            elif kind == "T":
                trimmed = max(trimmed, int(facts[0]))
        log = Log.open(tmp_path)
        for topic, end in durable.items():
            assert log.end(topic) >= end
            numbers = [record.arrival_ns for record in everything(log, topic)]
            assert numbers == list(range(log.begin(topic), log.end(topic)))
        assert log.begin("t0") <= trimmed
        assert all(log.begin(topic) == 0 for topic in ("t1", "t2"))
        assert all(cursor.low <= finished for cursor in log.cursors("t0"))
        log.close()
        if log.end("t1") > 20_000:  # begin again, so that reading everything stays quick
            shutil.rmtree(tmp_path)
            finished = trimmed = 0
            durable.clear()
    assert acknowledged > 10 * KILLS
