"""Advise: a query that never ends; it turns the live arrivals of all brokers into findings for the controller.

In: the stream `srtm_arrivals`, in small batches. Out: after each batch, what the last minute says about every topic
under contract, posted with the query's id and the batch's number, so that the controller takes each batch once.

The state is the `Window`: the batches of the last minute as trace files beside the checkpoint, named by batch. A batch
that is run again writes the same name, so a killed driver goes on where it stopped. Findings come from the jobs for
recorded traces (`profile`, `groups`, `penalty`), which are exact; docs/adr/0024-advice.md has the reasons.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from srtm.errors import PipelineError
from srtm.model.bucket import TokenBucket
from srtm.model.timeline import Timeline
from srtm.pipeline.groups import groups
from srtm.pipeline.penalty import penalty
from srtm.pipeline.profile import profile
from srtm.pipeline.streaming import arrivals
from srtm.pipeline.streaming.logs import Away, Refused, ask, send
from srtm.pipeline.traces.batches import batch_of
from srtm.pipeline.traces.staging import write_sorted
from srtm.units import NS_PER_MS, NS_PER_S
from srtm.workload.trace import RECORDED_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from srtm.pipeline.traces.batches import Batches

logger = logging.getLogger(__name__)

_COLUMNS = [name for name in RECORDED_SCHEMA.names if name != "sent_ns"]
_FILES = "file string, rows long, last_ns long"
_VALID = 6  # batches that advice stands without being renewed


@dataclass(frozen=True)
class AdviseOptions:
    """Where a query reads and posts, where it keeps its state, and what the controller may act on."""

    controller: str
    folder: Path
    token: str | None = None
    control_token: str | None = None
    every_s: float = 5.0
    window_s: float = 60.0
    auto: tuple[str, ...] = ()


class Posted(NamedTuple):
    """What became of a batch: its number and messages, rows lost so far, and the controller's answer."""

    batch: int
    messages: int
    lost: int
    answer: dict[str, Any] | None


class Window:
    """The last arrivals as a trace: a folder for each batch, and in it a file from each task."""

    def __init__(self, folder: Path, window_ns: int) -> None:
        self.folder = folder
        self._window_ns = window_ns
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, rows: DataFrame, batch: int) -> int:
        """Keep the rows of a batch, and drop batches that are too old; returns how many rows it has."""
        partial_folder = self.folder / f".{batch}"  # hidden: not a part of the trace yet
        shutil.rmtree(partial_folder, ignore_errors=True)
        partial_folder.mkdir()
        found = rows.mapInArrow(partial(_write, partial_folder), _FILES).toArrow()
        names = set(found["file"].to_pylist())
        for file in partial_folder.iterdir():
            if file.name not in names:  # of a task that failed, or that Spark ran twice
                file.unlink()
        for number, _, home in self._batches():
            if number >= batch:  # of a run of this batch that was interrupted
                shutil.rmtree(home)
        if names:
            partial_folder.rename(self.folder / f"{batch}-{pc.max(found['last_ns']).as_py()}")
        else:
            partial_folder.rmdir()
        self._drop()
        return int(pc.sum(found["rows"]).as_py() or 0)

    @property
    def empty(self) -> bool:
        """Whether nothing arrived lately."""
        return not self._batches()

    def _drop(self) -> None:
        kept = self._batches()
        newest_ns = max((last_ns for _, last_ns, _ in kept), default=0)
        for _, last_ns, home in kept:
            if last_ns < newest_ns - self._window_ns:
                shutil.rmtree(home)

    def _batches(self) -> list[tuple[int, int, Path]]:
        """The number, the last arrival and the folder of each batch."""
        found = [home for home in self.folder.iterdir() if not home.name.startswith(".")]
        return [(int(number), int(last_ns), home) for home in found for number, last_ns in [home.name.split("-")]]


def _write(folder: Path, batches: Batches) -> Batches:
    """A task: write its rows in order of arrival. Topics are named by birth, too: a name is not an identity."""
    held = [batch for batch in batches if batch.num_rows]
    if not held:
        return
    schema = pa.schema([RECORDED_SCHEMA.field(name).with_nullable(True) for name in _COLUMNS])
    named = []
    for batch in held:
        topics = pc.binary_join_element_wise(batch.column("birth").cast(pa.string()), batch.column("topic"), "/")
        columns = [topics if name == "topic" else batch.column(name) for name in _COLUMNS]
        named.append(pa.RecordBatch.from_arrays(columns, _COLUMNS))
    last_ns = max(pc.max(batch.column("arrival_ns")).as_py() for batch in held)
    rows = sum(batch.num_rows for batch in held)
    yield batch_of(_FILES, [(write_sorted(folder, named, schema, "arrival_ns"), rows, last_ns)])


def findings(window: Path, contracts: Mapping[str, TokenBucket], spark: SparkSession) -> list[dict[str, Any]]:
    """What a window says about topics, named `birth/topic`, that are under contract: as `/v1/findings` takes it."""
    found_groups = {line.topic: line.groups for line in groups(window, spark)}
    timelines = {name: Timeline(bucket) for name, bucket in contracts.items()}
    waits = {line.topic: line.whole for line in penalty(window, timelines, spark)}
    found = []
    for line in profile(window, spark):
        whole = waits.get(line.topic)
        if line.topic not in contracts or line.bucket is None:
            continue
        birth, _, name = line.topic.partition("/")
        found.append(
            {
                "topic": name,
                "birth": int(birth),
                "messages": line.messages,
                "publishers": line.publishers,
                "span_s": (line.last_ns - line.first_ns) / NS_PER_S,
                "rate": line.rate_mps,
                "r": float(line.bucket.r),
                "b": float(line.bucket.b),
                "access_p99_ms": whole.split.p99 / NS_PER_MS if whole else None,
                "one_bucket_p99_ms": whole.one.p99 / NS_PER_MS if whole else None,
                "groups": [
                    {"publishers": list(group.publishers), "confidence": min(1.0, max(0.0, group.confidence))}
                    for group in found_groups.get(line.topic, ())
                ],
            }
        )
    return found


class Advisor:
    """Carries out the batches of a query."""

    def __init__(self, options: AdviseOptions, spark: SparkSession, on_batch: Callable[[Posted], None]) -> None:
        self._options = options
        self._spark = spark
        self._on_batch = on_batch
        self._window = Window(options.folder / "window", round(options.window_s * NS_PER_S))

    def start(self) -> StreamingQuery:
        """Start the query, or continue it from its checkpoint."""
        options, spark = self._options, self._spark
        arrivals.register(spark)
        source = {"controller": options.controller}
        if options.control_token is not None:
            source["token"] = options.control_token
        rows = spark.readStream.format(arrivals.FORMAT).options(**source).load()
        begun = rows.writeStream.foreachBatch(self.carry_out)
        begun = begun.option("checkpointLocation", str(self._checkpoint))
        return begun.trigger(processingTime=f"{round(1000 * options.every_s)} milliseconds").start()

    def carry_out(self, rows: DataFrame, batch: int) -> None:
        """Keep a batch, and post what the window says now. An absent controller hears of the next batch instead."""
        messages, options = self._window.add(rows, batch), self._options
        try:
            found = findings(self._window.folder, self._contracts(), self._spark) if not self._window.empty else []
            answer = self._post(
                {
                    "query": self._query(),
                    "batch": batch,
                    "valid_s": _VALID * max(options.every_s, 5.0),
                    "auto": list(options.auto),
                    "topics": found,
                }
            )
            lost = self._lost()
        except Away as problem:
            logger.warning("batch %d: %s; continuing with the next one", batch, problem)
            answer, lost = None, 0
        self._on_batch(Posted(batch, messages, lost, answer))

    @property
    def _checkpoint(self) -> Path:
        return self._options.folder / "checkpoint"

    def _query(self) -> str:
        """The query's id, which Spark keeps in the checkpoint."""
        return str(json.loads((self._checkpoint / "metadata").read_text())["id"])

    def _contracts(self) -> dict[str, TokenBucket]:
        listed = json.loads(ask(f"{self._options.controller}/v1/topics"))["topics"]
        return {f"{each['birth']}/{each['topic']}": TokenBucket.of(each["r"], each["b"]) for each in listed}

    def _post(self, body: dict[str, Any]) -> dict[str, Any] | None:
        options = self._options
        try:
            data = json.dumps(body).encode()
            said = send(f"{options.controller}/v1/findings", "POST", bearer=options.token, body=data)
        except Refused as refused:
            told = f"{options.controller} refuses findings: {str(refused)[:300]}"
            if refused.status in (401, 403):
                raise PipelineError(f"{told}; give the controller's token with SRTM_TOKEN or --token-file") from None
            logger.warning("%s; continuing with the next batch", told)
            return None
        answer: dict[str, Any] = json.loads(said)
        return answer

    def _lost(self) -> int:
        """Arrivals that fell out of the brokers' memory before this query read them."""
        brokers = json.loads(ask(f"{self._options.controller}/v1/brokers"))["brokers"]
        lost = 0
        for each in brokers:
            if each["status"] == "alive":
                try:
                    lost += (arrivals.held(each["http"], self._options.control_token) or {"lost": 0})["lost"]
                except Away:  # the next batch counts it
                    continue
        return lost
