"""A token bucket that counts tokens, event by event, in fractions: what the product must agree with.

It shares no formula with `srtm.model`: there is no backlog and no maximum here, only tokens that drip in up to a
limit, a queue, and the next thing that happens.
"""

from __future__ import annotations

import math
from collections import deque
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from srtm.model.bucket import TokenBucket

NEVER = Fraction(10**40)


def rate(bucket: TokenBucket) -> Fraction:
    """Tokens per nanosecond."""
    return Fraction(bucket.r_mtps, 10**12)


def size(bucket: TokenBucket) -> Fraction:
    return Fraction(bucket.b_ntok, 10**9)


def releases(
    arrivals: Sequence[int], bucket: TokenBucket, changes: Sequence[tuple[int, TokenBucket]] = ()
) -> list[Fraction]:
    """When each message leaves, exactly. A change at an instant comes before the arrivals of that instant."""
    tokens, now = size(bucket), Fraction(min([*arrivals, *(at for at, _ in changes)], default=0))
    coming, changing = deque(arrivals), deque(changes)
    queue: deque[int] = deque()
    out: list[Fraction] = []
    while coming or queue:
        full = now + (1 - tokens) / rate(bucket) if queue else NEVER
        change = Fraction(changing[0][0]) if changing else NEVER
        arrival = Fraction(coming[0]) if coming else NEVER
        then = min(full, change, arrival)
        tokens = min(size(bucket), tokens + rate(bucket) * (then - now))
        now = then
        if full == now:
            queue.popleft()
            out.append(now)
            tokens -= 1
        elif change == now:
            bucket = changing.popleft()[1]
            tokens = min(tokens, size(bucket))
        else:
            coming.popleft()
            if not queue and tokens >= 1:
                out.append(now)
                tokens -= 1
            else:
                queue.append(int(arrival))
    return out


def delays_ns(
    arrivals: Sequence[int], bucket: TokenBucket, changes: Sequence[tuple[int, TokenBucket]] = ()
) -> list[int]:
    """Waiting times, rounded up to whole nanoseconds."""
    return [math.ceil(out) - came for came, out in zip(arrivals, releases(arrivals, bucket, changes), strict=True)]


def passing(arrivals: Sequence[int], bucket: TokenBucket) -> list[bool]:
    """Which messages find a token, where nobody waits."""
    tokens, now, out = size(bucket), arrivals[0] if arrivals else 0, []
    for at in arrivals:
        tokens = min(size(bucket), tokens + rate(bucket) * (at - now))
        now = at
        out.append(tokens >= 1)
        tokens -= out[-1]
    return out
