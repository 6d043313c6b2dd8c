"""The controller on an event loop: clocks, exchanges over HTTP, jobs in threads, and watchers of topics.

`Controller` takes all decisions; this module carries them out, for as long as this process leads. Brokers hear nothing
that is not in the store. At most one exchange is under way with each broker. A broker whose host refuses the connection
is dead; one that does not answer may be alive. Dead brokers are asked again from time to time, because a broker that
answers is not dead, whatever its host said.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

import httpx

from srtm.control.access.access import Access
from srtm.control.access.brokers import Admission
from srtm.control.api.feed import Feed
from srtm.control.clock import now_ns
from srtm.control.discovery.registry import Came, Left, TopicChanged
from srtm.control.line import Line
from srtm.errors import LeadershipLost, ProtocolError
from srtm.protocol import exchange
from srtm.protocol.exchange import RefusalCode
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from srtm.control.choosing import Choosing
    from srtm.control.controller import Controller
    from srtm.control.discovery.registry import Change, Producer, Registry
    from srtm.control.members import Member
    from srtm.control.placing.load_distributor import LiveFitting

log = logging.getLogger(__name__)

_TICK_S = 0.05
_SOON_S = 0.005  # the same while a broker should hear something new
_CONNECT_S = 1.0
_NO_SUCH_PATH = (404, 405, 501)  # answers of programs that are not SRTM brokers


class Service:
    """A running controller."""

    def __init__(self, controller: Controller, registry: Registry) -> None:
        self.controller = controller
        self.registry = registry
        self.access = Access(controller.options, controller.store)
        self.admission = Admission(controller.options, self.access)
        self.feed = Feed(controller, lambda: [each.described() for each in self.admission.refused])
        self.superseded = asyncio.Event()  # a later controller has taken over the brokers
        controller.watch(self._changed)
        registry.on_change = self._registered
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_sent: dict[str, int] = {}
        self._adapted_ns = 0
        self._under_way: set[str] = set()
        self._elsewhere: dict[str, Producer] = {}  # brokers that registered under the name of another address
        self._wake = asyncio.Event()
        self._computing: set[LiveFitting | Choosing] = set()
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._line = Line(controller.options)

    def start(self) -> None:
        """Start all tasks on the running loop."""
        for producer in self.registry.nodes(now_ns()):  # brokers that registered before this controller led
            self._came(producer)
        self._spawn(self._beat())
        self._spawn(self.feed.run())
        self._spawn(self.feed.predict())

    async def stop(self) -> None:
        """Stop; brokers continue with the shares they hold."""
        self.registry.on_change = None
        self.feed.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._line.close()

    def producers_of(self, topic: str) -> set[str]:
        """Names of the brokers that have registered a topic."""
        return {producer.peer.hostname for producer in self.registry.producers(topic, now_ns())}

    def _registered(self, change: Change) -> None:
        """A broker registered, or its registration ended: then probe whether it is still there."""
        if isinstance(change, Came):
            self._came(change.producer)
        elif isinstance(change, Left):
            self._elsewhere = {name: each for name, each in self._elsewhere.items() if each is not change.producer}
            member = self.controller.members.get(change.producer.peer.hostname)
            if member is not None:
                self._spawn(self._probe(member))
        elif isinstance(change, TopicChanged):
            self._changed(change.topic)

    def _came(self, producer: Producer) -> None:
        peer = producer.peer
        known = self.controller.members.get(peer.hostname)
        elsewhere = known and (known.host, known.http_port) != (peer.broadcast_address, peer.http_port)
        if known and elsewhere and known.status == "alive":
            # It moved, or two brokers have the same name: a probe of the known address tells which.
            log.warning("BROKER(%s): also registered at %s; ignored until %s is gone", *_two(known, producer))
            self._elsewhere[known.name] = producer
            self._spawn(self._probe(known))
            return
        self.controller.joined(
            peer.hostname,
            peer.broadcast_address,
            peer.tcp_port,
            peer.http_port,
            now_ns(),
            peer.https_port if self._line.secure else 0,  # without a CA file, nobody could verify it
        )

    def _look_elsewhere(self) -> None:
        """Take in brokers that came back at another address, once nothing answers at the old one."""
        for name, producer in list(self._elsewhere.items()):
            known = self.controller.members.get(name)
            if known is None or known.status != "alive":
                del self._elsewhere[name]
                self._came(producer)

    async def changes(self, topic: str, longest_s: float) -> AsyncIterator[bool]:
        """Yield True at every change of a topic, and False after `longest_s` without one."""
        event = asyncio.Event()
        self._watchers.setdefault(topic, set()).add(event)
        try:
            while True:
                yield await _within(event, longest_s)
                event.clear()
        finally:
            self._watchers[topic].discard(event)
            if not self._watchers[topic]:
                del self._watchers[topic]

    def _changed(self, topic: str) -> None:
        self._wake.set()
        for event in self._watchers.get(topic, ()):
            event.set()

    async def _beat(self) -> None:
        while True:
            try:
                self._once()
            except Exception:  # one topic's failure must not end the leases of all others
                log.exception("CONTROLLER: tick failed; continuing")
            await _within(self._wake, _SOON_S if self.controller.urgent else _TICK_S)
            self._wake.clear()

    def _once(self) -> None:
        controller = self.controller
        for name, member in list(controller.members.items()) if controller.store.keeper.leads else ():
            if name not in self._under_way and controller.due(name, self._last_sent.get(name, 0), now_ns()):
                self._last_sent[name] = now_ns()
                self._under_way.add(name)
                self._spawn(self._exchange(member))
        self._look_elsewhere()
        for work in controller.jobs():
            if work not in self._computing:
                self._computing.add(work)
                self._spawn(self._compute(work))
        controller.tick(now_ns())
        if now_ns() - self._adapted_ns >= NS_PER_S:
            self._adapted_ns = now_ns()
            controller.adapt(self._adapted_ns)

    async def _compute(self, work: LiveFitting | Choosing) -> None:
        assert work.job is not None
        try:
            await asyncio.to_thread(work.job)
        except Exception as problem:  # another try would fail the same way
            log.exception("CONTROLLER: %s failed; abandoned", type(work).__name__)
            work.given_up = f"{type(problem).__name__}: {problem}"
        finally:
            self._computing.discard(work)
        self.controller.done(work, now_ns())

    async def _exchange(self, member: Member) -> None:
        controller, keeper = self.controller, self.controller.store.keeper
        try:
            if controller.members.get(member.name) is not member:  # removed meanwhile
                return
            if not self._line.reaches(member) or not keeper.leads:
                return
            said = controller.compose(member.name)
            await keeper.committed()  # brokers hear nothing that the next leader would not know
            status, body = await self._line.post(member, exchange.write(said))
            if status == 200:
                controller.heard(member.name, said, exchange.read(body, exchange.Answer), now_ns())
                if controller.urgent:
                    self._wake.set()
                return
            code = exchange.refusal_code(body)
            if code == RefusalCode.OLD_EPOCH:
                await keeper.confirm()
                self.superseded.set()
            elif status in _NO_SUCH_PATH or code == RefusalCode.NOT_MANAGED:
                controller.foreign(member.name, now_ns())
            else:
                self._complain(member, f"{status}: {body[:200].decode(errors='replace')}")
        except LeadershipLost as problem:
            log.info("BROKER(%s): no exchange: %s", member.name, problem)
        except httpx.ConnectError:
            await self._probe(member)
        except (httpx.HTTPError, httpx.InvalidURL, ProtocolError, TimeoutError, ValueError) as problem:
            self._complain(member, str(problem) or type(problem).__name__)
        finally:
            self._under_way.discard(member.name)

    def _complain(self, member: Member, problem: str) -> None:
        member.link.oddities += 1
        log.warning("BROKER(%s): exchange failed: %s", member.name, problem)

    async def _probe(self, member: Member) -> None:
        """Connect to a broker; if its host refuses, the broker is dead."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, writer = await asyncio.open_connection(member.host, member.http_port)
        except ConnectionRefusedError:
            if self.controller.members.get(member.name) is member:
                self.controller.died(member.name, now_ns(), "its host refuses the connection")
        except OSError as problem:
            log.warning("BROKER(%s): unreachable: %s", member.name, problem)
        else:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (problem := task.exception()):
            log.error("CONTROLLER: %s", problem, exc_info=problem)


def _two(known: Member, producer: Producer) -> tuple[str, str, str]:
    peer = producer.peer
    return known.name, f"{peer.broadcast_address}:{peer.http_port}", known.url


async def _within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
