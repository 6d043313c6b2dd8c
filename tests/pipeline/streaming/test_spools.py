"""The source where brokers deliver through a real nsqd: it reads their logs, if these keep what nsqd has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from srtm.errors import InputError
from srtm.pipeline.streaming.settings import Settings
from srtm.pipeline.streaming.source import BatchReader, StreamReader
from tests.control.running import controller
from tests.engines import Nsqd, engine_of, until
from tests.pipeline.streaming.topics import between, bodies, brokers, contract, numbered, on_disk, plain, publish
from tests.programs import ask

pytestmark = pytest.mark.needs("nsqd")


@pytest.mark.parametrize("registered", [True, False])
def test_logs_before_nsqd_are_read_although_nsqd_has_all_of_it(registered: bool, tmp_path: Path) -> None:
    """Whether the nsqd registers with the controller, and is listed as if it were a broker, or not."""
    with controller() as served:
        flags = [f"--lookupd-tcp-address=127.0.0.1:{served.tcp}"] if registered else []
        under: dict[str, Any] = {"controller": f"127.0.0.1:{served.tcp}", "retain_acknowledged": True}
        url = f"http://127.0.0.1:{served.http}"
        with Nsqd(tmp_path, *flags) as server, brokers(tmp_path, engine=server.url, **under) as start:
            contract(url, "t", r=5000, b=500)
            one = start("one")
            until(lambda: {each["status"] for each in ask(served.http, "/v1/brokers")["brokers"]} == {"alive"})
            x = publish(one, numbered("x", 200))
            until(lambda: server.stats("t")["message_count"] == 200)
            until(lambda: not engine_of(one, "t")["unacknowledged"])
            assert bool(ask(served.http, "/lookup?topic=t").get("producers")) == registered
            for settings in (Settings("t", controller=url, timeout_s=5.0), Settings("t", brokers=(one.url,))):
                reader = StreamReader(settings)
                assert plain(reader.initialOffset()) == {"one": 0}
                assert between(reader, {"one": 0}, reader.latestOffset({"one": 0}, ReadAllAvailable())) == x
                batch = BatchReader(settings)
                assert bodies(batch, batch.partitions()) == x


def test_what_nsqd_alone_has_cannot_be_read_again(tmp_path: Path) -> None:
    with Nsqd(tmp_path) as server, brokers(tmp_path, engine=server.url) as start:
        one = on_disk(start("one"), "stored")
        publish(one, numbered("x", 3), "stored")
        with pytest.raises(
            InputError, match=r"'stored' at broker 'one' deletes messages that its nsqd has: .*--retain-ack"
        ):
            StreamReader(Settings("stored", brokers=(one.url,), timeout_s=5.0)).initialOffset()
        publish(one, numbered("x", 3), "passing")
        with pytest.raises(
            InputError, match=r"'passing' at broker 'one' is kept in memory .* create it with durability=disk"
        ):
            StreamReader(Settings("passing", brokers=(one.url,), timeout_s=5.0)).initialOffset()
