"""The controller: which topics are under contract, where publishers belong, which broker holds which share.

A state machine without IO; time is an argument (`now_ns`, by a monotonic clock). In: brokers that come and go, their
answers, requests of operators and clients, and the passing of time. Out: exchanges to send (`compose`), jobs to run in
threads (`jobs`), and what must be kept (`store`). Its parts:

- `exchanges`: what brokers are told, and what their answers mean;
- `placing`: where publishers belong, and fittings; `relief` and `packing` move them at run time;
- `contracts` and `membership`: topics under contract; brokers and publishers that come and go;
- `tb_adaptor`: which broker should hold how much of a bucket;
- `lending`: which brokers lend each other tokens of a bucket, and by which rule;
- `advice`: what live arrivals say about contracts and groups.

Always holds, whatever comes and whatever is lost:

- for each topic, what brokers may have in force adds up to no more than the contract (`model.transfer`, and
  docs/adr/0012-control-exchange.md for leases);
- what no broker holds is given to one that can use it (docs/adr/0016-identity-and-liveness.md);
- a grant is in the store before it is sent, so a restarted controller knows what may be out;
- what belongs to a contract that is over, or to a broker that restarted since, changes nothing;
- nonsense from one broker changes nothing for others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.control import liveness
from srtm.control.advice import Advising
from srtm.control.choosing import Choosing
from srtm.control.contracts import Contracts
from srtm.control.exchanges import Exchanges
from srtm.control.lending import Lending
from srtm.control.membership import Membership
from srtm.control.placing.fitted import unmet
from srtm.control.placing.packing import Packing
from srtm.control.placing.placing import Placing
from srtm.control.placing.relief import Relief
from srtm.control.state import ControllerState
from srtm.control.statistics import ClusterStatistics, of_cluster
from srtm.control.tb_adaptor import TBAdaptor
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from srtm.control.advice import Batch
    from srtm.control.members import DeclaredPublisher, Member
    from srtm.control.options import ControllerOptions
    from srtm.control.placing.load_distributor import LiveFitting
    from srtm.control.store import Store
    from srtm.control.topic import ManagedTopic
    from srtm.protocol.exchange import Answer, Contract, Exchange


class Controller:
    """The parts of a controller, joined."""

    def __init__(self, options: ControllerOptions, store: Store, now_ns: int, first_epoch: int = 1) -> None:
        """Continue where the last controller on this store stopped."""
        service, mcap_mps = options.calibrated()
        self.state = ControllerState(options, store, store.next_epoch(first_epoch))
        self.placing = Placing(self.state, service)
        self.relief = Relief(self.state, self.placing)
        self.packing = Packing(self.state, self.placing)
        self.adaptor = TBAdaptor(self.state)
        self.lending = Lending(self.state)
        self.advising = Advising(self.state, self.placing)
        self.contracts = Contracts(self.state)
        self.membership = Membership(self.state, self.placing, self.contracts, mcap_mps)
        self.exchanges = Exchanges(self.state, self.membership, self.contracts, self.placing)
        self.membership.load(now_ns)
        self.contracts.load(now_ns)

    @property
    def options(self) -> ControllerOptions:
        """Its settings."""
        return self.state.options

    @property
    def store(self) -> Store:
        """What survives it."""
        return self.state.store

    @property
    def members(self) -> dict[str, Member]:
        """All brokers, by name."""
        return self.state.members

    @property
    def topics(self) -> dict[str, ManagedTopic]:
        """All topics under contract, by name."""
        return self.state.topics

    def watch(self, on_change: Callable[[str], None]) -> None:
        """Call `on_change` with the name of each topic that changes."""
        self.state.on_change = on_change

    def statistics(self, now_ns: int) -> ClusterStatistics:
        """A snapshot of all brokers and topics."""
        return of_cluster(self.state, now_ns)

    # Brokers come and go.

    def joined(self, name: str, host: str, tcp_port: int, http_port: int, now_ns: int, https_port: int = 0) -> None:
        """A broker registered; it is part of the cluster once it has answered."""
        self.membership.joined(name, host, tcp_port, http_port, now_ns, https_port)

    def died(self, name: str, now_ns: int, reason: str) -> None:
        """A broker is dead for certain: its shares are free, and its publishers go elsewhere."""
        if self.membership.died(name, now_ns, reason):
            self._plan(now_ns)

    def forget(self, name: str, now_ns: int) -> None:
        """An operator says that a broker will not come back."""
        self.died(name, now_ns, "removed by an operator")
        self.membership.forget(name)

    def drain(self, name: str, now_ns: int, *, on: bool = True) -> None:
        """Send all publishers of a broker elsewhere, and no new ones to it; or use it again."""
        self.membership.drain(self.state.member(name), now_ns, on=on)

    def foreign(self, name: str, now_ns: int) -> None:
        """Another program than our broker answers at its address."""
        if self.membership.foreign(name, now_ns):
            self._plan(now_ns)

    def recall(self, now_ns: int) -> None:
        """The store is lost: rebuild it from the contracts that brokers know."""
        self.contracts.recall(now_ns)

    # Topics and publishers.

    def create(self, name: str, contract: Contract, now_ns: int) -> ManagedTopic:
        """Put a topic under contract; changes nothing if it is under the same one.

        Publishers that are connected since the last contract of that name are placed; those that do not show up again
        are forgotten in time.
        """
        self.contracts.check_possible(name, contract)
        publishers = self.contracts.former_publishers(name)
        topic = self.contracts.create(name, contract, now_ns)
        if publishers:
            topic.layout.attendance.expect(publishers)
            self.register(name, publishers.values(), now_ns)
            self.placing.gather(topic, now_ns)
        return topic

    def change(self, name: str, contract: Contract, now_ns: int) -> ManagedTopic:
        """Change a topic's contract without interrupting it; a fitting starts over."""
        topic = self.state.topic(name)
        if contract != topic.contract:
            self.contracts.change(topic, contract, now_ns)
            self.advising.forget(topic, now_ns)
            if topic.fitting.running is not None:
                topic.journal.note(now_ns, "fit", "restarted: the contract changed")
                self.placing.refit(topic, now_ns)
            self.store.save_topic(topic)
            self.state.hurry_all()
            self.state.changed(topic)
        return topic

    def remove(self, name: str, now_ns: int) -> None:
        """End a contract; brokers then let the topic's messages pass freely."""
        self.contracts.remove(name, now_ns)

    def pause(self, name: str, now_ns: int, *, on: bool = True) -> None:
        """Stop a topic's delivery to its channels while brokers keep taking messages; or resume it."""
        self.contracts.pause(self.state.topic(name), now_ns, on=on)

    def register(
        self, name: str, publishers: Iterable[DeclaredPublisher], now_ns: int, lost: Iterable[str] = ()
    ) -> dict[str, str]:
        """The broker of each of these publishers and of their parts; one with a reachable broker stays there."""
        topic, lost = self.state.topic(name), list(lost)
        listed, place = self.membership.split(topic, publishers, lost), topic.layout.place
        if self.membership.register(topic, listed, lost):
            shared = topic.transfer.wanted.keys() >= place.brokers
            if not (shared and topic.established):
                topic.sharing.stale = True
                self._plan(now_ns)
            self._note_refusal(topic, now_ns)
            self.state.changed(topic)
            self.placing.fit_growth(topic, now_ns)
        return {publisher.id: place[publisher.id] for publisher in listed if publisher.id in place}

    def unregister(self, name: str, publisher: str) -> None:
        """Drop a publisher that will not come back."""
        topic = self.state.topic(name)
        if topic.layout.forgive(publisher) and publisher not in topic.layout.publishers:
            return
        for each in [publisher, *topic.layout.parts_of(publisher, 2)]:
            self.membership.unregister(topic, each)

    def gather(self, name: str, now_ns: int) -> None:
        """Order publishers that are connected elsewhere to their places at once."""
        self.placing.gather(self.state.topic(name), now_ns)

    def move(self, name: str, publishers: Iterable[str], broker: str, now_ns: int) -> None:
        """Send publishers to a broker, because an operator asked for it."""
        self.placing.move(self.state.topic(name), list(publishers), self.state.member(broker), now_ns)

    def fit(self, name: str, now_ns: int) -> None:
        """Start a fitting of a topic's publishers; it replaces one that is running."""
        self.placing.fit(self.state.topic(name), now_ns)

    def advise(self, batch: Batch, now_ns: int) -> bool:
        """Take in what `srtm advise` found in live arrivals; False if that batch was taken before."""
        return self.advising.take(batch, now_ns)

    # Exchanges.

    def due(self, name: str, last_sent_ns: int, now_ns: int) -> bool:
        """Whether it is time for the next exchange with a broker."""
        return self.exchanges.due(name, last_sent_ns, now_ns)

    @property
    def urgent(self) -> bool:
        """Whether a broker should hear something new at once."""
        return not self.state.due.isdisjoint(self.state.alive)

    def compose(self, name: str) -> Exchange:
        """The next exchange with a broker. What it grants is in the store."""
        return self.exchanges.compose(name)

    def heard(self, name: str, said: Exchange, answer: Answer, now_ns: int) -> None:
        """A broker has answered an exchange."""
        if name not in self.members:
            return
        if answer.broker != name:
            self.foreign(name, now_ns)
        elif self.exchanges.heard(name, said, answer, now_ns):
            self._plan(now_ns)

    # Time passes.

    def tick(self, now_ns: int) -> None:
        """Let leases end, publishers arrive and fittings continue. Call it every 0.1 s or so."""
        self.exchanges.check_silence(now_ns)
        for topic in self.topics.values():
            left = topic.layout.migration.left
            while left:
                broker, number = left.popitem()
                topic.journal.note(now_ns, "moved", f"{number} publishers away from {broker}")
        self._plan(now_ns)

    def adapt(self, now_ns: int) -> None:
        """The TB Adaptor's period is over. Call it once a second."""
        alive = set(self.state.alive)
        for topic in self.topics.values():
            self.membership.forget_missing(topic, now_ns)
            fitted = topic.fitting.running is None
            if topic.opened and not topic.settling(now_ns) and (fitted or topic.established):
                self.adaptor.follow(topic, alive, now_ns)
            if topic.opened and fitted and not topic.layout.migration.publishers:
                self.placing.fit_when_steady(topic, now_ns)
            self.lending.watch(topic, now_ns)
            liveness.watch(self.state, topic, now_ns)
        self.relief.watch(now_ns)
        self.packing.watch(now_ns)
        self.advising.watch(now_ns)
        self.contracts.forget_former(now_ns)
        self._plan(now_ns)

    def jobs(self) -> list[LiveFitting | Choosing]:
        """Fittings and choices that wait for their `job` to run; call `done` after it."""
        return [*self.placing.jobs(), *self.lending.jobs()]

    def done(self, work: LiveFitting | Choosing, now_ns: int) -> None:
        """The job of a fitting or a choice has run."""
        if isinstance(work, Choosing):
            self.lending.done(work, now_ns)
        elif not self.relief.stop(work, now_ns):
            self.placing.done(work, now_ns)

    def _note_refusal(self, topic: ManagedTopic, now_ns: int) -> None:
        """Say why publishers got no place; they ask again and again, so not each time."""
        fitting = topic.fitting
        if not topic.layout.refused or now_ns < fitting.refused_again_ns:
            return
        fitting.refused_again_ns = now_ns + round(self.options.calm_s * NS_PER_S)
        topic.journal.note(now_ns, "refused", fitting.refusal)
        if not topic.layout.place:
            fitting.last = unmet(topic.contract.policy, topic.layout, fitting.refusal)
            self.store.save_topic(topic)

    def _plan(self, now_ns: int) -> None:
        """Advance every topic, and grant what can be granted now."""
        if self.contracts.still_recalling(now_ns):
            return
        alive = set(self.state.alive)
        for topic in self.topics.values():
            if not topic.opened:
                self.contracts.try_open(topic, now_ns)
            self.placing.advance(topic, alive, now_ns)
            self.adaptor.share(topic, alive, now_ns)
        self.exchanges.hurry(now_ns)
