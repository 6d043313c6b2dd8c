"""One round of a live fitting: whether brokers keep a topic's SLO, second by second until that is certain."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from srtm.model.latency import Sketch
from srtm.model.sequential import TailTest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from srtm.control.placing.layout import Layout
    from srtm.protocol.exchange import Contract


@dataclass(slots=True)
class _AtBroker:
    test: TailTest
    after: int  # the number of the last second that was counted, or must not be
    sketch: Sketch = field(default_factory=Sketch)


class Measurement:
    """What a round has measured at each broker so far."""

    def __init__(self, contract: Contract, layout: Layout, brokers: Iterable[str]) -> None:
        """Begin with the second after the current one."""
        self._contract = contract
        self._layout = layout
        bursts = layout.bursts()
        self._at = {
            name: _AtBroker(TailTest(contract.quantile, bursts.get(name, 1)), layout.seen[name].last_number + 1)
            for name in brokers
        }

    def __len__(self) -> int:
        """The number of brokers that are measured."""
        return len(self._at)

    def look(self) -> None:
        """Count the seconds that brokers reported since the last look."""
        for name, at in self._at.items():
            for second in self._layout.seen[name].seconds:
                if second.number > at.after:
                    at.after = second.number
                    at.test.feed(second.sent, second.over)
                    at.sketch.add(Sketch.read(second.total))

    @property
    def certain(self) -> bool:
        """Whether every broker's verdict is certain."""
        return all(at.test.decision is not None for at in self._at.values())

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
