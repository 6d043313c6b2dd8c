"""All options of a paced broker: those of a broker, and its pace."""

from __future__ import annotations

from dataclasses import dataclass

from srtm.broker.options import BrokerOptions
from srtm.options import option

_PACE = "Pace"


@dataclass(frozen=True, slots=True)
class PacedOptions(BrokerOptions):
    """Options of one paced broker."""

    model: str = option("paper-testbed", "Broker model that service follows", "MODEL", panel=_PACE)
    factor: int = option(1, "How many times longer than in the model service takes", "FACTOR", panel=_PACE, min=1)
    beside: tuple[str, ...] = option(
        (), "Load that the model of a broker carries in batches of 10; repeatable", "BROKER=RATE", panel=_PACE
    )
    seed: int = option(0, "Seed of that load", "SEED", panel=_PACE, min=0)
