"""Known arrivals in virtual time: they come when they should, lap after lap."""

from __future__ import annotations

import numpy as np

from srtm.control.members import DeclaredPublisher
from srtm.testing.schedule import Schedule
from srtm.testing.traffic import Replay, VirtualPublisher
from srtm.workload.publishers import Arrivals


def test_arrivals_are_sent_in_order_over_and_over() -> None:
    schedule, sent = Schedule(1_000), list[tuple[int, str, int]]()
    a, b = (VirtualPublisher(DeclaredPublisher(name), "t", lambda _: None) for name in "ab")
    arrivals = Arrivals(np.array([0, 0, 0, 40, 40, 90]), np.array([1, 1, 0, 0, 0, 1], np.int32))

    def send(publisher: VirtualPublisher, messages: int) -> None:
        sent.append((schedule.now_ns, publisher.declared.id, messages))

    laps = Replay([a, b], arrivals, 100, schedule, send)
    schedule.run(150e-9)
    assert sent == [(1_000, "b", 2), (1_000, "a", 1), (1_040, "a", 2), (1_090, "b", 1), *sent[4:]]
    assert sent[4:] == [(1_100, "b", 2), (1_100, "a", 1), (1_140, "a", 2)]
    assert laps.began_ns == 1_100
