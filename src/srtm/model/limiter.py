"""The running state of a token bucket at one broker: plain Python, without numba.

Invariants, for any sequence of calls:
- what is released in (s, t] never exceeds b(s) + ∫r over (s, t] (paper, appendix A.1), plus tokens given to it;
- messages leave in the order they came;
- a change of (r, b) keeps the tokens that are there, so moving shares between brokers creates none
  (docs/adr/0003-reconfiguration-keeps-tokens.md).
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Final

from srtm.model.law import delay_ns, step
from srtm.units import NANO_PER_TOKEN, PICO_PER_TOKEN

if TYPE_CHECKING:
    from srtm.model.bucket import TokenBucket

_PICO_PER_NANO: Final = PICO_PER_TOKEN // NANO_PER_TOKEN


class Limiter:
    """One broker's sub-token bucket at run time, in pico-tokens: a few integers, nothing per message.

    Times are Python's integers: numpy's overflow, and checking for them would cost every message.

    Time never runs backwards here: a message whose stamp lies before the last event counts as coming with it. Stamps of
    different sockets cross, and a change of (r, b) may overtake a message still in its socket; `late` counts them.

    A broker that lets messages wait needs no release time per message. It keeps its queue, adds arrivals with
    `admit`, asks `due` how many may go now, and `next_release_ns` when to look again: one timer per topic.
    """

    __slots__ = ("_burst", "_last_ns", "_peak", "_rate", "bucket", "last_backlog", "late")

    def __init__(self, bucket: TokenBucket, now_ns: int = 0, tokens_ntok: int | None = None) -> None:
        """Start with `tokens_ntok` nano-tokens: a full bucket by default, a gift for a new share of an old topic."""
        self.bucket = bucket
        self._rate, _, self._burst = bucket.pico_law
        # Unfinished work behind the last event, in pico-tokens; the TB Adaptor shares b by it.
        self.last_backlog = 0 if tokens_ntok is None else max(0, bucket.b_ntok - tokens_ntok) * _PICO_PER_NANO
        self._peak = 0
        self._last_ns = now_ns
        self.late = 0

    def admit(self, arrival_ns: int, count: int = 1) -> int:
        """Messages arrive together and wait for tokens; returns when the last gets its token, if r does not change.

        `next_release_ns` tells when the ones before it get theirs.
        """
        gap_ns = arrival_ns - self._last_ns
        if gap_ns < 0:
            self.late += count
            arrival_ns, gap_ns = self._last_ns, 0
        self._last_ns = arrival_ns
        backlog = step(self.last_backlog, gap_ns, self._rate, PICO_PER_TOKEN)
        if count > 1:
            backlog += (count - 1) * PICO_PER_TOKEN
        self.last_backlog = backlog
        if backlog > self._peak:
            self._peak = backlog
        if backlog <= self._burst:  # most find a token, and need no law to say when
            return arrival_ns
        return arrival_ns + delay_ns(backlog, self._burst, self._rate)

    def offer(self, arrival_ns: int) -> bool:
        """A message arrives and is dropped if it would have to wait; returns whether it passes."""
        gap_ns = arrival_ns - self._last_ns
        if gap_ns < 0:
            self.late += 1
            arrival_ns, gap_ns = self._last_ns, 0
        self._last_ns = arrival_ns
        backlog = step(self.last_backlog, gap_ns, self._rate, PICO_PER_TOKEN)
        if backlog > self._peak:
            self._peak = backlog  # including dropped messages: they are demand, too
        passes = backlog <= self._burst
        self.last_backlog = backlog if passes else backlog - PICO_PER_TOKEN
        return passes

    def due(self, now_ns: int, waiting: int) -> int:
        """How many of the `waiting` messages, oldest first, have their token by now."""
        excess = self._work(now_ns) - self._burst
        if excess <= 0:
            return waiting
        return max(0, waiting + (-excess // PICO_PER_TOKEN))

    def next_release_ns(self, waiting: int) -> int:
        """When the oldest of the `waiting` messages gets its token: every later one owes one token more."""
        oldest = self.last_backlog - (waiting - 1) * PICO_PER_TOKEN
        return self._last_ns + delay_ns(oldest, self._burst, self._rate)

    def reconfigure(self, now_ns: int, bucket: TokenBucket, gift_ntok: int = 0) -> int:
        """Change (r, b) now, messages waiting or not; returns the nano-tokens that no longer fit.

        Tokens are kept, not the unfinished work: a larger b starts with the tokens that were there plus
        `gift_ntok`, which another bucket gave up. Messages that wait keep their place and count on at the new r.
        """
        self.last_backlog = self._work(now_ns)
        self._last_ns = max(now_ns, self._last_ns)
        old_burst = self._burst
        self.bucket = bucket
        self._rate, _, self._burst = bucket.pico_law
        backlog = self.last_backlog + self._burst - old_burst - gift_ntok * _PICO_PER_NANO
        self.last_backlog = max(0, backlog)
        return max(0, -backlog) // _PICO_PER_NANO

    def retract(self, now_ns: int, waiting: int) -> None:
        """Waiting messages give up their claims on tokens, to be admitted again later."""
        self.last_backlog = max(0, self._work(now_ns) - waiting * PICO_PER_TOKEN)
        self._last_ns = max(now_ns, self._last_ns)

    def shift(self, now_ns: int, ptok: int) -> None:
        """Pico-tokens come from another broker's bucket, or leave for it if negative; `lending` makes them fit."""
        self.last_backlog = max(0, self._work(now_ns) - ptok)
        self._last_ns = max(now_ns, self._last_ns)

    def level_ptok(self, now_ns: int) -> int:
        """Pico-tokens in the bucket; negative when messages have a claim on tokens still to come."""
        return self._burst - self._work(now_ns)

    def surrender(self, now_ns: int) -> int:
        """The nano-tokens in the bucket when the share is given up; 0 if messages wait for tokens."""
        return max(0, self._burst - self._work(now_ns)) // _PICO_PER_NANO

    def tokens(self, now_ns: int) -> Fraction:
        """Tokens in the bucket; negative when messages have a claim on tokens still to come."""
        return Fraction(self._burst - self._work(now_ns), PICO_PER_TOKEN)

    def backlog(self, now_ns: int) -> Fraction:
        """Unfinished work U(now) in tokens."""
        return Fraction(self._work(now_ns), PICO_PER_TOKEN)

    def take_peak_ntok(self) -> int:
        """The largest backlog since the last call, in nano-tokens."""
        peak = -(-self._peak // _PICO_PER_NANO)
        self._peak = 0
        return peak

    def _work(self, now_ns: int) -> int:
        return max(0, self.last_backlog - self._rate * max(0, now_ns - self._last_ns))
