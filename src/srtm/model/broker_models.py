"""Named models of a broker: the cost of messages, and the rate that placement assumes it carries.

`srtm plan`, the simulator and a controller without a calibration all choose from one list, with one default.
"""

from __future__ import annotations

from dataclasses import dataclass

from srtm.errors import InputError
from srtm.model import md1
from srtm.units import NS_PER_MS, NS_PER_S, Number, exact


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """A broker's costs in ns: `read_ns` (w) per read event, `message_ns` (s) per message, `base_ns` for all."""

    read_ns: int
    message_ns: int
    base_ns: int = 0

    def __post_init__(self) -> None:
        """Costs are positive and whole."""
        costs = (self.read_ns, self.message_ns, self.base_ns)
        if not all(isinstance(cost, int) and cost >= 0 for cost in costs) or self.read_ns + self.message_ns == 0:
            raise InputError(f"the costs of a broker must be positive whole nanoseconds: {self}")

    def cost_ns(self, messages: int) -> int:
        """A read event's cost."""
        return self.read_ns + messages * self.message_ns

    def mcap_mps(self, slo_ns: int, quantile: Number = "0.99", batch: int = 1) -> float:
        """The highest rate of Poisson batches whose latency stays within the SLO at this quantile.

        Read events are an M/D/1 queue: one that finds U events' worth of work leaves U + 1 of them later.
        """
        cost_ns = self.cost_ns(batch)
        room = (slo_ns - self.base_ns) / cost_ns - 1
        if room < 0:
            return 0.0
        tail = 1 - float(exact(quantile, "quantile"))
        low, high = 0.0, 0.999
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if md1.exceeds(room, middle) <= tail else (low, middle)
        return low * batch * NS_PER_S / cost_ns


@dataclass(frozen=True, slots=True)
class BrokerModel:
    """What messages cost a broker, and its mcap: the rate that placement assumes it can carry."""

    service: ServiceModel
    mcap_mps: float


BROKER_MODELS = {
    # This project's broker, as `srtm calibrate` measured it on one core of a small cloud machine; mcap for p99 <= 1 ms.
    "srtm-broker": BrokerModel(ServiceModel(read_ns=48_000, message_ns=23_000, base_ns=190_000), 11_000.0),
    # The paper's 2-core broker, fitted to its text: 10 kmsg/s of single messages stay far inside 1 ms, 60 kmsg/s
    # overload it, 80 kmsg/s in batches of 10 do not. Its mcap is what the paper's prototype assumed for every broker.
    # docs/adr/0005-paper-testbed.md compares the model with the paper's Table 1.
    "paper-testbed": BrokerModel(ServiceModel(read_ns=9_000, message_ns=8_000, base_ns=150_000), 110_000.0),
}
# A plan must predict the brokers that `srtm up` starts; the paper's are for comparison with the paper.
DEFAULT_BROKER_MODEL = "srtm-broker"


def broker_model(text: str = DEFAULT_BROKER_MODEL) -> BrokerModel:
    """The model of that name, or one with the three costs in `text` (ns, as in 9000,8000,150000)."""
    if text in BROKER_MODELS:
        return BROKER_MODELS[text]
    costs = text.split(",")
    if len(costs) != 3 or not all(cost.strip().isdigit() for cost in costs):
        known = ", ".join(BROKER_MODELS)
        raise InputError(
            f"unknown broker model {text!r}; known models: {known}, or three costs in ns such as 9000,8000,150000"
        )
    service = ServiceModel(*(int(cost) for cost in costs))
    return BrokerModel(service, service.mcap_mps(NS_PER_MS))
