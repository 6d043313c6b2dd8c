"""One bucket into exact shares: Σ r_l = r and Σ b_l = b hold as integers.

A share of b is any number of tokens from 1 up, not a whole number: see docs/adr/0002-fractional-tokens.md for what
4.33 tokens mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.errors import SplitError
from srtm.model.apportion import apportion
from srtm.model.bucket import TokenBucket
from srtm.units import NANO_PER_TOKEN, Number, exact

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


def split(
    bucket: TokenBucket,
    r_weights: Sequence[Number],
    b_weights: Sequence[Number] | None = None,
    *,
    min_b: Number | Sequence[Number] = 1,
    unused: tuple[Number, Number] = (0, 0),
) -> list[TokenBucket]:
    """Sub-token buckets: r by `r_weights`, b by `b_weights` (the same unless given); `unused` are weights kept back.

    `min_b` is the least b of each share: at least 1 token, better the largest batch that its publishers send.
    """
    b_weights = r_weights if b_weights is None else b_weights
    if len(b_weights) != len(r_weights):
        raise SplitError(f"{len(r_weights)} weights for r but {len(b_weights)} for b: there must be one each")
    least = [min_b] * len(r_weights) if isinstance(min_b, Number) else list(min_b)
    if len(least) != len(r_weights):
        raise SplitError(f"{len(r_weights)} shares but {len(least)} values of min_b: there must be one each")
    floors = [max(NANO_PER_TOKEN, round(exact(tokens, "min_b") * NANO_PER_TOKEN)) for tokens in least]
    if sum(floors) > bucket.b_ntok:
        raise SplitError(
            f"b = {bucket.b:g} tokens cannot be split into {len(floors)} shares that need at least"
            f" {sum(floors) / NANO_PER_TOKEN:g} together: use fewer brokers or a larger b",
            b=bucket.b,
        )
    r_rest, b_rest = [[weight] for weight in unused] if any(unused) else ([], [])
    rates = apportion(bucket.r_mtps, [*r_weights, *r_rest], [1] * len(floors) + [0] * len(r_rest))
    bursts = apportion(bucket.b_ntok, [*b_weights, *b_rest], floors + [0] * len(b_rest))
    pairs = zip(rates, bursts, strict=True)
    return [TokenBucket(r_mtps, b_ntok) for _, (r_mtps, b_ntok) in zip(floors, pairs, strict=False)]


def split_among(
    bucket: TokenBucket,
    r_weights: Mapping[str, Number],
    b_weights: Mapping[str, Number] | None = None,
    batches: Mapping[str, int] | None = None,
) -> dict[str, TokenBucket]:
    """`split` by name; if the bucket is too small for all, those with the least weight get none.

    `batches` are the largest ones that publishers send.
    """
    b_weights = r_weights if b_weights is None else b_weights
    names = sorted(r_weights, key=lambda name: (-exact(r_weights[name], "weight"), name))
    names = names[: min(bucket.b_ntok // NANO_PER_TOKEN, bucket.r_mtps)]
    if not names:
        return {}
    rates, bursts = [r_weights[name] for name in names], [b_weights[name] for name in names]
    least = least_b(bucket.b_ntok, [(batches or {}).get(name, 1) for name in names])
    return dict(zip(names, split(bucket, rates, bursts, min_b=least), strict=True))


def least_b(b_ntok: int, batches: Sequence[int]) -> list[int]:
    """The least b of each share, in tokens: its largest batch; if b is too small for all batches, one token."""
    least = [max(1, batch) for batch in batches]
    return least if sum(least) * NANO_PER_TOKEN <= b_ntok else [1] * len(least)


def within(whole: TokenBucket, shares: Iterable[TokenBucket]) -> bool:
    """The invariant of every grant: Σ r_l ≤ r and Σ b_l ≤ b."""
    held = list(shares)
    return sum(share.r_mtps for share in held) <= whole.r_mtps and sum(share.b_ntok for share in held) <= whole.b_ntok
