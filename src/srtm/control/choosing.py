"""Which rule of lending `auto` stands for: predicted in a thread, for the publishers, places and shares of one moment.

In: declared publishers with their brokers, the brokers' shares, a round trip. Out: the rule that the model predicts to
be best (`model.lending_scan`), over the traffic that the publishers declare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from srtm.control.placing.expected import expected
from srtm.errors import SRTMError
from srtm.model.lending_scan import choose_rule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from srtm.control.members import DeclaredPublisher
    from srtm.model.bucket import TokenBucket
    from srtm.model.lending import Rule


class Choosing:
    """One prediction: call `job` in a thread, then read `rule`."""

    def __init__(
        self,
        topic: str,
        placed: Sequence[tuple[DeclaredPublisher, str]],
        shares: Mapping[str, TokenBucket],
        round_trip_ns: int,
        quantile: str,
        seed: int,
        limit_ns: int | None = None,
    ) -> None:
        """`placed` are publishers with their brokers, all of which have shares; `limit_ns` is the SLO."""
        self.topic = topic
        self.job: Callable[[], None] | None = self._choose
        self.given_up = ""  # why there is no rule
        self.rule: Rule | None = None
        self._placed = placed
        self._shares = shares
        self._round_trip_ns = round_trip_ns
        self._quantile = quantile
        self._seed = seed
        self._limit_ns = limit_ns

    def _choose(self) -> None:
        number = {broker: index for index, broker in enumerate(self._shares)}
        try:
            arrivals = expected([publisher for publisher, _ in self._placed], self._seed)
            broker_of = np.array([number[broker] for _, broker in self._placed], np.int32)[arrivals.publisher_of]
            shares = list(self._shares.values())
            traffic = arrivals.times_ns, broker_of, shares, self._round_trip_ns
            self.rule = choose_rule(*traffic, self._quantile, self._limit_ns)
        except SRTMError as problem:  # too much traffic, or too large a bucket
            self.given_up = str(problem)
