"""Penalty and conformance of recorded runs equal the model, for any files, partitions and order of rows."""

from __future__ import annotations

import tempfile
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srtm.errors import InputError
from srtm.model import penalty as model
from srtm.model import timeline
from srtm.model.bucket import TokenBucket
from srtm.model.timeline import Timeline
from srtm.pipeline.conformance import TopicConformance, conformance, conformance_frame
from srtm.pipeline.penalty import Cost, TopicPenalty, Waits, Window, penalty, penalty_frame
from srtm.pipeline.traces import files, quantiles, reading, stretches
from srtm.units import percentiles
from tests.pipeline.local import LocalSpark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WINDOW_NS = 10**9


class Sent(NamedTuple):
    """A message of a recorded run."""

    topic: str
    broker: str
    arrival_ns: int
    release_ns: int


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Sent], dict[str, Timeline]]:
    """Messages of two topics at three brokers, their releases as they happened to be; and contracts with changes."""
    at, rows = draw(st.integers(-(10**10), 10**10)), []
    for _ in range(draw(st.integers(1, 40))):
        at += draw(st.sampled_from([0, 0, 1, 10**6, 10**8, 10**9, 10**13]))
        waited = draw(st.sampled_from([0, 0, 0, 1, 10**6, 10**9]))
        rows.append(Sent(draw(st.sampled_from("ab")), draw(st.sampled_from("xyz")), at, at + waited))
    buckets = st.builds(TokenBucket.of, st.sampled_from([1, 3, "7.5", 1_000]), st.sampled_from([1, "2.5", 10]))
    times = st.sets(st.sampled_from([row.arrival_ns for row in rows]) | st.integers(at - 10**10, at), max_size=3)
    contracts = {
        topic: Timeline(draw(buckets), tuple((time_ns, draw(buckets)) for time_ns in sorted(draw(times))))
        for topic in "ab"
    }
    return rows, contracts


def expected_conformance(rows: list[Sent], contracts: dict[str, Timeline]) -> list[TopicConformance]:
    lines = []
    for topic in sorted({row.topic for row in rows}):
        times = sorted(row.release_ns for row in rows if row.topic == topic)
        lines.append(TopicConformance(topic, len(times), timeline.largest_excess(times, contracts[topic])))
    return lines


def waits_of(delays: np.ndarray) -> Waits:
    p50, p95, p99 = percentiles(delays, ["0.50", "0.95", "0.99"])
    return Waits(len(delays), int((delays > 0).sum()), sum(delays.tolist()), p50, p95, p99, int(delays.max()))


def expected_penalty(rows: list[Sent], contracts: dict[str, Timeline]) -> list[TopicPenalty]:
    lines = []
    for topic in sorted({row.topic for row in rows}):
        mine = sorted((row for row in rows if row.topic == topic), key=lambda row: (*row[2:], row.broker))
        known = model.recorded([row.arrival_ns for row in mine], [row.release_ns for row in mine], contracts[topic])
        windows = np.array([row.arrival_ns // WINDOW_NS * WINDOW_NS for row in mine])
        brokers = np.array([row.broker for row in mine])

        def costs(
            here: np.ndarray, known: model.Penalty = known, brokers: np.ndarray = brokers
        ) -> tuple[Cost, dict[str, Cost]]:
            def cost(some: np.ndarray) -> Cost:
                return Cost(waits_of(known.split_ns[some]), waits_of(known.one_ns[some]))

            return cost(here), {name: cost(here & (brokers == name)) for name in sorted(set(brokers[here].tolist()))}

        everything = costs(np.ones(len(mine), bool))
        listed = [Window(begin, *costs(windows == begin)) for begin in sorted(set(windows.tolist()))]
        lines.append(TopicPenalty(topic, len(mine), *everything, listed))
    return lines


def table_of(rows: list[Sent]) -> pa.Table:
    return pa.table(
        {
            "topic": pa.array([row.topic for row in rows], pa.string()),
            "publisher": pa.array(["p"] * len(rows), pa.string()),
            "arrival_ns": pa.array([row.arrival_ns for row in rows], pa.int64()),
            "broker": pa.array([row.broker for row in rows], pa.string()),
            "release_ns": pa.array([row.release_ns for row in rows], pa.int64()),
        }
    )


@settings(max_examples=min(100, settings().max_examples))
@given(runs(), st.data())
def test_any_files_give_what_the_model_gives(case: tuple[list[Sent], dict[str, Timeline]], data: st.DataObject) -> None:
    rows, contracts = case
    by_broker = data.draw(st.booleans())
    with tempfile.TemporaryDirectory() as folder:
        for number, broker in enumerate("xyz"):
            its_rows = [row for row in rows if row.broker == broker] if by_broker else rows[number::3]
            if data.draw(st.booleans()):
                its_rows = data.draw(st.permutations(its_rows))
            size = data.draw(st.integers(1, 20))
            pq.write_table(table_of(its_rows), Path(folder, f"{number}.parquet"), row_group_size=size)
        spark = cast("SparkSession", LocalSpark(data.draw(st.integers(1, 5))))
        small = data.draw(st.integers(1, 50))
        with (
            patch.multiple(stretches, _SMALL=0, _REREAD=1000),
            patch.object(files, "_BATCH", small),
            patch.object(quantiles, "SAMPLES", data.draw(st.integers(1, 9))),
        ):
            assert conformance(folder, contracts, spark) == expected_conformance(rows, contracts)
            assert penalty(folder, contracts, spark, window_ns=WINDOW_NS) == expected_penalty(rows, contracts)


@pytest.fixture(scope="module")
def run() -> tuple[list[Sent], dict[str, Timeline]]:
    """A topic over three brokers, each with a third of the bucket; and a topic that breaks its contract."""
    rng = np.random.default_rng(5)
    times = np.sort(np.repeat(rng.integers(0, 60 * 10**9, 300), 10))
    whole, share = TokenBucket.of(60, 30), TokenBucket.of(20, 10)
    rows = []
    for broker, name in enumerate("xyz"):
        mine = times[broker::3]
        released = mine + timeline.access_delays(mine, Timeline(share))
        rows += [Sent("kept", name, at, out) for at, out in zip(mine.tolist(), released.tolist(), strict=True)]
    rows += [Sent("broken", "x", at, at) for at in times.tolist()]
    return rows, {"kept": Timeline(whole), "broken": Timeline(whole)}


def test_spark_gives_what_the_model_gives(
    spark: SparkSession, run: tuple[list[Sent], dict[str, Timeline]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, contracts = run
    shuffled = spark.createDataFrame(table_of(rows)).orderBy("broker").repartition(5)
    verdicts = conformance(shuffled, contracts)
    assert verdicts == expected_conformance(rows, contracts)
    assert [line.conforms for line in verdicts] == [False, True]
    assert [row.conforms for row in conformance_frame(shuffled, contracts).collect()] == [False, True]
    accounts = penalty(shuffled, contracts, window_ns=WINDOW_NS)
    assert accounts == expected_penalty(rows, contracts)
    monkeypatch.setattr(reading, "on_one_machine", lambda _: False)
    assert conformance(shuffled, contracts) == verdicts
    assert penalty(shuffled, contracts, window_ns=WINDOW_NS) == accounts
    kept = accounts[1]
    assert kept.whole is not None
    assert kept.whole.penalty_ns > 0  # Proposition 1
    assert kept.worst(1)[0].whole.penalty_ns == max(window.whole.penalty_ns for window in kept.windows)
    whole = penalty_frame(shuffled, contracts, window_ns=WINDOW_NS).where("topic = 'kept' and broker is null")
    assert whole.where("begin_ns is null").collect()[0]["waited_ns"] == kept.whole.split.total_ns
    assert whole.where("begin_ns is not null").count() == len(kept.windows)
    pq.write_table(table_of(rows).sort_by("release_ns"), tmp_path / "run.parquet", row_group_size=500)
    assert conformance(tmp_path, contracts, spark) == verdicts
    assert penalty(tmp_path, contracts, spark, window_ns=WINDOW_NS) == accounts


def test_one_token_too_many_is_seen_across_stretches(spark: SparkSession, tmp_path: Path) -> None:
    """Five tokens at once and then one a second keep to (1, 5); one message more in the middle does not."""
    times = sorted([0] * 5 + [second * 10**9 for second in range(1, 40)])
    contracts = {"t": Timeline(TokenBucket.of(1, 5))}
    for extra, excess in (([], Fraction(-1, 10**9)), ([20 * 10**9], 1 - Fraction(1, 10**9))):
        rows = [Sent("t", "x", at, at) for at in sorted(times + extra)]
        pq.write_table(table_of(rows), tmp_path / "run.parquet", row_group_size=3)
        with patch.object(stretches, "_SMALL", 0), patch.object(files, "_BATCH", 1):
            [line] = conformance(tmp_path, contracts, spark)
        assert line.excess is not None
        assert line.excess.tokens == excess


def test_what_is_wrong_with_a_topic_stands_in_its_line(spark: SparkSession) -> None:
    rows = [
        Sent("good", "x", 0, 0),
        Sent("early", "x", 5, 4),
        Sent("unknown", "x", 1, 1),
        Sent("absurd", "x", 2**63 - 1, 2**63 - 1),
    ]
    frame = spark.createDataFrame(table_of(rows))
    contracts = dict.fromkeys(("good", "early", "absurd"), Timeline(TokenBucket.of(1, 1)))
    errors = {line.topic: line.error or "" for line in penalty(frame, contracts)}
    assert errors["good"] == ""
    assert "1 of 1 messages were released before they arrived" in errors["early"]
    assert "no contract" in errors["unknown"]
    assert "check the unit" in errors["absurd"]
    verdicts = {line.topic: line for line in conformance(frame, contracts)}
    assert verdicts["good"].conforms
    assert "no contract" in str(verdicts["unknown"].error)
    assert "check the unit" in str(verdicts["absurd"].error)
    with pytest.raises(InputError, match="must be a positive time"):
        penalty(frame, contracts, window_ns=0)
