"""The topics of a trace as columns: their names in order, and what the trace holds of each.

A topic's number is its place among the names. Tasks and driver speak of topics by number; the names travel once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from srtm.errors import SRTMError, TraceError
from srtm.model import scan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from srtm.pipeline.traces.batches import Ints
    from srtm.pipeline.traces.stretches import Span

    Indices = NDArray[np.int32]
    Faults = dict[str, tuple[int, str]]  # topics that cannot be judged: their messages, and what is wrong


class Topics(NamedTuple):
    """Topics in order of name: messages, and the first and last time of each."""

    names: pa.StringArray
    messages: Ints
    first_ns: Ints
    last_ns: Ints

    @classmethod
    def total(cls, rows: pa.Table) -> Topics:
        """The topics of rows (topic, messages, first_ns, last_ns), of which a topic may have several."""
        sums = [("messages", "sum"), ("first_ns", "min"), ("last_ns", "max")]
        found = rows.group_by("topic").aggregate(sums).sort_by("topic").combine_chunks()
        names = found["topic"].combine_chunks()
        return cls(names, *(found[f"{name}_{how}"].to_numpy() for name, how in sums))

    @classmethod
    def of(cls, spans: Mapping[str, Span]) -> Topics:
        """The topics that have these spans."""
        columns = zip(*((topic, *span) for topic, span in spans.items()), strict=True) if spans else ((),) * 4
        kinds = (pa.string(), pa.int64(), pa.int64(), pa.int64())
        arrays = [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
        return cls.total(pa.table(arrays, names=["topic", "messages", "first_ns", "last_ns"]))

    def __len__(self) -> int:
        """How many topics there are."""
        return len(self.names)

    def only(self, chosen: NDArray[np.bool_]) -> Topics:
        """Some of the topics, numbered anew."""
        return Topics(self.names.filter(pa.array(chosen)), *(column[chosen] for column in self[1:]))

    def numbered(self, column: pa.DictionaryArray) -> Indices:
        """The number of each row's topic; −1 if it is not one of these."""
        known = pc.fill_null(pc.index_in(column.dictionary, value_set=self.names), -1).to_numpy()
        if len(known) == 1 and not column.null_count:
            return np.full(len(column), known[0], np.int32)
        numbers: Indices = np.append(known, np.int32(-1))[pc.fill_null(column.indices, -1).to_numpy()]
        return numbers

    def counts(self) -> dict[str, int]:
        """The messages of each topic by name."""
        return dict(zip(self.names.to_pylist(), self.messages.tolist(), strict=True))

    def judged(self) -> tuple[Topics, Faults]:
        """The topics that have a name and sensible times, and what is wrong with the others."""
        good = (self.first_ns >= scan.EARLIEST_NS) & (self.last_ns <= scan.LATEST_NS)
        good &= pc.not_equal(self.names, "").to_numpy(zero_copy_only=False)
        if good.all():
            return self, {}
        faults = {}
        for number in np.flatnonzero(~good).tolist():
            name, messages = self.names[number].as_py(), int(self.messages[number])
            try:
                if not name:
                    raise TraceError(unnamed(messages))
                scan.check_range(int(self.first_ns[number]), int(self.last_ns[number]))
            except SRTMError as error:
                faults[name] = messages, str(error)
        return self.only(good), faults


def unnamed(messages: int) -> str:
    """What is wrong with messages without a topic."""
    return f"{messages} messages have no topic, or an empty name for one: give them a topic, or leave them out"
