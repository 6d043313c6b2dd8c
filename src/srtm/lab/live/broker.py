"""A paced broker as a program: `srtm lab broker` (`testing/pacing.py` has the pacing)."""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING

from srtm.broker.run import run as serve
from srtm.errors import InputError
from srtm.model.broker_models import broker_model
from srtm.model.server import Background
from srtm.testing.pacing import Pace, PacedTurn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from srtm.lab.live.options import PacedOptions

_GRAIN_NS = 20_000  # of the model's time: a fiftieth of the SLO
_BATCH = 10  # of the load besides, as in Fig. 8


def pace_of(name: str, model: str, factor: int, beside: Mapping[str, float], seed: int) -> Pace:
    """The pace of the broker of this name; rates of `beside` are the model's, so they are divided by the factor."""
    load = Background(beside[name] / factor, _BATCH) if beside.get(name) else None
    own_seed = int.from_bytes(sha256(f"{seed} {name}".encode()).digest()[:4], "big")
    return Pace(broker_model(model).slower(factor).service, load, own_seed, _GRAIN_NS * factor)


def _load(text: str) -> tuple[str, float]:
    name, _, rate = text.partition("=")
    try:
        return name, float(rate)
    except ValueError:
        raise InputError(f"--beside must be BROKER=RATE, as in broker-1=10000, not {text!r}", value=text) from None


async def run(options: PacedOptions) -> None:
    """Serve until told to stop."""
    beside = dict(map(_load, options.beside))
    pace = pace_of(options.name, options.model, options.factor, beside, options.seed)
    await serve(options, partial(PacedTurn, pace=pace))
