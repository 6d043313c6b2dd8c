"""Topics brought together: all messages of a lot of topics in one task, wherever in the trace they are.

Tasks read the stretches of the trace, number topics and publishers, and deal the messages to lots, 12 bytes each; Spark
brings the parts of a lot together. A lot has about equally many messages; a larger topic is a lot of its own.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import pyarrow as pa

from srtm.model import fleet
from srtm.pipeline.traces.parts import packed, table_of, unpacked
from srtm.pipeline.traces.tasks import by_lot
from srtm.workload.gathered import Rows, Senders, arrivals_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from srtm.pipeline.traces.batches import Batches, Ints, Work
    from srtm.pipeline.traces.files import Files
    from srtm.pipeline.traces.frames import Frame
    from srtm.pipeline.traces.topics import Topics
    from srtm.workload.gathered import TopicArrivals

COLUMNS = ("topic", "publisher", "group", "arrival_ns")
_FIELDS = "lot long, part string, rows binary"
_LOTS = 8  # for each task that runs at a time: some are heavier than others
_SMALLEST, _LARGEST = 10_000, 4_000_000  # messages
_AT_ONCE = 500_000  # messages of a batch
_NOTHING = np.empty(0, np.int32), np.empty(0, np.int64)


def over_topics(
    source: Files | Frame, topics: Topics, work: Callable[[TopicArrivals], Any]
) -> Iterator[tuple[str, Any]]:
    """Each of these topics with what the work makes of it, in no order; work and results are pickled."""
    lots = _lots(topics.messages, source.at_once)

    def run(received: pa.Table) -> pa.Table:
        found = [pickle.dumps((topic.topic, work(topic))) for topic in _topics_of(received)]
        return pa.table({"found": pa.array(found, pa.binary())})

    rows = source.map(_dealing(topics, lots), _FIELDS, COLUMNS)
    found = by_lot(rows, int(lots.max(initial=0)) + 1).applyInArrow(run, "found binary").toArrow()
    for row in found["found"].to_pylist() if found.num_rows else ():
        yield pickle.loads(row)


def _lots(messages: Ints, at_once: int) -> Ints:
    """The lot of each topic."""
    size = min(_LARGEST, max(_SMALLEST, int(messages.sum()) // (_LOTS * at_once)))
    lots: Ints = (np.cumsum(messages) - messages) // size
    return lots


def _dealing(topics: Topics, lots: Ints) -> Work:
    def work(_: int, batches: Batches) -> Batches:
        senders, task, lot_of = Senders(), uuid4().hex, lots[:0]
        count = int(lots.max(initial=0)) + 1
        for batch in _short(batches):
            known = topics.numbered(batch.column("topic")) >= 0
            rows = senders.numbered(batch if known.all() else batch.filter(pa.array(known)))
            lot_of = lots[topics.numbered(senders.topic_names.dictionary_encode())][senders.topics]
            dealt = fleet.dealt(*_NOTHING, lot_of.astype(np.int32)[rows.senders], rows.times, rows.senders, 0, count)
            for lot, begin, end in zip(dealt.topics.tolist(), dealt.begins.tolist(), dealt.ends.tolist(), strict=True):
                mine = table_of(sender=dealt.senders[begin:end], at_ns=dealt.times[begin:end])
                yield from _addressed(lot, task, mine)
        table = senders.table().append_column("sender", pa.array(np.arange(len(senders.topics), dtype=np.int32)))
        for lot in np.unique(lot_of).tolist():
            yield from _addressed(lot, f"{task} senders", table.filter(pa.array(lot_of == lot)))

    return work


def _short(batches: Batches) -> Batches:
    """The same rows in shorter batches, which take less memory to number and to deal."""
    for batch in batches:
        pa.default_memory_pool().release_unused()  # what reading and sorting left behind
        for begin in range(0, batch.num_rows, _AT_ONCE):
            yield batch.slice(begin, _AT_ONCE)


def _addressed(lot: int, part: str, table: pa.Table) -> Batches:
    for batch in packed({part: table}):
        to = pa.array(np.full(batch.num_rows, lot))
        yield pa.RecordBatch.from_arrays([to, *batch.columns], ["lot", *batch.schema.names])


def _topics_of(received: pa.Table) -> list[TopicArrivals]:
    """The topics of a lot, from what all tasks have dealt to it."""
    senders, rows = dict[str, list[pa.Table]](), defaultdict[str, list[Rows]](list)
    for name, table in unpacked(received):
        task, _, kind = name.partition(" ")
        if kind:
            senders.setdefault(task, []).append(table)
        else:
            rows[task].append(Rows(table["sender"].to_numpy(), table["at_ns"].to_numpy()))
    parts = []
    for task, tables in senders.items():
        table = pa.concat_tables(tables)
        numbers = table["sender"].to_numpy()  # those of the whole task, of which a lot has some
        places = np.zeros(int(numbers.max()) + 1, np.int32)
        places[numbers] = np.arange(len(numbers), dtype=np.int32)
        mine = [Rows(places[each.senders], each.times) for each in rows.pop(task, [])]
        parts.append((table.drop_columns(["sender"]), mine))
    return arrivals_of(parts)
