"""Named models of a broker: the cost of messages, and the rate that placement assumes it carries.

`srtm plan`, the simulator and a controller without a calibration all choose from one list, with one default.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from srtm.errors import InputError
from srtm.model.capacity import Stream, exceeds, wait
from srtm.units import NS_PER_MS, NS_PER_S, Number, exact

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_CORES = 1_024
_STEPS = 24  # of a bisection: one part in ten million


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """A broker's costs in ns: `read_ns` (w) per read event on one of its `cores`, `message_ns` (s) per message.

    `serial_ns` (t) is the cost of each message in its topic's serial stage, `base_ns` a latency that all have. On one
    core the serial stage has no thread of its own, and it costs `wake_ns` to wake its idle loop before
    messages leave, and `rest_ns` after that, until it can sleep again (`model/service.py`).
    """

    read_ns: int
    message_ns: int
    base_ns: int = 0
    serial_ns: int = 0
    cores: int = 1
    wake_ns: int = 0
    rest_ns: int = 0

    def __post_init__(self) -> None:
        """Costs are positive and whole."""
        costs = (self.read_ns, self.message_ns, self.base_ns, self.serial_ns, self.wake_ns, self.rest_ns)
        if not all(isinstance(cost, int) and cost >= 0 for cost in costs) or self.cost_ns(1) == 0:
            raise InputError(f"the costs of a broker must be positive whole nanoseconds: {self}")
        if not isinstance(self.cores, int) or not 1 <= self.cores <= _MOST_CORES:
            raise InputError(f"a broker has 1 to {_MOST_CORES:,} cores, not {self.cores!r}")
        if self.wake_ns + self.rest_ns and self.cores > 1:
            raise InputError(f"only a broker with one core wakes up: {self}")

    def reading_ns(self, messages: int) -> int:
        """The cost of a read event on its core."""
        return self.read_ns + messages * self.message_ns

    def cost_ns(self, messages: int) -> int:
        """All processor time that a read event causes, until its messages are sent, but for waking up."""
        return self.reading_ns(messages) + messages * self.serial_ns

    def share(self, rate_mps: float, batch: int) -> float:
        """The part of all its cores that traffic in batches takes."""
        return rate_mps / batch * self.cost_ns(batch) / (self.cores * NS_PER_S)

    def stream(self, rate_mps: float, batch: int) -> Stream:
        """Traffic in batches, as work that its reads find on the cores; a serial stage is another topic's own."""
        on_cores = self.cost_ns if self.cores == 1 else self.reading_ns
        return Stream(rate_mps / batch / NS_PER_S, on_cores(batch) / self.cores)

    def busy(self, streams: Sequence[Stream]) -> float:
        """The part of its cores that streams keep busy together, waking up included."""
        return wait(streams, self.wake_ns + self.rest_ns).load

    def mcap_mps(self, slo_ns: int, quantile: Number = "0.99", batch: int = 1, beside: Sequence[Stream] = ()) -> float:
        """The highest rate of Poisson batches whose latency stays within the SLO at this quantile.

        `beside` is what other topics use of the broker.
        """
        return _mcap_mps(self, slo_ns, quantile, batch, tuple(beside))

    def most_mps(self, batch: int) -> float:
        """The rate that keeps its bottleneck busy all the time."""
        if self.cores == 1:
            return batch * NS_PER_S / self.cost_ns(batch)
        slowest_ns = max(self.reading_ns(batch) / self.cores, batch * self.serial_ns)
        return batch * NS_PER_S / slowest_ns


@lru_cache(maxsize=4_096)  # placement asks the same of many brokers, again and again
def _mcap_mps(model: ServiceModel, slo_ns: int, quantile: Number, batch: int, beside: tuple[Stream, ...]) -> float:
    tail = 1 - float(exact(quantile, "quantile"))
    apart = model.cores > 1
    own_ns = model.base_ns + model.reading_ns(batch)
    # On one core, the messages of a turn leave together.
    leave_ns = [n * model.serial_ns for n in range(1, batch + 1)] if apart else [batch * model.serial_ns]

    def late(rate_mps: float) -> float:
        serial = Stream(rate_mps / batch / NS_PER_S, batch * model.serial_ns) if apart else Stream(0.0, 0.0)
        waits = wait((model.stream(rate_mps, batch), *beside), model.wake_ns + model.rest_ns), wait((serial,))
        queued = sum(exceeds(slo_ns - own_ns - after, *waits) for after in leave_ns) / len(leave_ns)
        return queued + (1 - waits[0].load if slo_ns < own_ns + leave_ns[-1] + model.wake_ns else 0.0)

    if late(0.0) > tail:
        return 0.0
    low, high = 0.0, model.most_mps(batch)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if late(middle) <= tail else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class BrokerModel:
    """What messages cost a broker, and its mcap: the rate that placement assumes it can carry."""

    service: ServiceModel
    mcap_mps: float

    def slower(self, factor: int) -> BrokerModel:
        """The same broker by a clock that runs `factor` times as fast: all costs are higher, its mcap is lower."""
        service, each = self.service, fields(self.service)
        costs = {cost.name: factor * getattr(service, cost.name) for cost in each if cost.name.endswith("_ns")}
        return BrokerModel(replace(service, **costs), self.mcap_mps / factor)


BROKER_MODELS = {
    # This project's broker, as `srtm calibrate` measured it on one core of a small cloud machine; mcap for p99 <= 1 ms.
    "srtm-broker": BrokerModel(ServiceModel(read_ns=48_000, message_ns=23_000, base_ns=190_000), 11_000.0),
    # The paper's 2-core broker, fitted to seven statements of its text by bench/testbed.py. Its mcap is what the
    # prototype assumed for every broker. docs/adr/0005-paper-testbed.md says how the other statements come out.
    "paper-testbed": BrokerModel(
        ServiceModel(read_ns=24_000, message_ns=10_000, base_ns=150_000, serial_ns=5_000, cores=2), 110_000.0
    ),
}
# A plan must predict the brokers that `srtm up` starts; the paper's are for comparison with the paper.
DEFAULT_BROKER_MODEL = "srtm-broker"


def broker_model(text: str = DEFAULT_BROKER_MODEL) -> BrokerModel:
    """The model of that name, or one with the costs in `text`: ns, as in 9000,8000,150000.

    Further numbers are `serial_ns` and `cores`, and then `wake_ns` and `rest_ns`.
    """
    if text in BROKER_MODELS:
        return BROKER_MODELS[text]
    costs = text.split(",")
    if len(costs) not in (3, 5, 7) or not all(cost.strip().isdigit() for cost in costs):
        known = ", ".join(BROKER_MODELS)
        raise InputError(
            f"unknown broker model {text!r}; known models: {known}, or three costs in ns such as 9000,8000,150000,"
            " and more for a serial stage, cores and waking up, as in 9000,8000,150000,6000,2 or"
            " 9000,8000,150000,0,1,30000,20000"
        )
    service = ServiceModel(*(int(cost) for cost in costs))
    return BrokerModel(service, service.mcap_mps(NS_PER_MS))
