"""A broker under a controller: exchanges on real sockets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from msgspec import structs

from srtm.model.latency import Sketch
from srtm.protocol import client as say
from srtm.protocol.client import Response
from srtm.protocol.exchange import (
    Answer,
    Contract,
    Exchange,
    Grant,
    Listed,
    Move,
    RefusalCode,
    Second,
    Share,
    read,
    refusal_code,
    write,
)
from srtm.protocol.orders import Migrate, Throttle
from tests.broker.running import Client, Running, in_memory

TOKEN = 10**9
CONTRACT = Contract(1_000_000, 100 * TOKEN)
BIRTH = 7
NOBODY = "127.0.0.1:1"  # a controller that is not there: it is played by the test


def said(number: int = 1, **parts: Any) -> Exchange:
    return Exchange(
        **{
            "epoch": 1,
            "number": number,
            "incarnation": 0,
            "echo": None,
            "lease_ns": 10**12,
            "safe_percent": 50,
            "version": 1,
            "contracts": {"t": Listed(BIRTH, CONTRACT)},
            **parts,
        }
    )


def exchange(broker: Running, message: Exchange) -> Answer:
    message = structs.replace(message, incarnation=message.incarnation or broker.broker.started_ns)
    status, body = broker.post("/srtm/exchange", write(message))
    assert status == 200, body
    return read(body, Answer)


def share(r: int, b: int) -> Share:
    return Share(r * 1000, b * TOKEN)


def tokens(broker: Running) -> float:
    return float(broker.get("/stats?format=json&topic=t")["topics"][0]["srtm"]["tokens"])


def test_a_grant_is_put_in_force_once() -> None:
    with in_memory(controller=NOBODY) as broker:
        first = Grant(BIRTH, 1, share(1, 9), 5 * TOKEN)
        report = exchange(broker, said(grants={"t": first})).topics["t"]
        assert (report.epoch, report.sequence, report.share) == (1, 1, share(1, 9))
        assert 5 <= tokens(broker) < 6  # what came along, not a full bucket
        exchange(broker, said(2, grants={"t": Grant(BIRTH, 1, share(1, 9), 9 * TOKEN)}))
        assert tokens(broker) < 7
        report = exchange(broker, said(3, grants={"t": Grant(BIRTH, 2, share(1, 2))})).topics["t"]
        assert 3 * TOKEN <= report.surrendered_ntok < 5 * TOKEN
        report = exchange(broker, said(4, grants={"t": first})).topics["t"]  # an old one comes late
        assert (report.sequence, report.share) == (2, share(1, 2))


def test_a_topic_without_a_share_waits_for_one_and_free_topics_do_not() -> None:
    with (
        in_memory(controller=NOBODY) as broker,
        Client(broker.address) as publisher,
        Client(broker.address).subscribe("t", "c", 10) as reader,
        Client(broker.address) as other,
    ):
        publisher.publish("t", b"before the controller spoke")
        assert reader.silent()
        report = exchange(broker, said()).topics["t"]
        assert (report.share, report.waiting) == (None, 1)
        other.subscribe("free", "c", 1)
        publisher.publish("free", b"x")
        assert other.message().body == b"x"
        publisher.publish("t", b"after")
        assert reader.silent()
        exchange(broker, said(2, grants={"t": Grant(BIRTH, 1, share(1000, 10), 10 * TOKEN)}))
        assert [reader.message().body for _ in range(2)] == [b"before the controller spoke", b"after"]
        exchange(broker, said(3, grants={"t": Grant(BIRTH, 2, None)}))
        publisher.publish("t", b"closed again")
        assert reader.silent()
        exchange(broker, said(4, version=2, contracts={}))  # the contract is over
        assert reader.message().body == b"closed again"


def test_a_grant_that_comes_after_its_lease_brings_no_more_than_the_safe_part() -> None:
    with (
        in_memory(controller=NOBODY) as broker,
        Client(broker.address) as publisher,
        Client(broker.address).subscribe("t", "c", 100) as reader,
    ):
        exchange(broker, said())
        publisher.publish("t", *[b"x"] * 20)
        grants = {"t": Grant(BIRTH, 1, share(1, 10), 10 * TOKEN)}
        late = said(2, grants=grants, echo=broker.broker.clock.monotonic_ns() - 2, lease_ns=1)
        report = exchange(broker, late).topics["t"]
        assert (report.safe, report.share, report.surrendered_ntok) == (True, Share(500, 5 * TOKEN), 0)
        for _ in range(5):
            reader.message()
        assert reader.silent(1.0)  # a grant of ten tokens, in force for an instant, would have let ten pass


def test_what_waited_until_a_topic_was_known_to_be_free_waited_that_long() -> None:
    with in_memory(controller=NOBODY) as broker, Client(broker.address) as publisher:
        began_ns = broker.now_ns()
        publisher.publish("free", b"before the controller spoke")
        exchange(broker, said())
        broker.wait_until(lambda b: bool(b.topics["free"].unclaimed))
        (message,) = broker.broker.topics["free"].unclaimed
        assert began_ns <= message.arrival_ns <= message.release_ns <= broker.now_ns()


def test_nobody_is_answered_for_a_disk_that_is_not_there() -> None:
    with in_memory(controller=NOBODY) as broker, Client(broker.address) as publisher:
        contract = structs.replace(CONTRACT, durability="disk")
        answer = exchange(
            broker, said(contracts={"t": Listed(BIRTH, contract)}, grants={"t": Grant(BIRTH, 1, share(1, 1), TOKEN)})
        )
        assert not answer.stores
        assert not answer.topics
        publisher.send(say.pub("t", b"precious"))
        assert publisher.error().startswith(
            b"E_BAD_TOPIC topic 't' must be on disk, but this broker has no --data-path"
        )


def test_a_topic_on_disk_drops_nothing(tmp_path: Path) -> None:
    """It was there before the contract, which says drop: what it answered stays."""
    contract = structs.replace(CONTRACT, overflow="drop")
    with in_memory(controller=NOBODY, data_path=str(tmp_path)) as broker, Client(broker.address) as publisher:
        broker.post("/topic/create?topic=t&durability=disk")
        exchange(
            broker, said(contracts={"t": Listed(BIRTH, contract)}, grants={"t": Grant(BIRTH, 1, share(1, 1), TOKEN)})
        )
        for _ in range(3):
            publisher.publish("t", b"x")
        report = exchange(broker, said(2)).topics["t"]
        assert (report.durable, report.waiting) == (True, 2)


def test_a_lapsed_lease_halves_the_share_until_it_is_granted_anew() -> None:
    with in_memory(controller=NOBODY) as broker:
        answer = exchange(broker, said(grants={"t": Grant(BIRTH, 1, share(100, 20), 0)}))
        answer = exchange(broker, said(2, echo=answer.stamp, lease_ns=300_000_000))
        assert answer.topics["t"].share == share(100, 20)
        broker.sleep(0.6)
        answer = exchange(broker, said(3, echo=answer.stamp, lease_ns=10**10))
        assert (answer.topics["t"].safe, answer.topics["t"].share) == (True, share(50, 10))
        answer = exchange(broker, said(4, grants={"t": Grant(BIRTH, 2, share(80, 16))}))
        assert (answer.topics["t"].safe, answer.topics["t"].share) == (False, share(80, 16))


def test_an_exchange_that_was_long_under_way_brings_no_lease() -> None:
    with in_memory(controller=NOBODY) as broker:
        stamp = exchange(broker, said()).stamp
        report = exchange(
            broker, said(2, echo=stamp - 10**10, lease_ns=10**9, grants={"t": Grant(BIRTH, 1, share(100, 20))})
        )
        assert report.topics["t"].share == share(50, 10)


def test_a_grant_for_the_broker_that_was_here_before_is_void() -> None:
    with in_memory(controller=NOBODY) as broker:
        report = exchange(broker, said(incarnation=1, grants={"t": Grant(BIRTH, 1, share(1, 1))}))
        assert "t" not in report.topics or report.topics["t"].share is None


def test_who_may_speak() -> None:
    with in_memory() as free:
        status, body = free.post("/srtm/exchange", write(said()))
        assert (status, refusal_code(body)) == (409, RefusalCode.NOT_MANAGED)
    with in_memory(controller=NOBODY, control_token="secret") as guarded:
        status, body = guarded.post("/srtm/exchange", write(said()))
        assert (status, refusal_code(body)) == (401, RefusalCode.UNAUTHORIZED)
    with in_memory(controller=NOBODY) as broker:
        exchange(broker, said(epoch=2))
        status, body = broker.post("/srtm/exchange", write(said(epoch=1)))
        assert (status, refusal_code(body)) == (409, RefusalCode.OLD_EPOCH)


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"[]",
        b'{"epoch": -1}',
        write(said()).replace(b'"epoch":1', b'"epoch":NaN'),
        write(said()).replace(b'"epoch":1', b'"epoch":-1'),
        write(said()).replace(b'"t"', b'"a b"'),
        write(said(grants={"t": Grant(BIRTH, 1, share(1, 1))}))
        .replace(b"1000000000,", b"-1,")
        .replace(b":1000,", b":-1,"),
    ],
)
def test_what_cannot_be_read_changes_nothing(text: bytes) -> None:
    with in_memory(controller=NOBODY) as broker:
        status, body = broker.post("/srtm/exchange", text)
        assert (status, b"INVALID_EXCHANGE" in body) == (400, True), body
        assert exchange(broker, said(contracts=None, version=0)).version == 0


def test_publishers_that_declared_themselves_are_sent_elsewhere_and_others_hear_nothing() -> None:
    with (
        in_memory(controller=NOBODY) as broker,
        Client(broker.address, srtm={"publisher": "p", "group": "g", "topic": "t"}) as ours,
        Client(broker.address) as stock,
    ):
        stock.publish("t", b"x")
        answer = exchange(broker, said(moves=[Move("t", BIRTH, ("other:4150",), ["p", "q"])], roll=["t"]))
        assert answer.topics["t"].roll == [("p", "g")]
        assert ours.next() == Migrate("t", ("other:4150",))
        assert stock.silent()
        ours.sock.close()
        while exchange(broker, said(2)).topics["t"].publishers:
            broker.sleep(0.01)


def test_a_publisher_that_leaves_is_let_go_when_its_last_message_has_its_token() -> None:
    with (
        in_memory(controller=NOBODY) as broker,
        Client(broker.address, srtm={"publisher": "p", "group": None, "topic": "t"}) as ours,
        Client(broker.address).subscribe("t", "c", 10) as reader,
    ):
        exchange(broker, said(grants={"t": Grant(BIRTH, 1, share(10, 1), TOKEN)}))
        ours.publish("t", b"1", b"2", b"3", b"4")
        began = broker.monotonic()
        ours.sock.shutdown(1)
        assert ours.ended()
        assert broker.monotonic() - began > 0.2  # three more tokens took 0.3 s
        assert [reader.message(0.1).body for _ in range(4)] == [b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("durability", ["disk", "memory"])
def test_what_waited_for_tokens_when_a_broker_ended_waits_for_new_ones(tmp_path: Path, durability: str) -> None:
    contract = Contract(5_000, 3 * TOKEN, durability=durability)
    options: dict[str, Any] = {"controller": NOBODY, "data_path": str(tmp_path)}
    with in_memory(**options) as broker, Client(broker.address) as publisher:
        exchange(broker, said(contracts={"t": Listed(BIRTH, contract)}))
        Client(broker.address).subscribe("t", "c", 0).sock.close()
        exchange(
            broker,
            said(2, contracts={"t": Listed(BIRTH, contract)}, grants={"t": Grant(BIRTH, 1, share(1, 3), 3 * TOKEN)}),
        )
        publisher.publish("t", *(b"%d" % number for number in range(8)))
    with in_memory(**options) as broker, Client(broker.address).subscribe("t", "c", 10) as reader:
        already = 3 if durability == "memory" else 0  # a channel's own queue was given its tokens
        found = [reader.message().body for _ in range(already)]
        assert reader.silent()
        began = broker.monotonic()
        exchange(
            broker,
            said(contracts={"t": Listed(BIRTH, contract)}, grants={"t": Grant(BIRTH, 1, share(5, 3), 3 * TOKEN)}),
        )
        found += [reader.message().body for _ in range(8 - already)]
        assert found == [b"%d" % number for number in range(8)]
        assert broker.monotonic() - began > (8 - already - 3) / 5 - 0.1


def test_what_a_second_was_like() -> None:
    with (
        in_memory(controller=NOBODY) as broker,
        Client(broker.address) as publisher,
        Client(broker.address).subscribe("t", "c", 100),
    ):
        strict = Contract(1_000_000, 100 * TOKEN, slo_ns=1)
        answer = exchange(
            broker, said(contracts={"t": Listed(BIRTH, strict)}, grants={"t": Grant(BIRTH, 1, share(1000, 100), 0)})
        )
        publisher.send(say.mpub("t", [b"x"] * 7))
        assert publisher.response() == b"OK"
        seconds: list[Second] = []
        until = broker.monotonic() + 10
        while not sum(second.messages for second in seconds) and broker.monotonic() < until:
            broker.sleep(0.1)
            answer = exchange(broker, said(2))
            seconds = answer.topics["t"].seconds
        (busy,) = [second for second in seconds if second.messages]
        assert (busy.messages, busy.largest_batch, busy.sent, busy.over) == (7, 7, 7, 7)
        assert sum(busy.total[1::2]) == 7
        assert busy.max_backlog_ntok > 100 * TOKEN  # no tokens had come along
        found = Sketch.read(busy.backlogs)  # a token more for each of the batch
        assert found.total == 7
        assert found.quantile_ns("0.01") < found.quantile_ns("0.99")
        assert found.quantile_ns(1) == pytest.approx(busy.max_backlog_ntok / TOKEN, rel=1 / 16)
        assert not exchange(broker, said(3, heard=seconds[-1].number)).topics["t"].seconds[:-1]


def test_a_publisher_of_a_full_topic_is_told_so_if_it_declared_itself() -> None:
    with (
        in_memory(max_held_messages=10) as broker,
        Client(broker.address, srtm={"publisher": "p", "group": None}) as ours,
        Client(broker.address) as stock,
    ):
        ours.send(*(say.pub("t", b"x") for _ in range(20)))
        answers = [ours.next() for _ in range(21)]
        assert [answer.topic for answer in answers if isinstance(answer, Throttle)] == ["t"]
        stock.send(*(say.pub("u", b"x") for _ in range(20)))
        assert all(isinstance(stock.next(), Response) for _ in range(20))
        assert stock.silent()


def test_a_publisher_is_told_when_a_full_topic_has_room_again() -> None:
    """Tokens may come sooner than was thought when it was told to wait."""
    with (
        in_memory(max_held_messages=10) as broker,
        Client(broker.address, srtm={"publisher": "p", "group": None}) as ours,
    ):
        broker.post("/topic/create?topic=t", b"")
        broker.post("/topic/limit?topic=t&r=0.001&b=1", b"")
        ours.send(*(say.pub("t", b"x") for _ in range(20)))
        told = [answer for answer in (ours.next() for _ in range(21)) if isinstance(answer, Throttle)]
        assert [answer.retry_after_ms > 1_000 for answer in told] == [True]
        broker.post("/channel/create?topic=t&channel=c%23ephemeral", b"")
        broker.post("/topic/limit?topic=t&r=1000000&b=100", b"")
        assert ours.next() == Throttle("t", 0)


def test_a_topic_that_is_deleted_and_made_again_is_another_contract(tmp_path: Path) -> None:
    """Old grants, moves and tokens mean nothing to it, and a recording tells the two apart."""
    with (
        in_memory(controller=NOBODY, trace_folder=str(tmp_path)) as broker,
        Client(broker.address) as publisher,
        Client(broker.address).subscribe("t", "c", 100) as reader,
    ):
        broker.post("/srtm/trace/start?file=run.parquet")
        exchange(broker, said(grants={"t": Grant(BIRTH, 1, share(1, 50), 50 * TOKEN)}))
        publisher.publish("t", b"of the first")
        assert reader.message().body == b"of the first"
        again = {"t": Listed(BIRTH + 1, CONTRACT)}
        late = {"t": Grant(BIRTH, 2, share(1000, 1000), 1000 * TOKEN)}
        answer = exchange(broker, said(2, version=2, contracts=again, grants=late))
        assert answer.refused == {"t": "this broker knows a different contract"}
        report = answer.topics["t"]
        assert (report.birth, report.sequence, report.share) == (BIRTH + 1, 0, None)
        publisher.publish("t", b"of the second")
        assert reader.silent()
        answer = exchange(broker, said(3, grants={"t": Grant(BIRTH + 1, 3, share(1, 5), TOKEN)}))
        assert not answer.refused
        assert answer.topics["t"].share == share(1, 5)
        assert reader.message().body == b"of the second"
        overtaken = exchange(broker, said(2, grants={"t": Grant(BIRTH + 1, 4, share(9, 9), 9 * TOKEN)}))
        assert (overtaken.number, overtaken.acted) == (2, 3)
        assert overtaken.topics["t"].share == share(1, 5)
        broker.post("/srtm/trace/stop")
    births = json.loads(pq.read_metadata(tmp_path / "run.parquet").metadata[b"srtm.births"])
    assert [birth for _, birth in births["t"]] == [BIRTH, BIRTH + 1]


def test_a_topic_that_is_deleted_at_a_broker_comes_up_as_its_contract_promises(tmp_path: Path) -> None:
    contract = structs.replace(CONTRACT, durability="disk")
    with in_memory(controller=NOBODY, data_path=str(tmp_path)) as broker, Client(broker.address) as publisher:
        listed, grant = {"t": Listed(BIRTH, contract)}, {"t": Grant(BIRTH, 1, share(10, 10), 10 * TOKEN)}
        exchange(broker, said(contracts=listed, grants=grant, paused=["t"]))
        broker.post("/topic/delete?topic=t")
        publisher.publish("t", b"precious")
        report = exchange(broker, said(2, contracts=None, paused=["t"])).topics["t"]
        assert report.durable
        assert broker.do(lambda: broker.broker.topics["t"].paused)
        exchange(broker, said(3, contracts=None))
        assert not broker.do(lambda: broker.broker.topics["t"].paused)
