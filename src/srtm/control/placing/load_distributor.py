"""The Load Distributor at work: one topic's fitting, driven over live brokers.

A loop without IO. `Search` (by `model.fitting`) says what to try. A `LiveFitting` asks for those places, waits until
publishers and shares have followed, measures until `model.sequential` is certain, and reports the result to the search.
Long computations are handed out as `job`, to run in a thread; call `resume` after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from srtm.control.placing.fitted import Fitted, FittingRound
from srtm.control.placing.measurement import Measurement, Rounds
from srtm.model.fitting import Measure, NoCapacity, Placed
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from srtm.control.placing.layout import Layout
    from srtm.control.placing.search import Search

MOVE_S = 15.0  # longest wait for publishers that have not moved yet
DRAIN_S = 20.0  # longest wait for the backlog to drain; after that, the backlog is what is measured
PREDICTED = 2 / 3  # of the longest round, if the model predicted the result
QUIET_S = 10.0  # without a single message for so long, nothing can be measured; of blocks of a second
_SETTLE_S = 1.0

State = Literal["computing", "moving", "settling", "measuring", "done"]


class LiveFitting:
    """A fitting of a topic's publishers, or of some of them, on brokers that may also carry other topics."""

    def __init__(
        self,
        search: Search,
        layout: Layout,
        now_ns: int,
        *,
        confirms: bool = False,
        how: Rounds = Rounds(),  # noqa: B008
    ) -> None:
        """With `confirms`, the topic is on the fewest brokers already: measure whether the SLO holds as it is."""
        self.search = search
        self.state: State = "settling" if confirms else "computing"
        self.job: Callable[[], None] | None = None if confirms else search.begin
        self.rounds: list[FittingRound] = []
        self.places: dict[str, str] = {}  # where publishers belong, by the last `resume`
        self.outcome: Fitted | None = None
        self.given_up = ""  # why the fitting ended without an outcome
        self._how = how
        self._layout = layout
        self._confirms = confirms
        self._confirmed = False
        self._begun_ns = self._round_ns = now_ns
        self.since_ns = now_ns  # when the state began
        self._measurement: Measurement | None = None

    @property
    def size(self) -> int:
        """How many publishers it places."""
        return len(self.search.publishers)

    @property
    def brokers(self) -> frozenset[str]:
        """The brokers that it may use."""
        return frozenset(broker.name for broker in self.search.brokers)

    @property
    def broken(self) -> dict[str, str]:
        """The neighbour that missed its SLO in the round that just ended, by broker."""
        return self._measurement.broken if self._measurement and self.state == "computing" else {}

    def resume(self, now_ns: int) -> None:
        """Continue after the job: set `places`, and measure them or end."""
        self.job, self.places = None, {}
        if self.given_up:
            self.state = "done"
            return
        if self._confirmed:
            self._end(len(self.rounds[-1].latency_ns), now_ns, met=True)
            return
        order = self.search.order
        if order is None:
            self._end(0, now_ns, self.search.problem)
        elif isinstance(order, Measure):
            self._place(order)
            self.state, self.since_ns, self._round_ns = "moving", now_ns, now_ns
        elif isinstance(order, Placed):
            self._place(order)
            self._end(order.k, now_ns, met=True)
        else:
            self._give_in(order, now_ns)

    def tick(self, now_ns: int, *, shares_done: bool) -> None:
        """Continue if it is time to; `shares_done` says that brokers have put in force what they should hold."""
        waited_s = (now_ns - self.since_ns) / NS_PER_S
        if self.state == "moving":
            if (shares_done and not self._layout.misplaced()) or waited_s > MOVE_S:
                self.state, self.since_ns = "settling", now_ns
        elif self.state == "settling":
            # Messages that publishers held back while they moved must pass first: r is little more than their rate.
            calm = not any(self._layout.seen[name].waiting for name in self._to_measure())
            if waited_s >= (_SETTLE_S if calm else DRAIN_S):
                self._measurement = Measurement(self.search.contract, self._layout, self._to_measure(), self._how)
                self.state, self.since_ns = "measuring", now_ns
        elif self.state == "measuring":
            self._measure(now_ns, waited_s)

    def _place(self, order: Measure | Placed) -> None:
        known = self._layout.publishers  # some may have left meanwhile
        self.places = {publisher: to for publisher, to in self.search.places(order).items() if publisher in known}

    def _give_in(self, order: NoCapacity, now_ns: int) -> None:
        if order.best:
            self._place(order.best)
        self._end(order.k, now_ns, order.reason)

    def _to_measure(self) -> list[str]:
        return sorted(self._layout.place.brokers & self.brokers) if self._confirms else self.search.to_measure

    def _measure(self, now_ns: int, waited_s: float) -> None:
        measurement = self._measurement
        assert measurement is not None
        measurement.look()
        longest_s = self._how.longest_s * (PREDICTED if self.search.predicts else 1)
        if waited_s < min(longest_s, QUIET_S * self._how.block_s) and not measurement.certain:
            return
        if waited_s < longest_s and measurement.hopeful:
            return
        self._conclude(measurement, now_ns)

    def _conclude(self, measurement: Measurement, now_ns: int) -> None:
        if silent := sorted(measurement.idle - measurement.stuck):
            self.given_up = f"no messages through {', '.join(silent)}, so there is nothing to measure"
            self.state, self.job = "computing", _nothing
            return
        latencies, slo_ns = measurement.latencies_ns(), self.search.contract.slo_ns
        broken = measurement.broken
        within = not broken and all(latency <= slo_ns for latency in latencies.values())
        seconds = (now_ns - self._round_ns) / NS_PER_S
        k = len(measurement) if self._confirms else self.search.k
        self.rounds.append(FittingRound(k, latencies, within, measurement.certain, seconds, broken))
        self.state, self._round_ns = "computing", now_ns
        if broken:  # its publishers leave those brokers, and a new search begins
            self.job = _nothing
        elif self._confirms:
            self._confirms, self._confirmed = False, within
            self.job = _nothing if within else self.search.begin
        else:
            self.job = lambda: self.search.tell(latencies, seconds)

    def _end(self, k: int, now_ns: int, reason: str = "", *, met: bool = False) -> None:
        self.state = "done"
        self.outcome = Fitted(
            self.search.contract.policy,
            met,
            k,
            sum(publisher.rate_mps for publisher in self.search.publishers),
            tuple(self.rounds),
            (now_ns - self._begun_ns) / NS_PER_S,
            reason,
        )


def _nothing() -> None:
    """A job that has nothing to compute."""
