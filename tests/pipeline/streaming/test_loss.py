"""The source when logs are trimmed, deleted, or replaced by others of the same name, without Spark."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from srtm.errors import LogError, LogReplaced, OffsetTrimmed
from srtm.pipeline.streaming.source import BatchReader, StreamReader
from tests.broker.running import Running, running
from tests.pipeline.streaming.topics import Start, between, bodies, log_id, numbered, on_disk, plain, publish, settings


def test_what_was_trimmed_is_an_error_that_names_the_way_on(start: Start) -> None:
    one = on_disk(start("one"))
    x = publish(one, numbered("x", 30))
    reader = StreamReader(settings(one))
    assert one.post("/srtm/log/trim?topic=t&before=12")[0] == 200
    with pytest.raises(OffsetTrimmed, match="no longer holds offset 0: it begins at 12: set option failOnDataLoss to"):
        reader.latestOffset({"one": 0}, ReadAllAvailable())
    with pytest.raises(OffsetTrimmed, match="set option failOnDataLoss to false"):  # trimmed after it was planned
        between(reader, {"one": 0}, {"one": 30})
    with pytest.raises(OffsetTrimmed, match="failOnDataLoss"):
        BatchReader(settings(one, starting={"one": 3})).partitions()
    tolerant = StreamReader(settings(one, fail_on_data_loss=False, rows_per_partition=10))
    assert plain(tolerant.latestOffset({"one": 0}, ReadAllAvailable())) == {"one": 30}
    assert between(tolerant, {"one": 0}, {"one": 30}) == x[12:]


def test_a_log_that_was_removed(start: Start) -> None:
    one = on_disk(start("one"))
    publish(one, numbered("x", 30))
    one.post("/topic/delete?topic=t")
    reader = StreamReader(settings(one))
    tolerant = StreamReader(settings(one, fail_on_data_loss=False))
    with pytest.raises(LogError, match="no longer exists; messages after offset 30 are lost"):
        reader.latestOffset({"one": 30}, ReadAllAvailable())
    assert tolerant.latestOffset({"one": 30}, ReadAllAvailable()) == {"one": 30}
    fresh = publish(on_disk(one), numbered("fresh", 5))
    with pytest.raises(LogError, match="has no offset 30: it ends at 5; was its log deleted"):
        reader.latestOffset({"one": 30}, ReadAllAvailable())
    again = tolerant.latestOffset({"one": 30}, ReadAllAvailable())
    assert plain(again) == {"one": 0}
    assert between(tolerant, {"one": 30}, again) == []
    assert between(tolerant, again, tolerant.latestOffset(again, ReadAllAvailable())) == fresh


def test_a_topic_that_was_deleted_and_created_again_is_not_taken_for_the_old_one(start: Start) -> None:
    """Its new log has grown beyond the position, so that offsets alone say nothing."""
    one, two = on_disk(start("one")), on_disk(start("two"))
    publish(one, numbered("x", 30))
    publish(two, numbered("y", 10))
    reader = StreamReader(settings(one, two))
    tolerant = StreamReader(settings(one, two, fail_on_data_loss=False))
    begin = reader.initialOffset()
    at = reader.latestOffset(begin, ReadAllAvailable())
    planned = reader.partitions(begin, at)
    again(one)
    fresh, more = publish(one, numbered("fresh", 50)), publish(two, numbered("more", 5))
    lost = r"topic 't' at broker 'one' was deleted and created again, or its broker started with an empty disk"
    with pytest.raises(
        LogReplaced, match=rf"{lost}; messages after offset 30 are lost: set option failOnDataLoss to false"
    ):
        reader.latestOffset(at, ReadAllAvailable())
    with pytest.raises(LogReplaced, match=r"no longer has log.*failOnDataLoss"):  # replaced after it was planned
        bodies(reader, planned)
    with pytest.raises(LogReplaced, match=lost):
        BatchReader(settings(one, two, starting=begin)).partitions()
    assert bodies(tolerant, planned) == numbered("y", 10)
    end = tolerant.latestOffset(at, ReadAllAvailable())
    assert plain(end) == {"one": 0, "two": 15}
    assert between(tolerant, at, end) == more
    assert between(tolerant, end, tolerant.latestOffset(end, ReadAllAvailable())) == fresh


def test_a_broker_of_the_same_name_with_an_empty_disk_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    def there(folder: str) -> AbstractContextManager[Running]:
        return running(name="one", data_path=str(tmp_path / folder))

    with there("old") as one:
        publish(on_disk(one), numbered("x", 30))
        reader = StreamReader(settings(one))
        at = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    with there("old") as one:  # a restart changes nothing
        assert StreamReader(settings(one)).latestOffset(at, ReadAllAvailable()) == at
    with there("new") as one:
        fresh = publish(on_disk(one), numbered("fresh", 40))
        with pytest.raises(LogReplaced, match="started with an empty disk"):
            StreamReader(settings(one)).latestOffset(at, ReadAllAvailable())
        tolerant = StreamReader(settings(one, fail_on_data_loss=False))
        end = tolerant.latestOffset(at, ReadAllAvailable())
        assert between(tolerant, at, end) == []
        assert between(tolerant, end, tolerant.latestOffset(end, ReadAllAvailable())) == fresh


def test_a_commit_trims_no_other_log(start: Start) -> None:
    one = on_disk(start("one"))
    publish(one, numbered("x", 10))
    trimming = StreamReader(settings(one, trim_on_commit=True, fail_on_data_loss=False))
    end = trimming.latestOffset(trimming.initialOffset(), ReadAllAvailable())
    again(one)
    publish(one, numbered("fresh", 20))
    trimming.commit(end)
    assert one.get("/srtm/log?topic=t")["begin"] == 0


def test_available_now_over_a_topic_that_was_created_again(start: Start) -> None:
    one = on_disk(start("one"))
    publish(one, numbered("x", 10))
    reader = StreamReader(settings(one, fail_on_data_loss=False))
    at = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    again(one)
    fresh = publish(one, numbered("fresh", 20))
    reader.prepareForTriggerAvailableNow()
    publish(one, numbered("late", 5))
    found: list[bytes] = []
    while (end := reader.latestOffset(at, ReadMaxRows(8))) != at:
        found += between(reader, at, end)
        at = end
    assert found == fresh
    again(one)  # while it runs: what there is now was not there when it began
    publish(one, numbered("later", 30))
    assert reader.latestOffset(at, ReadMaxRows(8)) == at


def test_a_checkpoint_without_ids_of_logs_goes_on(start: Start) -> None:
    """As all were before logs had ids: from then on it has them."""
    one = on_disk(start("one"))
    x = publish(one, numbered("x", 10))
    reader = StreamReader(settings(one))
    end = reader.latestOffset({"one": 4}, ReadAllAvailable())
    assert end == {"one": {"offset": 10, "log": log_id(one)}}
    assert between(reader, {"one": 4}, end) == x[4:]
    assert between(reader, {"one": 4}, {"one": 6}) == x[4:6]  # a batch that was planned before
    again(one)
    publish(one, numbered("fresh", 20))
    with pytest.raises(LogReplaced, match="was deleted and created again"):
        reader.latestOffset(end, ReadAllAvailable())


def again(broker: Running) -> None:
    """Delete the topic, and create it again at once."""
    assert broker.post("/topic/delete?topic=t")[0] == 200
    on_disk(broker)
