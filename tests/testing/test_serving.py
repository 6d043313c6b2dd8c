"""Processor time of brokers in virtual time: reads wait for each other, whatever their topic."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from srtm.broker.message import Message
from srtm.broker.topic import Topic
from srtm.control.members import DeclaredPublisher
from srtm.control.options import ControllerOptions
from srtm.control.store import Store
from srtm.model.broker_models import ServiceModel
from srtm.model.service import processing_latencies
from srtm.protocol.exchange import Contract
from srtm.testing.serving import Sent, Serving
from srtm.testing.virtual import VirtualCluster
from srtm.units import NANO_PER_TOKEN, NS_PER_MS

MODEL = ServiceModel(read_ns=100, message_ns=10, base_ns=5)


def messages(at_ns: int, number: int) -> list[Message]:
    return [Message(b"%016d" % each, at_ns, b"", "p") for each in range(number)]


def test_reads_wait_for_each_other_and_messages_for_their_token() -> None:
    serving, strict, lax = Serving(MODEL), Topic("strict", 10, 10), Topic("lax", 10, 10)
    first, second, late = messages(1_000, 3), messages(1_050, 1), messages(1_060, 1)
    for topic, each in ((lax, first), (strict, second)):
        serving.read(each, each[0].arrival_ns)
        for message in each:
            serving.release(topic, [message])
    serving.read(late, late[0].arrival_ns)
    late[0].release_ns = 2_000
    serving.release(strict, late)
    serving.account(1_900)
    assert lax.recent.total.tolist() == lax.recent.processing.tolist() == [135] * 3  # 100 + 3 · 10 + 5
    assert strict.recent.total.tolist() == [195]  # until 1,130 for the first read, then 110 + 5
    serving.account(3_000)
    assert strict.recent.total.tolist() == [195, 945]  # its token came last, so it does not wait for the processor
    assert strict.recent.processing.tolist() == [195, 5]
    assert (strict.recent.sent, lax.recent.sent) == (2, 3)


def test_the_load_of_a_neighbour_delays_a_topic() -> None:
    world = VirtualCluster(1, ControllerOptions(), Store(), 1, ServiceModel(read_ns=400_000, message_ns=50_000))
    world.run(1)
    assert world.controller
    for name, slo_ms in (("strict", 2), ("lax", 50)):
        contract = Contract(2_000_000, 200 * NANO_PER_TOKEN, slo_ns=slo_ms * NS_PER_MS, fit="none", adapt=False)
        world.controller.create(name, contract, world.now_ns)
    world.run(1)

    def late() -> float:
        world.run(12)
        seconds = world.brokers["broker-1"].topics["strict"].recent.history
        assert seconds[-1].processing_sketch.total == seconds[-1].total_sketch.total == seconds[-1].sent
        return sum(second.over for second in seconds) / sum(second.sent for second in seconds)

    world.publish("strict", [DeclaredPublisher(f"s{number}", 10.0) for number in range(40)])
    alone = late()
    world.kill_controller()  # it would send the neighbour away
    world.publish("lax", [DeclaredPublisher(f"l{number}", 10.0, batch=5) for number in range(400)])
    assert alone < 0.01 < 0.05 < late()


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), cores=st.integers(2, 3))
def test_the_processor_is_the_models_whenever_it_accounts(seed: int, cores: int) -> None:
    """Small reads overtake large ones, tokens come late, and seconds end in the middle of both."""
    rng = np.random.default_rng(seed)
    model = ServiceModel(read_ns=400, message_ns=90, base_ns=5, serial_ns=30, cores=cores)
    starts, sizes = np.cumsum(rng.integers(1, 900, 60)), rng.integers(1, 12, 60)
    arrivals = np.repeat(starts, sizes)
    releases = np.maximum.accumulate(arrivals + rng.integers(0, 2, len(arrivals)) * rng.integers(0, 3_000))
    serving, topic, sent = Serving(model), Topic("t", 10, 10), list[Sent]()
    serving.watch = lambda _, some: sent.append(some)
    all_messages = [Message(b"%016d" % number, int(at), b"", "p") for number, at in enumerate(arrivals.tolist())]
    for message, release_ns in zip(all_messages, releases.tolist(), strict=True):
        message.release_ns = release_ns
    waiting, read = list(all_messages), 0
    for now_ns in range(0, int(releases[-1]) + 100_000, 700):
        while read < len(starts) and starts[read] <= now_ns:
            first = int(sizes[:read].sum())
            serving.read(all_messages[first : first + sizes[read]], int(starts[read]))
            read += 1
        ready = [each for each in waiting if each.release_ns <= now_ns]
        waiting = waiting[len(ready) :]
        serving.release(topic, ready)
        serving.account(now_ns)
    found = Sent(*(np.concatenate(times) for times in zip(*sent, strict=True)))
    expected = releases + processing_latencies(
        arrivals, releases, np.repeat(np.arange(60), sizes).astype(np.int32), model
    )
    assert sorted(zip(*map(np.ndarray.tolist, found), strict=True)) == sorted(
        zip(arrivals.tolist(), releases.tolist(), expected.tolist(), strict=True)
    )
    assert topic.recent.sent == len(arrivals)
