"""Processor time of brokers in virtual time: reads wait for each other, whatever their topic."""

from __future__ import annotations

from srtm.broker.message import Message
from srtm.broker.topic import Topic
from srtm.control.members import DeclaredPublisher
from srtm.control.options import ControllerOptions
from srtm.control.store import Store
from srtm.model.broker_models import ServiceModel
from srtm.protocol.exchange import Contract
from srtm.testing.serving import Serving
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
