"""Tasks and driver without Spark: any cut of any topics gives what the model gives."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from srtm.model import scan
from srtm.model.bucket import TokenBucket
from srtm.pipeline.chunks import Part, add_counts, as_parts, by_topic, entering_states, scanned_at, scanning
from tests.strategies import arrivals_for, rates_mtps


@st.composite
def partitioned(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, list[int]], list[list[pa.RecordBatch]]]:
    """Topics at their rates, their arrivals, and these as sorted rows cut into partitions and batches anywhere."""
    rates = {f"t{i}": draw(rates_mtps) for i in range(draw(st.integers(1, 4)))}
    arrivals = {topic: draw(arrivals_for(TokenBucket(rate, 10**9), max_size=30)) for topic, rate in rates.items()}
    rows = [(topic, at) for topic in sorted(arrivals) for at in arrivals[topic]]
    # A range partitioner never parts equal rows.
    places = [i for i in range(1, len(rows)) if rows[i] != rows[i - 1]]
    cuts = sorted(draw(st.sets(st.sampled_from(places), max_size=5))) if places else []
    partitions = []
    for part in np.split(np.arange(len(rows)), cuts):
        batch_cuts = sorted(draw(st.sets(st.integers(0, len(part)), max_size=3)))
        partitions.append(
            [
                pa.record_batch(
                    [
                        pa.array([rows[i][0] for i in piece], pa.string()),
                        pa.array([rows[i][1] for i in piece], pa.int64()),
                    ],
                    names=["topic", "arrival_ns"],
                )
                for piece in np.split(part, batch_cuts)
            ]
        )
    return rates, arrivals, partitions


@given(partitioned())
def test_any_partitioning_gives_the_histogram_of_the_whole(
    case: tuple[dict[str, int], dict[str, list[int]], list[list[pa.RecordBatch]]],
) -> None:
    rates, arrivals, partitions = case

    def run(states: dict[tuple[str, int], scan.State]) -> list[Part]:
        task = scanning(rates, states)
        return [
            part
            for batches in partitions
            for batch in task(batches)
            for part in as_parts(pa.Table.from_batches([batch]))
        ]

    first = run({})
    second = run({(part.topic, part.first_ns): state for part, state in entering_states(first, rates)})
    for topic, parts in by_topic(second):
        counts = np.zeros(1, np.int64)
        for part in parts:
            counts = add_counts(counts, part.histogram)
        whole = scan.backlog_histogram(arrivals[topic], scanned_at(rates[topic]))[0]
        assert np.trim_zeros(counts, "b").tolist() == whole.tolist()
        assert sum(part.messages for part in parts) == len(arrivals[topic])
    assert {part.topic for part in second} == set(arrivals)
