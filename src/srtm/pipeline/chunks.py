"""What tasks and driver say to each other about topics that are scanned in pieces. No Spark in here.

A task turns a stretch of one topic's sorted arrivals into a `Part`: the summary that joins with its neighbours', and a
histogram of backlogs. The driver joins the parts of a topic in order of time, which gives the state that each of them
really starts from.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from srtm.errors import SRTMError
from srtm.model import scan
from srtm.model.bucket import TokenBucket
from srtm.units import NANO_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

PART_FIELDS = (
    "topic string, number long, messages long, first_ns long, last_ns long, backlog long,"
    " counts binary, publishers array<string>, error string"
)
_ARROW = pa.schema(
    [
        ("topic", pa.string()),
        ("number", pa.int64()),
        ("messages", pa.int64()),
        ("first_ns", pa.int64()),
        ("last_ns", pa.int64()),
        ("backlog", pa.int64()),
        ("counts", pa.binary()),
        ("publishers", pa.list_(pa.string())),
        ("error", pa.string()),
    ]
)


class Part(NamedTuple):
    """A stretch of a topic: its chunk, its histogram as bytes of int64, who sent it; or why it could not be scanned."""

    topic: str
    number: int = 0
    messages: int = 0
    first_ns: int = 0
    last_ns: int = 0
    backlog: int = 0
    counts: bytes = b""
    publishers: tuple[str, ...] = ()
    error: str | None = None

    @property
    def chunk(self) -> scan.Chunk:
        """The summary that joins with its neighbours'."""
        return scan.Chunk(self.messages, self.first_ns, self.last_ns, self.backlog)

    @property
    def histogram(self) -> Ints:
        """How many messages need so many tokens."""
        return np.frombuffer(self.counts, np.int64)


def as_batch(parts: Iterable[Part]) -> pa.RecordBatch:
    """Parts on their way from a task to the driver."""
    return pa.RecordBatch.from_pylist([part._asdict() for part in parts], _ARROW)


def as_parts(table: pa.Table) -> list[Part]:
    """Parts as the driver gets them."""
    return [Part(**row) for row in table.to_pylist()]


def by_topic(parts: Iterable[Part]) -> Iterator[tuple[str, list[Part]]]:
    """The parts of each topic in order of time."""
    ordered = sorted(parts, key=lambda part: (part.topic, part.first_ns, part.last_ns, part.number))
    for topic, its_parts in groupby(ordered, key=lambda part: part.topic):
        yield topic, list(its_parts)


def entering_states(parts: Iterable[Part], rates: Mapping[str, int]) -> list[tuple[Part, scan.State]]:
    """The parts that start with work left over from before them, each with the state that it starts from."""
    states = []
    for topic, its_parts in by_topic(parts):
        if any(part.error for part in its_parts):
            continue
        law = scanned_at(rates[topic]).law
        state: scan.State | None = None
        for part in its_parts:
            if state and state.backlog > law.rate * (part.first_ns - state.last_ns):
                states.append((part, state))
            state = part.chunk.leave(state, law)
    return states


def scanned_at(r_mtps: int) -> TokenBucket:
    """The bucket that a topic is scanned with: only its rate matters, for U does not depend on b."""
    return TokenBucket(r_mtps, NANO_PER_TOKEN)


def add_counts(one: Ints, other: Ints) -> Ints:
    """Sum of two histograms of different lengths."""
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    total = longer.copy()
    total[: len(shorter)] += shorter
    return total


def scanning(
    rates: Mapping[str, int], entering: Mapping[tuple[str, int], scan.State]
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A task over batches of (topic, arrival_ns), sorted by both: one part a topic, state carried from batch to batch.

    `entering` says what a part starts from, if it is known; without it, the part is scanned as if nothing came before.
    """

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        part: Part | None = None
        state: scan.State | None = None
        counts = np.zeros(1, np.int64)
        for topic, times in _stretches(batches):
            if part is None or part.topic != topic:
                if part is not None:
                    yield as_batch([_closed(part, counts, state)])
                part, counts = Part(topic, first_ns=int(times[0])), np.zeros(1, np.int64)
                state = entering.get((topic, part.first_ns))
            if part.error:
                continue
            try:
                more, state = scan.backlog_histogram(times, scanned_at(rates[topic]), state)
            except SRTMError as error:
                part = part._replace(error=str(error))
                continue
            counts = add_counts(counts, more)
            part = part._replace(messages=part.messages + len(times))
        if part is not None:
            yield as_batch([_closed(part, counts, state)])

    return run


def _stretches(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, Ints]]:
    """Runs of rows of one topic."""
    for batch in batches:
        topics = batch.column("topic").dictionary_encode()
        codes, times = topics.indices.to_numpy(), batch.column("arrival_ns").to_numpy()
        ends = [*(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
        begin = 0
        for end in ends:
            if end > begin:
                yield topics.dictionary[int(codes[begin])].as_py(), times[begin:end]
            begin = end


def _closed(part: Part, counts: Ints, state: scan.State | None) -> Part:
    if state is None:
        return part
    return part._replace(last_ns=state.last_ns, backlog=state.backlog, counts=counts.tobytes())
