"""One round of a live fitting: whether brokers keep the SLOs of a topic and of its neighbours, second by second.

A neighbour whose messages wait for tokens says nothing about the broker, so such seconds of it are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from srtm.control.reports import waits_for_tokens
from srtm.model.latency import Sketch
from srtm.model.sequential import LOOKS, TailTest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from srtm.control.placing.layout import Layout
    from srtm.protocol.exchange import Contract, Second


class Neighbour(NamedTuple):
    """Another topic, whose SLO must be kept as well."""

    name: str
    contract: Contract
    layout: Layout


def _nobody(_: str) -> Iterable[Neighbour]:
    return ()


class Rounds(NamedTuple):
    """How rounds measure: verdicts are on blocks of seconds, longer ones for backlogs that last for many seconds.

    `beside` are the topics at a broker that must not suffer.
    """

    longest_s: float = 60.0  # as in the paper
    block_s: int = 1
    beside: Callable[[str], Iterable[Neighbour]] = _nobody


@dataclass(slots=True)
class _AtBroker:
    test: TailTest
    after: int  # the number of the last second that was counted, or must not be
    sketch: Sketch = field(default_factory=Sketch)
    seconds: int = 0  # of a block that is not complete, and what they had
    sent: int = 0
    over: int = 0

    def feed(self, second: Second, block_s: int) -> None:
        """Count a second; the test is told whole blocks."""
        self.seconds, self.sent, self.over = self.seconds + 1, self.sent + second.sent, self.over + second.over
        if self.seconds == block_s:
            self.test.feed(self.sent, self.over)
            self.seconds = self.sent = self.over = 0


class Measurement:
    """What a round has measured at each broker so far."""

    def __init__(
        self,
        contract: Contract,
        layout: Layout,
        brokers: Iterable[str],
        how: Rounds = Rounds(),  # noqa: B008
    ) -> None:
        """Begin with the second after the current one."""
        self._block_s = how.block_s
        self._contract = contract
        self._layout = layout
        bursts = layout.bursts()
        self._at = {
            name: _AtBroker(TailTest(contract.quantile, bursts.get(name, 1)), layout.seen[name].last_number + 1)
            for name in brokers
        }
        self._beside = [
            (name, other, _AtBroker(TailTest(other.contract.quantile), other.layout.seen[name].last_number + 1))
            for name in self._at
            for other in how.beside(name)
            if name in other.layout.seen
        ]

    def __len__(self) -> int:
        """The number of brokers that are measured."""
        return len(self._at)

    def look(self) -> None:
        """Count the seconds that brokers reported since the last look."""
        for name, at in self._at.items():
            for second in self._layout.seen[name].seconds:
                if second.number > at.after:
                    at.after = second.number
                    at.feed(second, self._block_s)
                    at.sketch.add(Sketch.read(second.total))
        for name, other, at in self._beside:
            for second in other.layout.seen[name].seconds:
                if second.number > at.after:
                    at.after = second.number
                    if not waits_for_tokens(other.contract, second):
                        at.feed(second, self._block_s)

    @property
    def certain(self) -> bool:
        """Whether every broker's verdict is certain."""
        return all(at.test.decision is not None for at in self._at.values())

    @property
    def broken(self) -> dict[str, str]:
        """A neighbour that misses its SLO, by broker."""
        return {
            name: other.name
            for name, other, at in self._beside
            if at.test.decision is False or (at.test.blocks >= LOOKS[0] and not at.test.likelier)
        }

    @property
    def hopeful(self) -> bool:
        """Whether more seconds may settle a verdict: an undecided broker has traffic."""
        return any(at.test.sent for at in self._at.values() if at.test.decision is None)

    @property
    def idle(self) -> set[str]:
        """Brokers that sent nothing."""
        return {name for name, at in self._at.items() if not at.test.sent}

    @property
    def stuck(self) -> set[str]:
        """Idle brokers whose messages wait: they have no share, or next to none."""
        return {name for name in self.idle if self._layout.seen[name].waiting}

    def latencies_ns(self) -> Mapping[str, int]:
        """Latency at the SLO's quantile by broker, above the limit exactly if the SLO is not met."""
        contract, stuck, latencies = self._contract, self.stuck, {}
        for name, at in self._at.items():
            met = (at.test.likelier if at.test.decision is None else at.test.decision) and name not in stuck
            seen_ns = at.sketch.quantile_ns(contract.quantile)
            # Bins are coarse, but messages over the limit were counted exactly.
            latencies[name] = min(seen_ns, contract.slo_ns) if met else max(seen_ns, contract.slo_ns + 1)
        return latencies
