"""The search of a live fitting: which assignment of publishers to brokers to try next, by `model.fitting`.

In: publishers as declared, brokers with room, latencies as measured. Out: the broker of each publisher. Predictions
make a search slow, so `begin` and `tell` are for a thread beside everything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from srtm.control.placing.expected import expected
from srtm.errors import SRTMError
from srtm.model.fitting import Fitting, Measure, NoCapacity, Placed
from srtm.model.latency import SLO
from srtm.model.placement import Roster, rcap
from srtm.model.room import usual_batch
from srtm.model.server import Background
from srtm.sim.simulate import SimulatedBroker, SimulatedCluster, SimulatedTopic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from srtm.control.members import DeclaredPublisher
    from srtm.model.broker_models import ServiceModel
    from srtm.model.placement import Broker
    from srtm.protocol.exchange import Contract
    from srtm.sim.simulate import Loans


class Search:
    """The search for places of one topic's publishers."""

    def __init__(
        self,
        contract: Contract,
        publishers: Sequence[DeclaredPublisher],
        brokers: Sequence[Broker],
        service: ServiceModel,
        *,
        predicts: bool,
        seed: int = 0,
        loans: Loans | None = None,
    ) -> None:
        """With `predicts`, the model comes first and measuring confirms it; it knows of `loans` between brokers."""
        self.contract = contract
        self.publishers = tuple(publishers)
        self.brokers = tuple(brokers)
        self.predicts = predicts
        self.problem = ""  # why no search is possible
        self._service = service
        self._seed = seed
        self._loans = loans
        self._fitting: Fitting | None = None

    @property
    def order(self) -> Measure | Placed | NoCapacity | None:
        """What to do next; None if no search is possible."""
        return self._fitting.order if self._fitting is not None else None

    @property
    def to_measure(self) -> list[str]:
        """The brokers to measure in this round."""
        return [self.brokers[number].name for number in self._measure.brokers]

    @property
    def k(self) -> int:
        """How many brokers carry publishers in this round."""
        broker_of = self._measure.broker_of
        return len(np.unique(broker_of[broker_of >= 0]))

    def begin(self) -> None:
        """Start the search."""
        try:
            self._fitting = Fitting(
                Roster(publisher.publisher for publisher in self.publishers),
                self.brokers,
                self.contract.policy,
                self.contract.slo_ns,
                seed=self._seed,
                max_brokers=int(self.contract.bucket.b),
                predict=self._prediction() if self.predicts else None,
            )
        except SRTMError as problem:
            self.problem = str(problem)

    def tell(self, latency_ns: Mapping[str, int], seconds: float) -> None:
        """Continue with the latencies that a round measured, by broker."""
        assert self._fitting is not None
        numbers = {number: latency_ns[each.name] for number, each in enumerate(self.brokers) if each.name in latency_ns}
        self._fitting.tell(numbers, seconds)

    def places(self, order: Measure | Placed) -> dict[str, str]:
        """The broker of each publisher; unplaced ones are parked where there is room, at brokers that are not measured.

        If no such broker has room, neighbours come first: the publishers spoil the measurement.
        """
        measured = order.brokers if isinstance(order, Measure) else ()
        rates = [round(1000 * publisher.rate_mps) for publisher in self.publishers]
        room = [rcap(broker) for broker in self.brokers]
        for rate, broker in zip(rates, order.broker_of.tolist(), strict=True):
            if broker >= 0:
                room[broker] -= rate
        places = {}
        for publisher, rate, broker in zip(self.publishers, rates, order.broker_of.tolist(), strict=True):
            at = broker
            if at < 0:
                at = max(range(len(room)), key=lambda i: (room[i] >= rate and i not in measured, room[i], -i))
                room[at] -= rate
            places[publisher.id] = self.brokers[at].name
        return places

    @property
    def _measure(self) -> Measure:
        order = self.order
        assert isinstance(order, Measure)
        return order

    def _prediction(self) -> Callable[[Measure], Mapping[int, int]]:
        contract = self.contract
        traffic = SimulatedTopic(
            [publisher.publisher for publisher in self.publishers],
            expected(self.publishers, self._seed),
            contract.bucket,
        )
        batch = usual_batch((publisher.rate_mps, publisher.batch) for publisher in self.publishers)
        simulated = [
            SimulatedBroker(
                broker.name,
                broker.mcap_mps,
                self._service,
                Background(broker.allocated_mps, batch) if broker.allocated_mps else None,
            )
            for broker in self.brokers
        ]
        slo = SLO(contract.slo_ns, contract.quantile)
        return SimulatedCluster(traffic, simulated, slo, self._seed, self._loans).measure
