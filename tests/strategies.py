"""Traffic for properties: arrivals around the edge where a bucket starts to hold messages back."""

from __future__ import annotations

from hypothesis import strategies as st

from srtm.model.bucket import TokenBucket

# Whole and fractional rates, from a token an hour to ten million a second.
rates_mtps = st.one_of(
    st.sampled_from([1, 7, 333, 1_000, 1_833_333, 11_000_000, 10_000_000_000]),
    st.integers(1, 50_000_000),
    st.integers(1, 100_000).map(lambda whole: whole * 1_000),
)
sizes_ntok = st.one_of(
    st.integers(1, 12).map(lambda whole: whole * 10**9),
    st.integers(10**9, 12 * 10**9),
    st.sampled_from([10**9, 10**9 + 1, 4_333_333_333]),
)
weights = st.lists(st.one_of(st.integers(0, 1_000), st.fractions(0, 50)), min_size=1, max_size=12)
buckets = st.builds(TokenBucket, rates_mtps, sizes_ntok)


@st.composite
def arrivals_for(draw: st.DrawFn, bucket: TokenBucket, max_size: int = 40) -> list[int]:
    """Sorted times whose gaps count in the bucket's own token time: batches, near misses, bursts and long gaps."""
    token_ns = 10**12 // bucket.r_mtps + 1
    gap = st.one_of(
        st.just(0),
        st.integers(0, 3),
        st.integers(0, 2 * token_ns),
        st.integers(token_ns - 2, token_ns + 1).map(lambda gap_ns: max(0, gap_ns)),
        st.integers(0, 16 * token_ns),
        st.just(5 * 86_400 * 10**9),
    )
    gaps = draw(st.lists(gap, min_size=1, max_size=max_size))
    at = draw(st.sampled_from([0, -5, 1_700_000_000_000_000_000]))
    times = []
    for step in gaps:
        at += step
        times.append(at)
    return times


@st.composite
def traffic(draw: st.DrawFn, max_size: int = 40) -> tuple[TokenBucket, list[int]]:
    bucket = draw(buckets)
    return bucket, draw(arrivals_for(bucket, max_size))


@st.composite
def changes_during(draw: st.DrawFn, arrivals: list[int], max_size: int = 4) -> list[tuple[int, TokenBucket]]:
    """Changes of (r, b) before, during and after the traffic, some of them at the instant of an arrival."""
    span = arrivals[-1] - arrivals[0]
    moment = st.one_of(st.sampled_from(arrivals), st.integers(arrivals[0] - 5, arrivals[-1] + span + 5))
    times = sorted(draw(st.lists(moment, max_size=max_size)))
    return [(at, draw(buckets)) for at in times]
