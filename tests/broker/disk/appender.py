"""Appends, says what was acknowledged, and is killed: `python -m tests.broker.disk.appender FOLDER SEED`.

A line `A topic first count begin` says that messages numbered begin, begin + 1, … are durable at offsets first,
first + 1, …; `F offset` that the offset is about to be finished by the channel; `T before` that topic t0 is about to be
trimmed.
"""

from __future__ import annotations

import os
import random
import sys
import time
from functools import partial
from pathlib import Path

from srtm.broker.disk.batch import Record
from srtm.broker.disk.log import Log
from srtm.errors import SRTMError


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # one write, so that a kill leaves whole lines


def acknowledge(topic: str, count: int, begin: int, result: int | SRTMError) -> None:
    assert isinstance(result, int), result
    say(f"A {topic} {result} {count} {begin}")


def main(folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    log = Log.open(folder)
    numbers = {f"t{i}": log.end(f"t{i}") for i in range(3)}
    cursor = log.cursor("t0", "c", start=0)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        topic = chance.choice(list(numbers))
        count, size = chance.choice([1, 3, 50]), chance.choice([0, 20, 3_000])
        begin = numbers[topic]
        numbers[topic] += count
        records = [
            Record(number.to_bytes(16, "big"), number, f"p{number % 5}", bytes(size))
            for number in range(begin, begin + count)
        ]
        log.append_nowait(topic, records, partial(acknowledge, topic, count, begin))
        if cursor.low < log.end("t0") and chance.random() < 0.5:
            say(f"F {cursor.low}")
            cursor.finish(cursor.low)
        if chance.random() < 0.05:
            log.save_cursors()
        if chance.random() < 0.02:
            say(f"T {cursor.low}")
            log.trim("t0", cursor.low)
        if log.statistics().waiting > 500:
            time.sleep(0.001)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
