"""One topic in one stretch, as a task scans it, and how the driver joins stretches. No Spark in here.

A task scans a stretch as if nothing came before it and sums it up in a `TopicStretch` for each topic. The driver joins
those of a topic in order of time, which gives the state that each of them really starts from. A state that is not
empty changes the histogram, but only until the queue has been empty once both with it and without it. Stretches bring
their first arrivals along, so the driver can mostly correct them itself (`corrected`); otherwise tasks read again
(`correcting`).
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from srtm.errors import SRTMError
from srtm.model import burst, scan
from srtm.model.bucket import TokenBucket
from srtm.pipeline.traces.batches import batch_of, by_topic
from srtm.units import NANO_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import NDArray

    from srtm.pipeline.traces.batches import Batches, Ints, Work

    Both = tuple[scan.State, scan.State]  # behind a stretch: after what came before it, and alone

STRETCH_FIELDS = (
    "topic string, messages long, first_ns long, last_ns long, backlog long,"
    " counts binary, envelope binary, batches binary, beginning binary, error string"
)
SCAN_FIELDS = f"{STRETCH_FIELDS}, publishers binary, names array<string>"
_NOTHING = np.zeros(1, np.int64)


class TopicStretch(NamedTuple):
    """One topic in one stretch: its summary, and its numbers as bytes of int64."""

    topic: str
    messages: int = 0
    first_ns: int = 0
    last_ns: int = 0
    backlog: int = 0
    counts: bytes = b""
    envelope: bytes = b""
    batches: bytes = b""
    beginning: bytes = b""
    error: str | None = None

    @property
    def summary(self) -> scan.Summary:
        """The summary that joins with its neighbours'."""
        return scan.Summary(self.messages, self.first_ns, self.last_ns, self.backlog)


def as_batch(stretches: Iterable[TopicStretch]) -> pa.RecordBatch:
    """Stretches as a task sends them to the driver."""
    return batch_of(STRETCH_FIELDS, list(stretches))


def as_stretches(table: pa.Table) -> list[TopicStretch]:
    """Stretches as the driver receives them."""
    columns = [table[name].to_pylist() for name in TopicStretch._fields] if table.num_rows else []
    return [TopicStretch(*row) for row in zip(*columns, strict=True)]


def publishers_by_topic(table: pa.Table) -> dict[str, int]:
    """How many publishers each topic has over all its stretches.

    Stretches refer to publishers by number. The first row of every task brings the names of its numbers: there may be
    millions of pairs of topic and publisher, but only a few thousand names.
    """
    known: dict[str, int] = {}
    found: dict[str, Ints] = {}
    meaning = np.empty(0, np.int64)
    columns = (table[name].to_pylist() for name in ("topic", "publishers", "names"))
    for topic, publishers, names in zip(*columns, strict=True):
        if names is not None:
            meaning = np.array([known.setdefault(name, len(known)) for name in names], np.int64)
        numbers = meaning[np.frombuffer(publishers, np.int32)]
        found[topic] = np.union1d(found[topic], numbers) if topic in found else numbers
    return {topic: len(numbers) for topic, numbers in found.items()}


def stretches_by_topic(stretches: Iterable[TopicStretch]) -> dict[str, list[TopicStretch]]:
    """The stretches of each topic in order of time."""
    ordered = sorted(stretches, key=lambda each: (each.topic, each.first_ns, each.last_ns))
    return {topic: list(its_own) for topic, its_own in groupby(ordered, key=lambda each: each.topic)}


def entering_states(stretches: Iterable[TopicStretch], rates: Mapping[str, int]) -> dict[tuple[str, int], scan.State]:
    """The state that a stretch starts from, by topic and first time, if it has a backlog then."""
    states = {}
    for topic, its_own in stretches_by_topic(stretches).items():
        if any(stretch.error for stretch in its_own):
            continue
        law = scanned_at(rates[topic]).law
        state: scan.State | None = None
        for stretch in its_own:
            if state and state.backlog > law.rate * (stretch.first_ns - state.last_ns):
                states[topic, stretch.first_ns] = state
            state = stretch.summary.leave(state, law)
    return states


def scanned_at(r_mtps: int) -> TokenBucket:
    """The bucket that a topic is scanned with; only its rate matters, as U does not depend on b."""
    return TokenBucket(r_mtps, NANO_PER_TOKEN)


def add_counts(one: Ints, other: Ints) -> Ints:
    """Sum of two histograms of different lengths."""
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    total = longer.copy()
    total[: len(shorter)] += shorter
    return total


def scanning(rates: Mapping[str, int], kept: int) -> Work:
    """Work over batches of (topic, publisher, arrival_ns): a TopicStretch per topic, as if nothing came before it.

    The first `kept` messages of the stretch go to the driver too.
    """

    def work(begin_ns: int, batches: Batches) -> Batches:
        topics: dict[str, _Scan] = {}
        names = _Names()
        left = kept
        for batch in batches:
            numbers = names.numbers(batch.column("publisher"))
            until_ns = _nth(batch, left)
            left = max(0, left - batch.num_rows)
            for topic, rows in by_topic(batch):
                if topic not in topics:
                    topics[topic] = _Scan(scanned_at(rates[topic]))
                times, senders = rows.column("arrival_ns").to_numpy(), rows.column("publisher").indices.to_numpy()
                begin, end = np.searchsorted(times, [max(begin_ns, -(2**63)), until_ns]).tolist()
                topics[topic].add(times, senders, numbers, begin, end)
        found = {topic: scan for topic, scan in topics.items() if scan.messages or scan.error}
        sent = as_batch(scan.summed_up(topic) for topic, scan in found.items())
        publishers = pa.array([scan.publishers.astype(np.int32).tobytes() for scan in found.values()], pa.binary())
        listed = pa.array([names.all, *[None] * (len(found) - 1)][: len(found)], pa.list_(pa.string()))
        columns = [*sent.columns, publishers, listed]
        yield pa.RecordBatch.from_arrays(columns, [*sent.schema.names, "publishers", "names"])

    return work


class _Names:
    """Numbers for names, consistent over all batches of a task."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def numbers(self, column: pa.DictionaryArray) -> Ints:
        """The number of each name of the column's dictionary."""
        known = self._known
        return np.array([known.setdefault(name, len(known)) for name in column.dictionary.to_pylist()], np.int64)

    @property
    def all(self) -> list[str]:
        """The names by their numbers."""
        return list(self._known)


class _Scan:
    """One topic, as far as a task has read it."""

    def __init__(self, bucket: TokenBucket) -> None:
        self._bucket = bucket
        self._counts = self._batches = _NOTHING
        self._state: scan.State | None = None
        self._envelope = burst.Envelope()
        self.publishers = np.empty(0, np.int64)
        self._beginning: list[Ints] = []
        self._first_ns = 0
        self.messages = 0
        self.error: str | None = None

    def add(self, times: Ints, senders: NDArray[np.int32], numbers: Ints, begin: int, kept: int) -> None:
        """Take arrivals in order; those before `begin` belong to the stretch before and only fill its last windows.

        Arrivals from there up to `kept` are the beginning that goes to the driver.
        """
        if self.error:
            return
        if kept > begin:
            self._beginning.append(times[begin:kept])
        if begin:
            self._envelope.add(times[:begin])
            times, senders = times[begin:], senders[begin:]
        if not len(times):
            return
        try:
            counts, self._state = scan.backlog_histogram(times, self._bucket, self._state)
        except SRTMError as error:
            self.error = str(error)
            return
        if not self.messages:
            self._first_ns = int(times[0])
        self.messages += len(times)
        self._counts = add_counts(self._counts, counts)
        sizes, present = burst.batches(times, senders, len(numbers))
        self._batches = add_counts(self._batches, sizes)
        self._envelope.add(times)
        used = numbers[present]
        self.publishers = np.union1d(self.publishers, used) if len(self.publishers) else used

    def summed_up(self, topic: str) -> TopicStretch:
        """What goes to the driver."""
        if self.error or self._state is None:
            return TopicStretch(topic, error=self.error)
        return TopicStretch(
            topic,
            self.messages,
            self._first_ns,
            self._state.last_ns,
            self._state.backlog,
            self._counts.tobytes(),
            self._envelope.most.tobytes(),
            self._batches.tobytes(),
            b"".join(some.tobytes() for some in self._beginning),
        )


def _nth(batch: pa.RecordBatch, number: int) -> int:
    """The time of message `number`, at which a beginning ends; the end of time if there are fewer."""
    if number >= batch.num_rows:
        return 2**63 - 1
    return int(np.partition(batch.column("arrival_ns").to_numpy(), number)[number]) if number else -(2**63)


def corrected(stretch: TopicStretch, bucket: TokenBucket, entering: scan.State) -> TopicStretch | None:
    """What the state before a stretch changes in its histogram; None if its beginning is too short to tell."""
    times = np.frombuffer(stretch.beginning, np.int64)
    if not len(times):
        return None
    try:
        more, filled = scan.backlog_histogram(times, bucket, entering)
    except SRTMError as error:
        return TopicStretch(stretch.topic, error=str(error))
    less, empty = scan.backlog_histogram(times, bucket)
    if filled != empty and len(times) < stretch.messages:
        return None
    return TopicStretch(stretch.topic, counts=add_counts(more, -less).tobytes())


def correcting(rates: Mapping[str, int], entering: Mapping[tuple[str, int], scan.State]) -> Work:
    """Work over batches of (topic, arrival_ns): what the state before a stretch changes in its histogram."""

    def work(_: int, batches: Batches) -> Batches:
        changed: dict[str, Ints] = {}
        errors: dict[str, str] = {}

        def proceed(topic: str, times: Ints, after: scan.State, alone: scan.State | None) -> Both | None:
            bucket = scanned_at(rates[topic])
            try:
                more, filled = scan.backlog_histogram(times, bucket, after)
            except SRTMError as error:
                errors[topic] = str(error)
                return None
            less, empty = scan.backlog_histogram(times, bucket, alone)
            changed[topic] = add_counts(changed.get(topic, _NOTHING), add_counts(more, -less))
            return filled, empty

        until_rejoined(batches, "arrival_ns", entering, proceed)
        yield as_batch(
            [TopicStretch(topic, counts=counts.tobytes()) for topic, counts in changed.items()]
            + [TopicStretch(topic, error=error) for topic, error in errors.items()]
        )

    return work


def until_rejoined(
    batches: Batches,
    key: str,
    entering: Mapping[tuple[str, int], scan.State],
    proceed: Callable[[str, Ints, scan.State, scan.State | None], Both | None],
) -> None:
    """Follow stretches both from the state before them and from none, as long as that makes a difference.

    `proceed` takes a topic's next times and both states, and returns the states behind them, or None to give up.
    """
    awaited = {topic for topic, _ in entering}
    states: dict[str, tuple[scan.State, scan.State | None] | None] = {}
    for batch in batches:
        for topic, rows in by_topic(batch):
            times = rows.column(key).to_numpy()
            if topic not in states:
                start = entering.get((topic, int(times[0])))
                states[topic] = (start, None) if start else None
            before = states[topic]
            if before is not None:
                both = proceed(topic, times, *before)
                states[topic] = None if both is None or both[0] == both[1] else both
        if awaited <= states.keys() and not any(states.values()):
            break  # nothing after this can differ


def widening(begin_ns: int, batches: Batches) -> Batches:
    """Work over batches of (topic, arrival_ns): only the envelope."""
    del begin_ns
    envelopes: dict[str, burst.Envelope] = {}
    for batch in batches:
        for topic, rows in by_topic(batch):
            envelopes.setdefault(topic, burst.Envelope()).add(rows.column("arrival_ns").to_numpy())
    yield as_batch(TopicStretch(topic, envelope=found.most.tobytes()) for topic, found in envelopes.items())
