"""A trace of which a task holds all rows: jobs over it run in that task, without Spark, and give the same result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from srtm.pipeline.traces.files import counting
from srtm.pipeline.traces.parts import PART_FIELDS, joined
from srtm.pipeline.traces.stretches import BEGINNING
from srtm.pipeline.traces.topics import Topics

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from srtm.pipeline.traces.batches import Batches, Work
    from srtm.pipeline.traces.topics import Faults


class Held:
    """The batches of a stretch that is the whole trace."""

    tasks = 1

    def __init__(self, batches: Batches, key: str = "arrival_ns") -> None:
        self._batches, self._key = list(batches), key

    def topics(self) -> tuple[Topics, Faults]:
        """The topics, and those that cannot be judged."""
        return Topics.total(joined(self.run(counting(self._key), PART_FIELDS, ("topic",)))["topics"]).judged()

    def run(
        self, work: Work, fields: str, columns: Sequence[str], *, before_ns: int = 0, at: Iterable[int] | None = None
    ) -> pa.Table:
        """What the work yields over the stretch, which nothing precedes."""
        del fields, columns, before_ns, at
        found = list(work(BEGINNING, iter(self._batches)))
        return pa.Table.from_batches(found) if found else pa.table({})
