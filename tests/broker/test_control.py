"""What the control plane asks of a broker, on real sockets."""

from __future__ import annotations

import json
from typing import Any

from srtm.protocol import client as say
from srtm.protocol.client import Response
from srtm.protocol.orders import Migrate, Throttle
from tests.broker.running import Client, Running, running

TOKEN = 10**9


def order(broker: Running, path: str, **document: Any) -> tuple[int, Any]:
    status, body = broker.post(path, json.dumps(document).encode())
    return status, json.loads(body)


def test_a_grant_is_put_in_force_once() -> None:
    with running() as broker:
        first = {"topic": "t", "epoch": 1, "sequence": 1, "r_mtps": 1_000, "b_ntok": 9 * TOKEN, "gift_ntok": 5 * TOKEN}
        assert order(broker, "/srtm/grant", **first) == (200, {"epoch": 1, "sequence": 1, "surrendered_ntok": 0})
        stats = broker.get("/stats?format=json&topic=t")["topics"][0]["srtm"]
        assert (stats["r"], stats["b"]) == (1, 9)
        assert 5 <= stats["tokens"] < 6  # what came along, not a full bucket
        again = {**first, "gift_ntok": 9 * TOKEN}
        assert order(broker, "/srtm/grant", **again)[0] == 200
        assert broker.get("/stats?format=json&topic=t")["topics"][0]["srtm"]["tokens"] < 7
        smaller = {**first, "sequence": 2, "b_ntok": 2 * TOKEN, "gift_ntok": 0}
        status, answer = order(broker, "/srtm/grant", **smaller)
        assert status == 200
        assert 3 * TOKEN <= answer["surrendered_ntok"] < 5 * TOKEN
        status, refusal = order(broker, "/srtm/grant", **first)
        assert status == 409
        assert "comes after 1, 2" in refusal["message"]
        assert order(broker, "/srtm/grant", topic="t", epoch=2, sequence=0, r_mtps=None, b_ntok=None)[0] == 200
        assert broker.get("/stats?format=json&topic=t")["topics"][0]["srtm"]["r"] is None


def test_bad_orders_are_refused() -> None:
    good = {"topic": "t", "epoch": 1, "sequence": 1, "r_mtps": 1_000, "b_ntok": TOKEN}
    with running() as broker:
        for wrong in ({"topic": "a b"}, {"epoch": -1}, {"sequence": "1"}, {"b_ntok": 1}, {"r_mtps": None}):
            status, answer = order(broker, "/srtm/grant", **{**good, **wrong})
            assert (status, "INVALID_GRANT" in answer["message"]) == (400, True)
        assert broker.post("/srtm/grant", b"{")[0] == 400
        moves: list[dict[str, Any]] = [{"to": []}, {"publishers": "p"}, {"topic": "a b"}]
        for wrong_move in moves:
            move = {"topic": "t", "publishers": ["p"], "to": ["a:1"], **wrong_move}
            assert order(broker, "/srtm/migrate", **move)[0] == 400


def test_publishers_that_declared_themselves_are_sent_elsewhere_and_others_hear_nothing() -> None:
    with (
        running() as broker,
        Client(broker.address, srtm={"publisher": "p", "group": "g"}) as ours,
        Client(broker.address) as stock,
    ):
        stock.publish("t", b"x")
        status, answer = order(broker, "/srtm/migrate", topic="t", publishers=["p", "q"], to=["other:4150"])
        assert (status, answer) == (200, {"ordered": 1, "missing": ["q"]})
        assert ours.next() == Migrate("t", ("other:4150",))
        assert stock.silent()


def test_a_publisher_of_a_full_topic_is_told_so_if_it_declared_itself() -> None:
    with (
        running(max_held_messages=10) as broker,
        Client(broker.address, srtm={"publisher": "p", "group": None}) as ours,
        Client(broker.address) as stock,
    ):
        ours.send(*(say.pub("t", b"x") for _ in range(20)))
        answers = [ours.next() for _ in range(21)]
        assert [answer.topic for answer in answers if isinstance(answer, Throttle)] == ["t"]
        stock.send(*(say.pub("u", b"x") for _ in range(20)))
        assert all(isinstance(stock.next(), Response) for _ in range(20))
        assert stock.silent()
