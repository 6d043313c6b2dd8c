"""The one law, as plain Python that the broker runs and `model.scan` compiles.

A message that arrives at a_i finds U(a_i^-) unfinished work and leaves `backlog` = U(a_i^-) + 1 behind it
(paper, appendix A). The bucket (r, b) lets it go once that backlog has drained to b: after
max(0, backlog − b) / r, its access delay. U itself does not depend on b.

`backlog`, `token` and `burst` count in one unit and `rate` is that unit per nanosecond, so everything is an
integer. Interpreted, integers have no bounds. Compiled, they have 64 bits. Two rules keep them exact:
- a gap is cut at `horizon`, the time that empties any backlog up to LIMIT;
- a scan reports its `peak`, and its caller refuses the result if the peak passed LIMIT. A backlog grows by one token at
  a time, which is far less than 2**63 − LIMIT, so a scan sees it above LIMIT before it can overflow.

Everything the compiled scans need is in this file, because numba's cache watches one file per function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Indices = NDArray[np.int32]

LIMIT = 2**62

# Lending between the brokers of a topic (docs/adr/0021-lending.md) counts in pico-tokens.
TOKEN = 10**12
GRAIN = TOKEN // 100  # a product of two amounts up to LIMIT, in grains, fits into 64 bits
LEAST = TOKEN // 4  # that is asked for, while messages wait
# Before they do, asking must promise two tokens and an eighth of b: an ask costs brokers as much as a message.
EARLY = 2 * TOKEN
WORTH = 8
_NEVER = 2**63 - 1
# Rows of the array that `scan_lending` keeps its brokers in, and the stages of an ask.
(_RATE, _BURST, _HORIZON, _BACKLOG, _LAST, _HEAD, _TAIL, _WAITED) = range(8)
(_STAGE, _WHEN, _PEER, _WANT, _LEVEL, _TOP, _GRANT, _CALM) = range(8, 16)
LENDING_ROWS = 16
_NONE, _ASKED, _ANSWERED, _RETRY = range(4)


def step(backlog: int, gap_ns: int, rate: int, token: int) -> int:
    """The backlog behind a message that comes `gap_ns` after the one that left `backlog`."""
    left = backlog - rate * gap_ns
    return left + token if left > 0 else token


def delay_ns(backlog: int, burst: int, rate: int) -> int:
    """How long that message waits for its token, rounded up to a whole nanosecond."""
    excess = backlog - burst
    return -(-excess // rate) if excess > 0 else 0


def rising(times: Ints) -> bool:
    """Whether times never decrease."""
    sign = 0
    for i in range(1, len(times)):
        sign |= times[i] - times[i - 1]
    return sign >= 0


def scan_backlogs(
    arrivals: Ints, rate: int, token: int, horizon: int, backlog: int, last: int, out: Ints
) -> tuple[int, int, int]:
    """Backlog behind every arrival, into `out` unless it is empty.

    Returns (backlog at the end, peak, sign); a negative sign means unsorted arrivals.
    """
    peak = backlog
    sign = 0
    keep = len(out) > 0
    for i in range(len(arrivals)):
        gap = arrivals[i] - last
        last = arrivals[i]
        sign |= gap
        backlog = step(backlog, min(gap, horizon), rate, token)
        peak = max(peak, backlog)
        if keep:
            out[i] = backlog
    return backlog, peak, sign


def scan_histogram(
    arrivals: Ints, start: int, rate: int, token: int, horizon: int, backlog: int, last: int, counts: Ints
) -> tuple[int, int, int, int, int]:
    """Count backlogs in whole tokens, rounded up, from arrival `start` on.

    Stops at the first backlog that `counts` is too short for. Returns (next arrival, backlog, last, peak, sign):
    the caller makes `counts` longer and continues from there.
    """
    peak = backlog
    sign = 0
    inverse = 1.0 / token
    for i in range(start, len(arrivals)):
        gap = arrivals[i] - last
        sign |= gap
        after = step(backlog, min(gap, horizon), rate, token)
        peak = max(peak, after)
        # Rounded up by a guess in floats, which is off by less than 1e-5 tokens, and a correction in integers: twice as
        # fast as a division.
        tokens = int(after * inverse)
        if tokens * token < after:
            tokens += 1
        if not 0 <= tokens < len(counts):  # below zero only where unsorted times have overflowed
            return i, backlog, last, peak, sign
        counts[tokens] += 1
        backlog = after
        last = arrivals[i]
    return len(arrivals), backlog, last, peak, sign


def scan_histograms(
    times: Ints, segments: Ints, number: int, laws: Ints, states: Ints, counts: Ints, out: Ints, filled: int
) -> tuple[int, int]:
    """`scan_histogram` of many topics, one segment of `times` after another, from segment `number` on.

    Rows: of `segments` (topic, next arrival, end); by topic of `laws` (rate, token, horizon) and of `states` (backlog,
    last, peak, sign); of `out` (topic, tokens, messages). Returns the segment for which `counts`, empty between
    segments, is too short, or how many there are; and how many rows of `out` are filled.
    """
    while number < len(segments):
        topic, at, end = segments[number]
        rate, token, horizon = laws[topic]
        at, backlog, last, peak, sign = scan_histogram(
            times[:end], at, rate, token, horizon, states[topic, 0], states[topic, 1], counts
        )
        states[topic, 0], states[topic, 1] = backlog, last
        states[topic, 2], states[topic, 3] = max(states[topic, 2], peak), states[topic, 3] | sign
        segments[number, 1] = at
        if at < end and 0 <= states[topic, 2] <= LIMIT and states[topic, 3] >= 0:
            break
        for tokens in range(min(len(counts), states[topic, 2] // token + 2)):
            if counts[tokens]:
                out[filled, 0], out[filled, 1], out[filled, 2] = topic, tokens, counts[tokens]
                counts[tokens] = 0
                filled += 1
        number += 1
    return number, filled


def scan_delays(
    arrivals: Ints,
    bucket_of: Indices,
    rates: Ints,
    tokens: Ints,
    bursts: Ints,
    horizons: Ints,
    backlogs: Ints,
    lasts: Ints,
    peaks: Ints,
    out: Ints,
) -> int:
    """Access delays of messages spread over several buckets: message i goes through bucket `bucket_of[i]`.

    `backlogs`, `lasts` and `peaks` are the buckets' states, read and left behind. Returns the sign of the
    smallest gap between neighbouring arrivals (negative: unsorted).
    """
    sign = 0
    previous = arrivals[0] if len(arrivals) else 0
    for i in range(len(arrivals)):
        at = arrivals[i]
        sign |= at - previous
        previous = at
        bucket = bucket_of[i]
        backlog = step(backlogs[bucket], min(at - lasts[bucket], horizons[bucket]), rates[bucket], tokens[bucket])
        lasts[bucket] = at
        backlogs[bucket] = backlog
        if backlog > peaks[bucket]:
            peaks[bucket] = backlog
        out[i] = delay_ns(backlog, bursts[bucket], rates[bucket])
    return sign


def scan_drops(
    arrivals: Ints,
    rate: int,
    token: int,
    burst: int,
    horizon: int,
    backlog: int,
    last: int,
    out: NDArray[np.bool_],
) -> tuple[int, int]:
    """Which messages a dropping bucket lets pass: one that would wait is dropped and takes no token."""
    sign = 0
    for i in range(len(arrivals)):
        gap = arrivals[i] - last
        last = arrivals[i]
        sign |= gap
        after = step(backlog, min(gap, horizon), rate, token)
        passes = after <= burst
        out[i] = passes
        backlog = after if passes else after - token
    return backlog, sign


def evens_out(lender_level: int, lender_burst: int, asker_level: int, asker_burst: int) -> int:
    """Tokens that leave lender and asker at the same fraction of their b; negative if the asker has more."""
    lender, asker = lender_burst // GRAIN, asker_burst // GRAIN
    return (lender_level // GRAIN * asker - asker_level // GRAIN * lender) // (lender + asker) * GRAIN


def lendable(want: int, waiting: int, level: int, burst: int, asker_level: int, asker_burst: int) -> int:
    """What a broker lends: no more than evens out, and nothing while its own messages wait."""
    if waiting > 0:
        return 0
    return max(0, min(want, level, evens_out(level, burst, asker_level, asker_burst)))


def in_need(waiting: int, level: int, refill: int) -> bool:
    """Whether messages wait that `refill`, the tokens of a round trip, does not release."""
    return waiting > 0 and level + refill < 0


def look_again_ns(round_trip: int, rate: int) -> int:
    """How long a broker in need that knows nobody to ask waits before it looks again: a token comes by itself."""
    return max(round_trip, TOKEN // rate + 1)


def wanted(worth: int, waiting: int, level: int, burst: int, refill: int, peer_level: int, peer_burst: int) -> int:
    """What a broker asks of a peer with this level; early for 1/`worth` of b, or never if that is 0."""
    need = in_need(waiting, level, refill)
    if not need and not worth:
        return 0
    room = burst - (TOKEN if waiting > 0 else level)  # while a message waits, there is less than one token
    want = min(peer_level, room, evens_out(peer_level, peer_burst, level, burst))
    return want if want >= (LEAST if need else max(EARLY, burst // worth)) else 0


def calm_level(worth: int, burst: int, peer_burst: int) -> int:
    """A level from which on `wanted` is nothing while no message waits, whatever peers up to this b have."""
    if not worth:
        return -LIMIT
    own, peer, least = burst // GRAIN, peer_burst // GRAIN, max(EARLY, burst // worth) // GRAIN
    return (own - least * (own + peer) // peer + 1) * GRAIN


def _release(now: int, broker: int, state: Ints, arrivals: Ints, queue: Ints, out: Ints) -> None:
    """Note the delays of a broker's waiting messages that have their tokens by now."""
    while state[_HEAD, broker] < state[_TAIL, broker]:
        behind = state[_TAIL, broker] - state[_HEAD, broker] - 1
        wait = delay_ns(state[_BACKLOG, broker] - behind * TOKEN, state[_BURST, broker], state[_RATE, broker])
        if state[_LAST, broker] + wait > now:
            break
        message = queue[state[_HEAD, broker]]
        out[message] = state[_LAST, broker] + wait - arrivals[message]
        state[_HEAD, broker] += 1


def _advance(now: int, broker: int, state: Ints, arrivals: Ints, queue: Ints, out: Ints) -> None:
    """Carry a broker to now, with the highest level since its ask."""
    _release(now, broker, state, arrivals, queue, out)
    gap = min(now - state[_LAST, broker], state[_HORIZON, broker])
    backlog = step(state[_BACKLOG, broker], gap, state[_RATE, broker], 0)
    state[_BACKLOG, broker], state[_LAST, broker] = backlog, now
    highest = max(state[_BURST, broker] - backlog, TOKEN if state[_WAITED, broker] else 0)
    state[_TOP, broker] = max(state[_TOP, broker], highest)


def _ask(now: int, broker: int, state: Ints, believed: Ints, heard: Ints, round_trip: int, worth: int) -> None:
    """Ask the peer that seems to have most to lend, if any; if messages wait in vain, look again later."""
    waiting, burst = state[_TAIL, broker] - state[_HEAD, broker], state[_BURST, broker]
    level = burst - state[_BACKLOG, broker]
    refill = state[_RATE, broker] * min(round_trip, state[_HORIZON, broker])
    state[_WAITED, broker], state[_WANT, broker] = waiting, 0
    if level >= state[_CALM, broker] and not in_need(waiting, level, refill):
        state[_STAGE, broker], state[_WHEN, broker] = _NONE, _NEVER
        return
    for peer in range(state.shape[1]):
        if peer == broker:
            continue
        gap = min(now - heard[broker, peer], state[_HORIZON, peer])
        peer_level = state[_BURST, peer] - step(believed[broker, peer], gap, state[_RATE, peer], 0)
        want = wanted(worth, waiting, level, burst, refill, peer_level, state[_BURST, peer])
        if want > state[_WANT, broker]:
            state[_WANT, broker], state[_PEER, broker] = want, peer
    if state[_WANT, broker] > 0:
        state[_STAGE, broker], state[_WHEN, broker] = _ASKED, now + round_trip // 2
        state[_LEVEL, broker], state[_TOP, broker] = level, TOKEN if waiting > 0 else level
    elif in_need(waiting, level, refill):
        state[_STAGE, broker], state[_WHEN, broker] = _RETRY, now + look_again_ns(round_trip, state[_RATE, broker])
    else:
        state[_STAGE, broker], state[_WHEN, broker] = _NONE, _NEVER


def _soonest(state: Ints) -> tuple[int, int]:
    """The broker with the next event, and when; of several, the first."""
    first = 0
    for broker in range(1, state.shape[1]):
        if state[_WHEN, broker] < state[_WHEN, first]:
            first = broker
    return first, state[_WHEN, first]


def scan_lending(
    arrivals: Ints, broker_of: Indices, queue: Ints, state: Ints, peers: Ints, round_trip: int, worth: int, out: Ints
) -> tuple[int, int, int, int]:
    """Access delays at brokers that lend each other tokens: `lending.Lending` at each, and no message lost.

    Arrivals are in order of time and broker: those of a broker at one time are one turn of its loop. `queue` lists
    the messages of one broker after another; `fill_lending` has filled `state` and `peers`. Each way takes half of
    `round_trip`; arrivals go before messages of brokers at the same time. Returns (asks, tokens lent, tokens lost of
    these, peak).
    """
    brokers, at = state.shape[1], 0
    believed, heard = peers[0], peers[1]  # backlogs of peers as last heard, and when
    asks = lent = lost = peak = 0
    first, soon = 0, _NEVER  # of the brokers with an event to come, and when
    while True:
        now, event, who = _NEVER, _NONE, 0
        if at < len(arrivals):
            now, who = arrivals[at], broker_of[at]
        if soon < now:
            now, event, who = soon, state[_STAGE, first], first
        if now == _NEVER:
            break
        peer = state[_PEER, who]
        if event == _ASKED:
            _advance(now, peer, state, arrivals, queue, out)
            burst, waiting = state[_BURST, peer], state[_TAIL, peer] - state[_HEAD, peer]
            level = burst - state[_BACKLOG, peer]
            grant = lendable(state[_WANT, who], waiting, level, burst, state[_LEVEL, who], state[_BURST, who])
            believed[peer, who], heard[peer, who] = state[_BURST, who] - state[_LEVEL, who], now - round_trip // 2
            state[_BACKLOG, peer] += grant
            state[_WAITED, peer] = waiting
            state[_GRANT, who], state[_LEVEL, who] = grant, level - grant
            state[_STAGE, who], state[_WHEN, who] = _ANSWERED, now + round_trip - round_trip // 2
            asks += 1
            lent += grant
            first, soon = _soonest(state)
            continue
        before = state[_WHEN, who]
        _advance(now, who, state, arrivals, queue, out)
        if event == _ANSWERED:
            believed[who, peer], heard[who, peer] = state[_BURST, peer] - state[_LEVEL, who], now - round_trip // 2
            taken = max(0, min(state[_GRANT, who], state[_BURST, who] - state[_TOP, who]))
            state[_BACKLOG, who] -= taken
            state[_STAGE, who] = _NONE
            lost += state[_GRANT, who] - taken
        while event == _NONE and at < len(arrivals) and arrivals[at] == now and broker_of[at] == who:
            state[_BACKLOG, who] = step(state[_BACKLOG, who], 0, state[_RATE, who], TOKEN)
            state[_TAIL, who] += 1
            at += 1
        peak = max(peak, state[_BACKLOG, who])
        _release(now, who, state, arrivals, queue, out)
        if state[_STAGE, who] == _NONE or state[_STAGE, who] == _RETRY:
            _ask(now, who, state, believed, heard, round_trip, worth)
        state[_WAITED, who] = state[_TAIL, who] - state[_HEAD, who]
        if state[_WHEN, who] != before:
            first, soon = _soonest(state)
    for broker in range(brokers):
        _release(_NEVER, broker, state, arrivals, queue, out)
    return asks, lent, lost, peak


def fill_lending(state: Ints, peers: Ints, laws: Ints, start: int, heads: Ints, worth: int) -> None:
    """Full buckets at `start`: `laws` are the rates, bursts and horizons, `heads` where each broker's queue begins.

    `state` has LENDING_ROWS rows, `peers` two tables of brokers by brokers; both are zero.
    """
    peers[1] = start
    state[: len(laws)] = laws
    state[_LAST] = start
    state[_HEAD] = state[_TAIL] = heads
    state[_WHEN] = _NEVER
    most = int(laws[_BURST].max())
    state[_CALM] = [calm_level(worth, int(burst), most) for burst in laws[_BURST]]


LENDING = (evens_out, lendable, in_need, look_again_ns, wanted, _release, _advance, _ask, _soonest)
