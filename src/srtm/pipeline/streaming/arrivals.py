"""The live arrivals of all brokers as a stream for Spark: the format `srtm_arrivals`, which `srtm advise` reads.

In: the controller that lists the brokers. Out: a row for each message of a topic under contract, once per broker and
offset. Positions are those of `source.StreamReader`; the log of a position is the id of a broker's stream, which its
restart changes. Brokers hold a bounded number of rows: what fell out is skipped, and a batch that is run again reads
what is left of it.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader
from pyspark.sql.streaming.datasource import ReadAllAvailable

from srtm.errors import InputError, PipelineError
from srtm.pipeline.streaming.logs import Logs, Refused, ask, patiently, send
from srtm.pipeline.streaming.positions import Extent
from srtm.pipeline.streaming.settings import DEFAULT_CONTROLLER, Settings
from srtm.pipeline.streaming.source import OffsetRange, StreamReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import InputPartition
    from pyspark.sql.streaming.datasource import ReadLimit
    from pyspark.sql.types import StructType

FORMAT = "srtm_arrivals"
SCHEMA = (
    "topic string, birth bigint, publisher string, `group` string, arrival_ns bigint, broker string, release_ns bigint"
)
_ROWS = 50_000  # per request
_PATIENCE_S = 20.0  # with a broker that does not respond; then its rows are left out
_TOKEN = "give the brokers' control token with SRTM_CONTROL_TOKEN or --control-token-file"


class ArrivalLogs(Logs):
    """The streams of arrivals of all brokers that are alive."""

    def look(self, *, strict: bool = False) -> dict[str, str]:
        """URLs of the current brokers, by name."""
        del strict
        controller = self._settings.controller
        try:
            listed = json.loads(ask(f"{controller}/v1/brokers"))["brokers"]
            now = {str(each["name"]): str(each["http"]) for each in listed if each["status"] == "alive"}
        except (Refused, ValueError, KeyError, TypeError):
            raise InputError(
                f"{controller} is not a controller: give its HTTP address, for example {DEFAULT_CONTROLLER}"
            ) from None
        self._urls |= now
        return now

    def unknown(self, brokers: dict[str, str]) -> list[str]:
        """None: the stream has whatever topics are under contract."""
        del brokers
        return []

    def extent(self, broker: str) -> Extent | None:
        """What a broker's stream holds; None if the broker is of a version that has none."""
        found = held(self._urls[broker], self._settings.token)
        return Extent(found["begin"], found["end"], found["log"]) if found else None


def held(url: str, token: str | None) -> dict[str, Any] | None:
    """The extent of a broker's stream, with the number of rows that are lost; None if the broker has no stream."""
    try:
        found: dict[str, Any] = json.loads(send(f"{url}/srtm/arrivals", bearer=token))
    except Refused as refused:
        if refused.status == 401:
            raise InputError(f"broker at {url} refuses the token: {_TOKEN}") from None
        return None
    return found


class ArrivalReader(StreamReader):
    """Reads the arrivals of all brokers."""

    @property
    def _logs(self) -> Logs:
        if self._found is None:
            self._found = ArrivalLogs(self._settings)
        return self._found

    def getDefaultReadLimit(self) -> ReadLimit:
        """Everything: brokers hold a bounded number of rows."""
        return ReadAllAvailable()

    def _rows(self, wanted: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition; runs on executors."""
        import pyarrow as pa

        if not isinstance(wanted, OffsetRange):  # Spark's own, if a batch has no partitions
            return
        at, token, timeout_s = wanted.begin, self._settings.token, self._settings.timeout_s
        while at < wanted.end:
            limit = min(_ROWS, wanted.end - at)
            asked = {"begin": at, "limit": limit, "log": wanted.log}
            some = partial(send, f"{wanted.url}/srtm/arrivals/read", "GET", asked, bearer=token)
            try:
                data = patiently(some, timeout_s)
            except PipelineError:  # the broker is gone, and its rows with it
                return
            except Refused:
                now = patiently(partial(held, wanted.url, token), timeout_s)
                if now is None or now["log"] != wanted.log or now["begin"] <= at:
                    return  # it began another stream
                at = now["begin"]  # it has forgotten what came before
                continue
            with pa.ipc.open_stream(data) as stream:
                table = stream.read_all()
            if not table.num_rows:
                return
            at += table.num_rows
            yield from _plain(table).to_batches()


def _plain(table: pa.Table) -> pa.Table:
    """The same with plain strings, as Spark takes them."""
    import pyarrow as pa

    fields = [(each.name, pa.string() if pa.types.is_dictionary(each.type) else each.type) for each in table.schema]
    return table.cast(pa.schema(fields))


class ArrivalSource(DataSource):
    """The live arrivals of a cluster."""

    @classmethod
    def name(cls) -> str:
        """The name for `format(…)`."""
        return FORMAT

    def schema(self) -> str:
        """The columns of a message."""
        return SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """For `spark.readStream`."""
        del schema
        settings = Settings(
            topic="arrivals",
            controller=self.options.get("controller", DEFAULT_CONTROLLER),
            token=self.options.get("token"),
            timeout_s=_PATIENCE_S,
            fail_on_data_loss=False,
        )
        return ArrivalReader(settings)


def register(spark: SparkSession) -> None:
    """Register the format with a session."""
    spark.dataSource.register(ArrivalSource)
