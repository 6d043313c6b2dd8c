"""Recorded runs of brokers that lend: Spark judges the topic as a whole, and says what one bucket would have done."""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from srtm.model import penalty as model
from srtm.model.bucket import TokenBucket
from srtm.model.placement import Publisher
from srtm.model.timeline import Timeline, largest_excess
from srtm.pipeline.conformance import conformance
from srtm.pipeline.penalty import penalty
from srtm.workload.publishers import Arrivals
from srtm.workload.trace import Recorded, batches, moved_in
from tests.broker.lending.running import running_lending
from tests.broker.running import Client
from tests.model.lending_driver import ARRIVALS, Cluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from srtm.model.books import Books
    from srtm.model.lending import Rule

SHARE, WHOLE = TokenBucket.of(100, 10), TokenBucket.of(300, 30)
START_NS = 10**18


def lent_run(folder: Path, rule: Rule, seed: int) -> None:
    """A run of three brokers with bursts at one after the other, recorded as their brokers would."""
    rng = random.Random(seed)
    cluster = Cluster([SHARE] * 3, rule, 200_000, lambda _: [100_000], START_NS)
    arrivals: list[list[int]] = [[] for _ in cluster.brokers]
    numbers: list[list[int]] = [[] for _ in cluster.brokers]
    at_ns, message = START_NS, 0
    for _ in range(200):
        at_ns += rng.randrange(20_000_000, 120_000_000)
        number, size = rng.randrange(3), rng.randrange(1, 28)
        together = list(range(message, message + size))
        message += size
        arrivals[number] += [at_ns] * size
        numbers[number] += together
        broker = cluster.brokers[number]
        cluster.at(at_ns, ARRIVALS, 0, lambda broker=broker, together=together: cluster.arrive(broker, together))
    cluster.at(at_ns + 10**11, ARRIVALS, 0, cluster.tokens_ptok)  # lets go of all that is left
    while cluster.step():
        pass
    assert sum(broker.lending.counts.borrowed_ptok for broker in cluster.brokers) > 0
    for broker, times, mine in zip(cluster.brokers, arrivals, numbers, strict=True):
        released = np.array([cluster.released[each] for each in mine], np.int64)
        sent = Arrivals(np.array(times, np.int64), np.zeros(len(times), np.int32))
        Recorded("t", broker.name, [Publisher("p", 1.0)], sent, released, released).write(
            folder / f"{broker.name}.parquet", {}
        )


def _has_spent(books: Books, count: int, _: object) -> bool:
    return books.spent >= count


def columns(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arrivals, releases and brokers of a recorded run, in the order in which one bucket takes them."""
    rows = [row for batch in batches(folder, ["arrival_ns", "release_ns", "broker"]) for row in batch.to_pylist()]
    rows.sort(key=lambda row: (row["arrival_ns"], row["release_ns"], row["broker"]))
    return tuple(np.array([row[name] for row in rows]) for name in ("arrival_ns", "release_ns", "broker"))  # type: ignore[return-value]


@pytest.mark.spark
@pytest.mark.parametrize("rule", ["when_waiting", "early"])
def test_the_topic_conforms_though_brokers_exceed_their_shares(rule: Rule, spark: SparkSession, tmp_path: Path) -> None:
    lent_run(tmp_path, rule, 4)
    arrivals, releases, brokers = columns(tmp_path)
    alone = [largest_excess(np.sort(releases[brokers == name]), Timeline(SHARE)) for name in np.unique(brokers)]
    assert not any(each.conforms for each in alone)  # by its share alone, every broker would be blamed
    (verdict,) = conformance(tmp_path, Timeline(WHOLE), spark)
    assert verdict.conforms
    assert verdict.excess == largest_excess(np.sort(releases), Timeline(WHOLE))
    (account,) = penalty(tmp_path, Timeline(WHOLE), spark)
    expected = model.recorded(arrivals, releases, Timeline(WHOLE))
    assert account.whole is not None
    assert account.whole.split.total_ns == expected.split_ns.sum()
    assert account.whole.one.total_ns == expected.one_ns.sum()
    for name in np.unique(brokers):
        assert account.brokers[name].split.total_ns == expected.split_ns[brokers == name].sum()
        assert account.brokers[name].one.total_ns == expected.one_ns[brokers == name].sum()
    # Proposition 1 holds for lent tokens, too: nobody gets one before the one bucket would have had it.
    ends = np.sort(np.concatenate([arrivals, releases]))
    assert (expected.split_sum(ends) + len(arrivals) >= expected.one_sum(ends)).all()
    assert all(before <= after for before, after in pairwise(expected.one_sum(ends).tolist()))


@pytest.mark.spark
def test_a_recorded_run_of_brokers_that_lend_conforms_and_says_what_was_lent(
    spark: SparkSession, tmp_path: Path
) -> None:
    with running_lending(2, r=100, b=20, rule="when_waiting", trace_folder=str(tmp_path)) as lending:
        for broker in lending.brokers:
            name = broker.broker.options.name
            assert broker.post(f"/srtm/trace/start?file={name}.parquet")[0] == 200
        here, there = lending.brokers
        with Client(here.address) as one, Client(there.address) as other:
            one.publish("t", *[b"x"] * 30)
            other.publish("t", b"x")
        for broker, count in ((here, 30), (there, 1)):
            books = broker.broker.topics["t"].gate.books
            assert books is not None
            broker.wait_until(partial(_has_spent, books, count))
        for broker in lending.brokers:
            assert broker.post("/srtm/trace/stop")[0] == 200
        lent, borrowed = (lending.lent(there), lending.lent(here))
    moved = moved_in(tmp_path)["t"]
    assert moved["broker-1"].lent_ptok // 1000 == lent.lent_ntok
    assert moved["broker-0"].borrowed_ptok // 1000 == borrowed.borrowed_ntok > 0
    whole = Timeline(lending.contract.bucket)
    (verdict,) = conformance(tmp_path, whole, spark)
    assert (verdict.conforms, verdict.messages) == (True, 31)
    arrivals, releases, _ = columns(tmp_path)
    (account,) = penalty(tmp_path, whole, spark)
    expected = model.recorded(arrivals, releases, whole)
    assert account.whole is not None
    assert (account.whole.split.total_ns, account.whole.one.total_ns) == (
        expected.split_ns.sum(),
        expected.one_ns.sum(),
    )
