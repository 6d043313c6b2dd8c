"""A publisher that is faster than a broker, split over connections: a real controller and real brokers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import httpx
import pytest

from srtm.client import Cluster, Publisher, Subscriber
from srtm.client.cluster import Place, PublisherSpec
from srtm.client.connection import ConnectionOptions
from srtm.client.load import Load, LoadOptions, LoadReport
from srtm.client.parts import Parts
from srtm.errors import ClientError
from srtm.units import NS_PER_S
from srtm.workload.publishers import Population, Workload
from tests.broker.running import PATIENCE_S, Running, running
from tests.client.test_publisher import at
from tests.control.running import controller
from tests.programs import wait_for

RATE, MCAP = 2_500.0, 1_000.0  # takes three brokers


class Brokers:
    """A controller whose brokers carry a thousand messages a second each, and brokers that come and go."""

    def __init__(self, stack: ExitStack) -> None:
        self._served = stack.enter_context(controller(mcap_mps=MCAP))
        self._stack = stack
        self._stops: dict[str, Callable[[], object]] = {}
        self.url = f"http://127.0.0.1:{self._served.http}"
        self.api = stack.enter_context(httpx.Client(base_url=self.url, timeout=PATIENCE_S, trust_env=False))

    def start(self, *names: str) -> None:
        for name in names:
            own = self._stack.enter_context(ExitStack())
            tcp = f"127.0.0.1:{self._served.tcp}"
            own.enter_context(running(controller=tcp, broadcast_address="127.0.0.1", name=name))
            self._stops[name] = own.close
        self.until_alive(set(self._stops))

    def stop(self, name: str) -> None:
        self._stops.pop(name)()

    def until_alive(self, names: set[str]) -> None:
        wait_for(lambda: {each["name"] for each in self._brokers() if each["status"] == "alive"} == names)

    def names(self, publisher: Publisher) -> list[str]:
        """The brokers that a publisher is connected to."""
        names = {each["address"]: each["name"] for each in self._brokers()}
        return [names[address] for address in publisher.addresses]

    def rates(self) -> list[float]:
        return [each["rate"] for each in self.api.get("/v1/topics/t/publishers").json()["publishers"]]

    def _brokers(self) -> list[dict[str, str]]:
        found: list[dict[str, str]] = self.api.get("/v1/brokers").json()["brokers"]
        return found


@contextmanager
def brokers(*names: str) -> Iterator[Brokers]:
    with ExitStack() as stack:
        found = Brokers(stack)
        found.start(*names)
        contract = {"r": 1_000_000, "b": 10_000, "slo_ms": 50, "fit": "none"}
        assert found.api.put("/v1/topics/t", json=contract).status_code == 200
        yield found


@asynccontextmanager
async def heard(url: str) -> AsyncIterator[list[tuple[str | None, int]]]:
    """The broker and the number of each message of the topic."""
    found: list[tuple[str | None, int]] = []

    async def hear(subscriber: Subscriber) -> None:
        async for message in subscriber:
            found.append((message.broker, int(message.body)))
            await message.finish()

    async with Subscriber("t", "c", controller=url) as subscriber:
        hearing = asyncio.create_task(hear(subscriber))
        yield found
        await subscriber.close()
        await hearing


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(holds):
            await asyncio.sleep(0.02)


async def publish(publisher: Publisher, numbers: range) -> None:
    """Publish, with a hundred messages in flight."""
    for first in numbers[::100]:
        some = range(first, min(first + 100, numbers.stop))
        await asyncio.gather(*(publisher.publish_nowait(b"%d" % number) for number in some))


def test_parts_are_at_different_brokers_and_keep_their_order() -> None:
    with brokers("one", "two", "three", "four") as cluster:

        async def story() -> list[tuple[str | None, int]]:
            async with heard(cluster.url) as found:
                async with Publisher("t", controller=cluster.url, id="p", rate=RATE, split=True) as publisher:
                    assert len(set(publisher.addresses)) == 3
                    assert cluster.rates() == [pytest.approx(RATE / 3)] * 3
                    await publish(publisher, range(3_000))
                    assert publisher.in_flight == 0
                await until(lambda: len(found) >= 3_000)
            return found

        found = asyncio.run(story())
        assert sorted(number for _, number in found) == list(range(3_000))
        for broker in {broker for broker, _ in found}:
            here = [number for at, number in found if at == broker]
            assert len(here) == pytest.approx(1_000, rel=0.1)
            assert here == sorted(here)


def test_a_part_follows_an_order_while_the_others_stay_and_nothing_is_lost_or_doubled() -> None:
    with brokers("one", "two", "three", "four") as cluster:

        async def story() -> list[tuple[str | None, int]]:
            async with heard(cluster.url) as found:
                async with Publisher("t", controller=cluster.url, id="p", rate=RATE, split=True) as publisher:
                    before = cluster.names(publisher)
                    (free,) = {"one", "two", "three", "four"} - set(before)
                    part = cluster.api.get("/v1/topics/t/publishers").json()["publishers"][1]
                    working = asyncio.create_task(publish(publisher, range(5_000)))
                    order = {"publishers": [part["id"]], "broker": free}
                    await asyncio.to_thread(cluster.api.post, "/v1/topics/t/move", json=order)
                    await working
                    await until(lambda: cluster.names(publisher) == [before[0], free, before[2]])
                    assert publisher.migrations == 1
                await until(lambda: len(found) >= 5_000)
            return found

        assert sorted(number for _, number in asyncio.run(story())) == list(range(5_000))


def test_a_broker_dies_and_its_part_goes_on_elsewhere() -> None:
    with brokers("one", "two", "three") as cluster:

        async def story() -> None:
            async with Publisher("t", controller=cluster.url, id="p", rate=RATE, split=True) as publisher:
                before = cluster.names(publisher)
                working = asyncio.create_task(publish(publisher, range(5_000)))
                await asyncio.to_thread(cluster.stop, before[1])
                await working  # every message is acknowledged by a broker
                await until(lambda: len(publisher.addresses) == 3)
                after = cluster.names(publisher)
                assert [after[0], after[2]] == [before[0], before[2]]
                assert after[1] in (after[0], after[2])  # there is no other

        asyncio.run(story())


def test_more_parts_come_with_more_brokers() -> None:
    with brokers("one", "two") as cluster:

        async def story() -> None:
            async with Publisher("t", controller=cluster.url, id="p", rate=RATE, split=True) as publisher:
                assert sorted(cluster.names(publisher)) == ["one", "two"]
                await asyncio.to_thread(cluster.start, "three", "four")
                await asyncio.to_thread(cluster.stop, "two")
                await until(lambda: sorted(cluster.names(publisher)) == ["four", "one", "three"])
                await publish(publisher, range(1_000))

        asyncio.run(story())


def test_parts_that_are_not_needed_any_more_send_their_last_messages_and_close() -> None:
    with brokers("one", "two", "three") as cluster:

        async def story() -> None:
            async with Publisher("t", controller=cluster.url, id="p", rate=RATE, split=True) as publisher:
                gone = cluster.names(publisher)[2]
                await asyncio.to_thread(cluster.api.delete, "/v1/topics/t")  # without a contract, nothing is split
                working = asyncio.create_task(publish(publisher, range(5_000)))
                await asyncio.to_thread(cluster.stop, gone)
                await working
                await until(lambda: len(publisher.addresses) == 1)
                await publish(publisher, range(100))

        asyncio.run(story())


def test_a_publisher_without_an_id_takes_its_parts_along() -> None:
    with brokers("one", "two", "three") as cluster:

        async def story() -> None:
            async with Publisher("t", controller=cluster.url, rate=RATE, split=True) as publisher:
                await publisher.publish(b"1")
                assert len(cluster.rates()) == 3
            assert cluster.rates() == []

        asyncio.run(story())


def test_opening_fails_with_the_first_part_that_fails_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(broker: Running, dead: str, mute: str) -> None:
        answers = iter([[Place("p", at(broker)), Place("p␟2", dead), Place("p␟3", mute)]])
        async with Cluster("http://127.0.0.1:1") as cluster:

            async def parts(*_: object) -> list[Place]:
                if (answer := next(answers, None)) is None:
                    raise ClientError("no room any more")
                return answer

            monkeypatch.setattr(cluster, "parts", parts)
            spec = PublisherSpec("p", rate=RATE, split=True)
            opening = Parts(cluster, "t", spec, ConnectionOptions(), lambda _: None, lambda *_: None)
            with pytest.raises(ClientError, match="no room any more"):
                await opening.open(PATIENCE_S)
            assert opening.addresses == []
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await until(lambda: not broker.do(lambda: broker.broker.clients.connections))

    with running() as broker, socket.create_server(("127.0.0.1", 0)) as mute:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            dead = f"127.0.0.1:{listener.getsockname()[1]}"
        asyncio.run(story(broker, dead, f"127.0.0.1:{mute.getsockname()[1]}"))


def test_a_load_may_be_split() -> None:
    population = Population(2, rate_mps=1_200.0, batch=1, group_size=1)
    work = Workload((population,), 2 * NS_PER_S, 7)

    async def story(url: str) -> LoadReport:
        async with Cluster(url) as cluster:
            return await Load(LoadOptions("t", work, split=True), cluster).go(lambda _: None)

    with brokers("one", "two", "three", "four") as cluster:
        report = asyncio.run(story(cluster.url))
        assert len(cluster.rates()) == 4  # the load does not unregister
        assert len(report.brokers) >= 2
        assert (report.received, report.lost, report.doubled) == (len(work.arrivals().times_ns), 0, 0)


def test_the_controller_refuses_ids_that_could_be_parts() -> None:
    with brokers("one") as cluster:

        async def story() -> None:
            async with Cluster(cluster.url) as found:
                with pytest.raises(ClientError, match="cannot contain '␟'"):
                    await found.where("t", PublisherSpec("p␟2"))
                with pytest.raises(ClientError, match="at most 250 characters"):
                    await found.where("t", PublisherSpec("p" * 251, split=True))

        asyncio.run(story())
