"""How a contract opens, in virtual time: all of r is soon where publishers are placed, and messages hardly wait."""

from __future__ import annotations

import pytest
from bench.opening import BUCKET, CASES, POLICIES, Opening, opened, publishers

from srtm.control.liveness import unanswered
from srtm.units import NS_PER_S

# An exchange takes up to 5 ms each way, and its answer is acted on 1 ms later.
ONE_EXCHANGE_S, AND_BACK_S = 0.007, 0.020
LIMITS = {
    "named by PUT, connect later": ONE_EXCHANGE_S,
    "sending before PUT": AND_BACK_S,
    "sending before PUT, which names them": ONE_EXCHANGE_S,
    "connect at once after PUT": ONE_EXCHANGE_S,
    "deleted and created again": 0.050,  # shares of the old contract are given up first
    "register when it is open, connect after 1 ms": AND_BACK_S,
    "a broker stops at PUT": 0.400,  # the others wait 0.25 s for it, and the controller looks every 0.1 s
    "a broker stopped 2 s before PUT": 0.025,  # of which publishers come after 20 ms
    "a broker stopped 2 s before PUT, which names publishers": 0.025,
    "a broker stops at PUT, which names publishers": None,  # its share is on its way, and may be in force
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", CASES)
def test_all_of_r_is_in_force_soon(case: str, policy: str) -> None:
    limit_s = LIMITS[case]
    for seed in range(2):
        found = opened(case, policy, seed)
        assert not found.exceeded
        if limit_s is not None:
            assert found.in_force_s is not None
            assert found.in_force_s <= limit_s
        assert found.p99_ms < 1.0
        assert found.worst_ms < 50.0


def test_a_broker_that_is_late_gets_its_share_when_it_answers() -> None:
    world = Opening(1, "lb")
    assert world.controller
    world.pause_broker("broker-2", NS_PER_S)
    topic = world.put()
    world.run(0.1)
    assert unanswered(world.controller.state, topic, world.now_ns).late == {"broker-2"}
    world.publish("traffic", publishers())
    world.run(0.1)
    assert topic.transfer.wanted.keys() == world.brokers.keys()  # it is waited for
    assert "broker-2" not in topic.transfer.possible
    world.run(0.2)
    assert sum(share.r_mtps for share in topic.transfer.held.values()) == BUCKET.r_mtps
    world.run(1.0)
    assert topic.opened
    assert topic.transfer.held["broker-2"].r == pytest.approx(BUCKET.r / 4, rel=0.01)


def test_the_first_split_waits_for_brokers_that_may_have_traffic_but_not_for_registered_publishers() -> None:
    world = Opening(1, "srtm")
    assert world.controller
    topic = world.put()
    world.controller.tick(world.now_ns)
    assert not topic.transfer.unanswered
    world.controller.register("traffic", publishers(), world.now_ns)
    assert {grant.broker for grant in topic.transfer.unanswered} == topic.layout.place.brokers
