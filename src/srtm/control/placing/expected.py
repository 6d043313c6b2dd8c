"""Expected traffic: synthetic arrivals by what publishers declare, for predictions before anything was measured.

In: declared publishers. Out: sorted arrivals of up to a minute, from a seed. Publishers of one correlation group that
declare the same send a batch each at the same events, spread over the jitter; all others send independently.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from srtm.errors import WorkloadError
from srtm.units import NS_PER_S
from srtm.workload.publishers import Arrivals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from srtm.control.members import DeclaredPublisher

_MESSAGES = 300_000  # enough for a stable 99th percentile
_MOST_MPS = 2_000_000  # arrivals of a higher rate would not fit into memory
_LONGEST_S = 60


def expected(publishers: Sequence[DeclaredPublisher], seed: int) -> Arrivals:
    """Arrivals of these publishers; each sender is an index into the list."""
    rng = np.random.default_rng(seed)
    total_mps = sum(publisher.rate_mps for publisher in publishers)
    if total_mps > _MOST_MPS:
        raise WorkloadError(
            f"cannot predict {total_mps:,.0f} msg/s, the total that publishers declare; the limit is {_MOST_MPS:,}."
            " Give r and b, and fit by measuring",
            rate_mps=total_mps,
        )
    duration_ns = int(min(_LONGEST_S, max(1.0, _MESSAGES / total_mps)) * NS_PER_S)
    sources: defaultdict[object, list[int]] = defaultdict(list)
    for number, publisher in enumerate(publishers):
        alike = (publisher.group, publisher.rate_mps, publisher.batch, publisher.process, publisher.jitter_ns)
        sources[alike if publisher.group is not None else number].append(number)
    times, senders = [], []
    for members in sources.values():
        first = publishers[members[0]]
        period_ns = NS_PER_S * first.batch / first.rate_mps
        if first.process == "periodic":
            events = np.arange(rng.uniform(0, period_ns), duration_ns, period_ns)
        else:
            events = rng.uniform(0, duration_ns, rng.poisson(duration_ns / period_ns))
        spread = np.arange(len(members)) * (first.jitter_ns / len(members))
        at = events[:, None] + rng.permuted(np.tile(spread, (len(events), 1)), axis=1)
        times.append(np.repeat(at.ravel().astype(np.int64), first.batch))
        senders.append(np.repeat(np.tile(np.array(members, np.int32), len(events)), first.batch))
    all_times, all_senders = np.concatenate(times), np.concatenate(senders)
    order = np.argsort(all_times, kind="stable")
    return Arrivals(all_times[order], all_senders[order])
