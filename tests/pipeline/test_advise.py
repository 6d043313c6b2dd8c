"""Advice from live arrivals: the window and its findings on Spark, and `srtm advise` on a live cluster, killed, too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

from srtm.broker.arrivals import stream_of
from srtm.control.placing.regrouping import largest_part
from srtm.model.advice import Findings, judged
from srtm.model.bucket import TokenBucket
from srtm.model.correlation import find_groups
from srtm.model.onsets import onsets_of
from srtm.model.profile import profile
from srtm.model.scan import access_delays
from srtm.pipeline.advise import Window, findings
from srtm.pipeline.streaming.arrivals import SCHEMA
from srtm.units import NS_PER_MS, NS_PER_S, percentiles
from srtm.workload.publishers import Population, Workload
from tests.broker.running import Running, running
from tests.control.running import controller
from tests.pipeline.runtime.standalone import wait_for

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WORKLOAD = Workload((Population(24, 10.0, 10, "poisson", 6, 2 * NS_PER_MS),), 20 * NS_PER_S, seed=4)
BUCKET = TokenBucket.of(200, 80)
PATIENCE_S = 400.0  # two JVMs start, on a machine that may be busy


def rows(spark: SparkSession, begin_s: float, end_s: float, birth: int = 7, start_ns: int = 10**18) -> DataFrame:
    """A part of the workload, as brokers would stream it: every other publisher at each, released by one bucket."""
    arrivals, names = WORKLOAD.arrivals(), [each.id for each in WORKLOAD.publishers()]
    release = arrivals.times_ns + access_delays(arrivals.times_ns, BUCKET)
    chosen = np.flatnonzero((arrivals.times_ns >= begin_s * NS_PER_S) & (arrivals.times_ns < end_s * NS_PER_S))
    listed = [
        (
            "t",
            birth,
            names[arrivals.publisher_of[i]],
            None,
            start_ns + int(arrivals.times_ns[i]),
            f"b{arrivals.publisher_of[i] % 2}",
            start_ns + int(release[i]),
        )
        for i in chosen.tolist()
    ]
    return spark.createDataFrame(listed, SCHEMA).repartition(3)


def test_a_window_holds_each_batch_once_and_forgets_the_oldest(spark: SparkSession, tmp_path: Path) -> None:
    window = Window(tmp_path / "window", 8 * NS_PER_S)
    assert window.empty
    first = window.add(rows(spark, 0, 5), 0)
    assert window.add(rows(spark, 0, 5), 0) == first > 0
    window.add(rows(spark, 5, 10), 1)
    window.add(rows(spark, 5, 10), 1)  # the driver died before the batch was committed
    found = {"7/t": BUCKET}
    (line,) = findings(window.folder, found, spark)
    assert line["messages"] == sum(WORKLOAD.arrivals().times_ns < 10 * NS_PER_S)
    assert window.add(rows(spark, 30, 31), 2) == 0, "nothing came"
    window.add(rows(spark, 10, 15), 3)
    (line,) = findings(window.folder, found, spark)
    assert line["messages"] == sum(WORKLOAD.arrivals().times_ns < 15 * NS_PER_S) - first
    assert not list(window.folder.glob(".*"))


def test_findings_are_the_models_and_belong_to_a_birth(spark: SparkSession, tmp_path: Path) -> None:
    window = Window(tmp_path / "window", 60 * NS_PER_S)
    for number in range(4):
        window.add(rows(spark, 5 * number, 5 * number + 5), number)
    window.add(rows(spark, 0, 5, birth=8), 4)
    arrivals, names = WORKLOAD.arrivals(), [each.id for each in WORKLOAD.publishers()]
    (line,) = findings(window.folder, {"7/t": BUCKET}, spark)
    whole = profile(arrivals.times_ns)
    assert (line["topic"], line["birth"], line["messages"]) == ("t", 7, whole.messages)
    assert (line["rate"], line["r"], line["b"]) == (float(whole.rate_mps), whole.bucket.r, whole.bucket.b)
    (p99,) = percentiles(access_delays(arrivals.times_ns, BUCKET), ("0.99",))
    assert p99 > 0
    assert line["access_p99_ms"] == line["one_bucket_p99_ms"] == p99 / NS_PER_MS
    groups = find_groups(onsets_of(arrivals.times_ns, arrivals.publisher_of, names, 20 * NS_PER_MS))
    assert [tuple(each["publishers"]) for each in line["groups"]] == [each.publishers for each in groups]
    assert len(groups) == 4
    assert {each["birth"] for each in findings(window.folder, {"7/t": BUCKET, "8/t": BUCKET}, spark)} == {7, 8}


def test_a_topic_that_drops_is_judged_by_all_that_came(spark: SparkSession, tmp_path: Path) -> None:
    """Messages that were dropped are arrivals that did not wait; with one bucket for all, they would have."""
    window = Window(tmp_path / "window", 60 * NS_PER_S)
    all_came = rows(spark, 0, 20)
    window.add(all_came.withColumn("release_ns", all_came.arrival_ns), 0)
    bucket = TokenBucket.of(100, 40)
    (line,) = findings(window.folder, {"7/t": bucket}, spark)
    assert line["access_p99_ms"] == 0 < line["one_bucket_p99_ms"]
    found = Findings(
        line["messages"],
        line["publishers"],
        line["span_s"],
        line["rate"],
        line["r"],
        line["b"],
        one_bucket_ns=round(line["one_bucket_p99_ms"] * NS_PER_MS),
    )
    assert [each.kind for each in judged(found, bucket, 100 * NS_PER_MS, {}, {})] == ["contract-too-small"]


@contextmanager
def program(output: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A verb of srtm, in a process group of its own, which ends with the context."""
    with output.open("ab") as out, output.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "srtm", *arguments], stdout=out, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Live:
    """A controller with two brokers, a grouped topic whose groups nobody declares, and one with half a contract."""

    def __init__(self, stack: ExitStack) -> None:
        served = stack.enter_context(controller(mcap_mps=8.0))
        self.url = f"http://127.0.0.1:{served.http}"
        self.api = stack.enter_context(httpx.Client(base_url=self.url, trust_env=False, timeout=30.0))
        under: dict[str, Any] = {"controller": f"127.0.0.1:{served.tcp}", "broadcast_address": "127.0.0.1"}
        self.brokers: list[Running] = [stack.enter_context(running(name=name, **under)) for name in ("one", "two")]
        wait_for(lambda: len([b for b in self.get("/v1/brokers")["brokers"] if b["status"] == "alive"]) == 2, 30)
        self.contract("grouped", r=200, b=200)
        self.contract("small", r=100, b=25)
        for number in range(12):  # one by one: they fill broker after broker, and with them whole groups
            self.post("/v1/topics/grouped/publishers", {"publishers": [{"id": f"p{number:02}"}]})

    def contract(self, topic: str, r: float, b: float) -> None:
        terms = {"r": r, "b": b, "slo_ms": 1000, "fit": "none"}
        self.api.put(f"/v1/topics/{topic}", json=terms).raise_for_status()

    def get(self, path: str) -> Any:
        return self.api.get(path).raise_for_status().json()

    def post(self, path: str, body: dict[str, Any]) -> None:
        self.api.post(path, json=body).raise_for_status()

    def advice(self, topic: str) -> dict[str, dict[str, Any]]:
        return {each["kind"]: each for each in self.get(f"/v1/topics/{topic}/advice")["advice"]}

    def events(self, topic: str, kind: str) -> list[str]:
        return [each["text"] for each in self.get(f"/v1/topics/{topic}")["events"] if each["kind"] == kind]

    def place(self) -> dict[str, str]:
        return {each["id"]: each["broker"] for each in self.get("/v1/topics/grouped/publishers")["publishers"]}

    def streamed(self) -> int:
        """Messages that brokers have streamed so far."""
        return sum(broker.get("/srtm/arrivals")["end"] for broker in self.brokers)

    def watched(self) -> bool:
        """Whether somebody reads the arrivals of all brokers."""
        return all(stream_of(broker.broker.turn) for broker in self.brokers)

    def load(self, *arguments: str) -> list[str]:
        fixed = ["--no-declare", "--no-create", "--duration", "600", "--channel", "none", "--controller", self.url]
        return ["load", *arguments, "--batch", "10", *fixed]


def batches(output: Path) -> dict[int, dict[str, Any]]:
    """What `srtm advise --json` said of each batch; of one that ran twice, the last."""
    whole = output.read_text().rpartition("\n")[0] if output.exists() else ""  # a killed one may leave half a line
    lines = [json.loads(line) for line in whole.splitlines()]
    return {line["batch"]: line for line in lines}


@pytest.mark.spark
@pytest.mark.processes
def test_advice_on_a_live_cluster_whose_advisor_is_killed(tmp_path: Path) -> None:
    with ExitStack() as stack:
        live, said = Live(stack), tmp_path / "advise"
        command = ["advise", "--every", "1s", "--auto", "groups", "--json", "--controller", live.url]
        command += ["--folder", str(tmp_path / "state"), "--master", "local[2]"]
        command += ["--spark-conf", "spark.sql.shuffle.partitions=2"]
        group_of = {f"p{number:02}": f"g{number // 6}" for number in range(12)}
        assert largest_part(live.place(), group_of) == 1.0
        with ExitStack() as loads:
            with program(said, *command) as driver:
                wait_for(lambda: live.watched() or driver.poll() is not None, PATIENCE_S)
                assert driver.poll() is None, said.with_suffix(".log").read_text()
                grouped = ["grouped", "--publishers", "12", "--rate", "10", "--group-size", "6"]
                small = ["small", "--publishers", "4", "--rate", "50", "--group-size", "1", "--prefix", "s"]
                loads.enter_context(program(tmp_path / "load-1", *live.load(*grouped)))
                loads.enter_context(program(tmp_path / "load-2", *live.load(*small)))
                wait_for(lambda: "contract-too-small" in live.advice("small"), PATIENCE_S)
                wait_for(lambda: live.events("grouped", "regrouped"), PATIENCE_S)
                os.killpg(driver.pid, signal.SIGKILL)
            last = max(batches(said))
            again = stack.enter_context(program(said, *command))
            wait_for(lambda: max(batches(said)) > last + 2 or again.poll() is not None, PATIENCE_S)
            assert again.poll() is None, said.with_suffix(".log").read_text()
            small_advice, grouped_advice = live.advice("small"), live.advice("grouped")
        # The loads have ended, and the advisor reads what is left: every message once, over both lives.
        live.api.patch("/v1/topics/small", json={"r": 1e6, "b": 1e6}).raise_for_status()
        wait_for(lambda: sum(each["messages"] for each in batches(said).values()) == live.streamed() > 0, PATIENCE_S)
        assert sorted(batches(said)) == list(range(max(batches(said)) + 1)), "no batch is missing"
        evidence = small_advice["contract-too-small"]["evidence"]
        assert evidence["needs"]["r"] > evidence["contract"]["r"] == 100
        found = grouped_advice["groups-found"]["evidence"]["groups"]
        assert [each["publishers"] for each in found] == [sorted(group_of)[:6], sorted(group_of)[6:]]
        assert largest_part(live.place(), group_of) < 1.0
        assert len(live.events("grouped", "regrouped")) == 1
        starts = [text for text in live.events("small", "advice") if text.startswith("contract-too-small")]
        assert all("ended" in text for text in starts[1::2]), "advice that stands does not begin again"
