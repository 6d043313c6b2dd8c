"""Correlation groups from arrival times: publishers that burst together more often than chance explains.

In: the onsets of a topic's bursts, publisher by publisher. Out: groups, each with a confidence; a publisher that bursts
alone is in none. The method depends on how a publisher sends, and neither compares all pairs:

- *by the clock*: groups by phase (`model.phases`), because publishers that are neighbours by chance stay neighbours;
- *by chance*: MinHash signatures over time bins. Each hash has its own grid, so the edge of a bin does not separate the
  same publishers twice. Publishers that agree on a band of hashes are candidates. They are paired along a line and with
  a star, so the number of pairs stays linear, and each pair is then compared onset by onset.

A pair counts if it agrees well beyond chance (`min_confidence`) and beyond surrogates: the same publishers with their
onsets shifted in time, which keeps rates and rhythms but removes simultaneity. Shifts are short against slow changes,
so a busy minute or a silent day is not agreement. A group is the set of publishers that agree with one of them, its
core, so a chain of neighbours is not a group.

The result depends only on the onsets, the names and the seed. The order of publishers does not matter, and a
publisher's shift and signature do not depend on the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from srtm.errors import InputError
from srtm.model import coincidence as plain
from srtm.model import phases
from srtm.model._compiled import callable_from_compiled, compiled
from srtm.model.onsets import Onsets
from srtm.units import NS_PER_MS, NS_PER_S, format_ns

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Indices = NDArray[np.int32]
    Floats = NDArray[np.float64]
    Words = NDArray[np.uint32]

callable_from_compiled(plain.count_together)
_sign_publishers = compiled(plain.sign_publishers)
_compare_pairs = compiled(plain.compare_pairs)
_join_pairs = compiled(plain.join_pairs)
_find_periods = compiled(plain.find_periods)

FEWEST_ONSETS = 4  # three coinciding bursts prove nothing
_FEWEST_REGULAR, _SHARE_REGULAR = 8, 0.8
_BANDS, _ROWS = 64, 3
_SORTED = 2**20  # publishers times bands that are sorted at once: some ten megabytes
_SHIFTS = 32
_SAMPLE = 8  # links, or members of a group, that represent all


@dataclass(frozen=True, slots=True)
class Options:
    """What counts as a burst, as simultaneous and as more than chance.

    `significance` is the tolerated false-positive rate: the share of independent publishers that may be grouped.
    """

    silence_ns: int = 20 * NS_PER_MS
    tolerance_ns: int = 20 * NS_PER_MS
    min_confidence: float = 0.25
    significance: float = 0.001
    seed: int = 1

    def __post_init__(self) -> None:
        """Report all invalid options at once."""
        wrong = []
        if not 0 < self.silence_ns <= 3_600 * NS_PER_S:
            wrong.append(f"silence = {format_ns(self.silence_ns)}: it must lie between 1 ns and an hour")
        if not 0 < self.tolerance_ns <= NS_PER_S:
            wrong.append(f"tolerance = {format_ns(self.tolerance_ns)}: it must lie between 1 ns and 1 s")
        if not 0 < self.min_confidence <= 1:
            wrong.append(f"min confidence = {self.min_confidence}: it must lie in (0, 1]")
        if not 0 < self.significance < 1:
            wrong.append(f"significance = {self.significance}: it must lie between 0 and 1")
        if not 0 <= self.seed < 2**64:
            wrong.append(f"seed = {self.seed}: it must lie between 0 and 2**64")
        if wrong:
            raise InputError("; ".join(wrong))


@dataclass(frozen=True, slots=True)
class Group:
    """Publishers that burst together, in order of name.

    `confidence` is the share of their agreement that surrogates do not explain, from 0 (all may be chance) to 1.
    `period_ns` is set if they send by the clock.
    """

    publishers: tuple[str, ...]
    confidence: float
    period_ns: float | None = None

    @property
    def name(self) -> str:
        """The name of a group without a declared one: after its first publisher."""
        return f"g-{self.publishers[0]}"


def find_groups(onsets: Onsets, options: Options | None = None) -> list[Group]:
    """The correlation groups of a topic, in order of their first publisher."""
    chosen = options or Options()
    enough = onsets.only(np.flatnonzero(np.diff(onsets.starts) >= FEWEST_ONSETS))
    if len(enough.names) < 2:
        return []
    periods = np.empty(len(enough.names))
    _find_periods(enough.times, enough.starts, _FEWEST_REGULAR, _SHARE_REGULAR, periods)
    turns = _own_numbers(enough.names, chosen.seed)
    groups = [
        Group(_named(enough, run.members), run.confidence, run.period_ns)
        for members in phases.classes(periods)
        for run in phases.group_by_phase(enough.times, enough.starts, members, periods, turns, chosen.significance)
        if run.confidence >= chosen.min_confidence
    ]
    irregular = np.flatnonzero(periods == 0)
    if len(irregular) > 1:
        groups += _by_coincidence(enough.only(irregular), turns[irregular], chosen)
    return sorted(groups, key=lambda group: group.publishers)


def _named(onsets: Onsets, members: Ints) -> tuple[str, ...]:
    return tuple(onsets.names[p] for p in np.sort(members).tolist())


def _own_numbers(names: tuple[str, ...], seed: int) -> Floats:
    """Numbers in [0, 1) for each publisher, independent of the other publishers."""
    key = seed.to_bytes(16, "little")
    digests = b"".join(blake2b(name.encode(), digest_size=8, key=key).digest() for name in names)
    state = np.frombuffer(digests, np.uint64)[:, None] + np.arange(phases.SURROGATES, dtype=np.uint64)[None, :]
    return (_mixed(state) >> np.uint64(11)).astype(np.float64) / 2**53


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each number with its bits mixed (the finaliser of splitmix64)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _by_coincidence(onsets: Onsets, turns: Floats, options: Options) -> list[Group]:
    """Groups among publishers that do not send by the clock."""
    threshold = max(
        float(np.log(len(onsets.names) / options.significance)), _reached_by_surrogates(onsets, turns, options)
    )
    ones, others = _candidates(onsets, options)
    agreement, evidence = _compared(onsets, ones, others, options)
    linked = (agreement >= options.min_confidence) & (evidence >= threshold)
    return _gathered(onsets, ones[linked], others[linked], agreement[linked], threshold, options)


def _reached_by_surrogates(onsets: Onsets, turns: Floats, options: Options) -> float:
    """The evidence that all but a share `significance` of publishers stay below with shifted onsets."""
    firsts, lasts = onsets.times[onsets.starts[:-1]], onsets.times[onsets.starts[1:] - 1]
    spans = lasts - firsts + 1
    reach = np.minimum(spans // 2, 1_000 * options.tolerance_ns)
    shifts = ((2 * turns[:, 0] - 1) * reach).astype(np.int64)
    counts = np.diff(onsets.starts)
    moved = np.mod(onsets.times - np.repeat(firsts - shifts, counts), np.repeat(spans, counts))
    moved += np.repeat(firsts, counts)
    owner = np.repeat(np.arange(len(counts)), counts)
    surrogates = onsets._replace(times=moved[np.lexsort((moved, owner))])
    ones, others = _candidates(surrogates, options)
    apart = np.abs(shifts[ones] - shifts[others]) >= 10 * options.tolerance_ns
    ones, others = ones[apart], others[apart]
    agreement, evidence = _compared(surrogates, ones, others, options)
    best = np.zeros(len(counts))
    alike = agreement >= options.min_confidence
    for side in (ones, others):
        np.maximum.at(best, side[alike], evidence[alike])
    return float(np.sort(best)[::-1][int(options.significance * len(best))])


def _candidates(onsets: Onsets, options: Options) -> tuple[Ints, Ints]:
    """Pairs of publishers that agree on some band of their signatures, linear in publishers times bands."""
    signatures = _signatures(onsets, options)
    count = len(signatures)
    at_once = max(1, _SORTED // count)
    pairs = [_alike(signatures, np.arange(_BANDS)[first : first + at_once]) for first in range(0, _BANDS, at_once)]
    ones, others = np.divmod(np.unique(np.concatenate(pairs)), count)
    return ones, others


def _alike(signatures: Words, bands: Ints) -> Ints:
    """Pairs that agree on one of these bands, as low · publishers + high: neighbours, and each with the first."""
    count, hashes = signatures.shape
    columns = (bands[:, None] * _ROWS + np.arange(2 * _ROWS)) % hashes
    values = signatures[:, columns].transpose(2, 1, 0).astype(np.uint64)  # by hash, band and publisher
    first, second, third = ((values[row] << np.uint64(32)) | values[row + 1] for row in (0, 2, 4))
    # Sorted by the next band as well: within a run, publishers that agree on more hashes are neighbours.
    order = np.lexsort((third, second, first), axis=1)
    first, middle = (np.take_along_axis(key, order, 1) for key in (first, second >> np.uint64(32)))
    same = (first[:, 1:] == first[:, :-1]) & (middle[:, 1:] == middle[:, :-1])
    begins = np.where(np.pad(~same, ((0, 0), (1, 0)), constant_values=True), np.arange(count), 0)
    begins = np.maximum.accumulate(begins, axis=1)
    band, later = np.nonzero(same)
    later += 1
    pairs = []
    for partner in (order[band, later - 1], order[band, begins[band, later]]):
        low, high = np.minimum(order[band, later], partner), np.maximum(order[band, later], partner)
        pairs.append(low * count + high)
    return np.concatenate(pairs)


def _signatures(onsets: Onsets, options: Options) -> Words:
    rng = np.random.default_rng([options.seed, 1])
    hashes = _BANDS * _ROWS
    width = 3 * options.tolerance_ns
    bins, rest = np.divmod(onsets.times, width)
    below, above = ((_mixed((bins + step).astype(np.uint64)) >> np.uint64(32)).astype(np.uint32) for step in (0, 1))
    cuts = rng.integers(0, width, hashes).astype(np.uint32)
    masks = rng.integers(0, 2**32, hashes, np.uint64).astype(np.uint32)
    factors = rng.integers(0, 2**32, hashes, np.uint64).astype(np.uint32) | np.uint32(1)
    signatures = np.empty((len(onsets.names), hashes), np.uint32)
    _sign_publishers(below, above, rest.astype(np.uint32), onsets.starts, cuts, masks, factors, signatures)
    return signatures


def _compared(onsets: Onsets, ones: Ints, others: Ints, options: Options) -> tuple[Floats, Floats]:
    """Agreement and evidence of pairs."""
    shares = np.random.default_rng([options.seed, 2]).random(_SHIFTS)
    out = np.empty((len(ones), 2))
    _compare_pairs(onsets.times, onsets.starts, ones, others, shares, options.tolerance_ns, options.min_confidence, out)
    return out[:, 0], out[:, 1]


def _gathered(
    onsets: Onsets, ones: Ints, others: Ints, agreement: Floats, threshold: float, options: Options
) -> list[Group]:
    """Groups around the publishers with the strongest links, until no two linked publishers are left over."""
    groups = []
    count = len(onsets.names)
    while len(ones):
        root = np.arange(count)
        _join_pairs(ones, others, root)
        weight = _strongest_links(ones, others, agreement, count)
        members = np.flatnonzero(weight > 0)
        members = members[np.lexsort((members, -weight[members], root[members]))]
        is_core = np.concatenate([[True], root[members[1:]] != root[members[:-1]]])
        cores = members[np.maximum.accumulate(np.where(is_core, np.arange(len(members)), 0))]
        belongs = _agreeing(onsets, members, cores, is_core, threshold, options)
        left = np.zeros(count, bool)
        left[members[belongs < options.min_confidence]] = True
        for component in np.split(np.arange(len(members)), np.flatnonzero(is_core)[1:]):
            joined = component[belongs[component] >= options.min_confidence]
            if len(joined) > 1:
                confidence = float(belongs[joined[1:]].mean())
                groups.append(Group(_named(onsets, members[joined]), min(1.0, confidence)))
        still = left[ones] & left[others]
        ones, others, agreement = ones[still], others[still], agreement[still]
    return groups


def _strongest_links(ones: Ints, others: Ints, agreement: Floats, count: int) -> Floats:
    """Sum of each publisher's few strongest links: one that bursts with two groups has many, but weaker ones."""
    ends, strength = np.concatenate([ones, others]), np.concatenate([agreement, agreement])
    order = np.lexsort((-strength, ends))
    ends, strength = ends[order], strength[order]
    first = np.searchsorted(ends, ends)
    few = np.arange(len(ends)) - first < _SAMPLE
    weight = np.zeros(count)
    np.add.at(weight, ends[few], strength[few])
    return weight


def _agreeing(
    onsets: Onsets, members: Ints, cores: Ints, is_core: NDArray[np.bool_], threshold: float, options: Options
) -> Floats:
    """Agreement of each member with its component's core; for those that fall short, with the first few that do not."""
    agreement, evidence = _compared(onsets, members, cores, options)
    agreement = np.where(is_core, 1.0, np.where(evidence >= threshold, agreement, 0.0))
    short = np.flatnonzero(agreement < options.min_confidence)
    if not len(short):
        return agreement
    component = np.cumsum(is_core) - 1
    joined = np.flatnonzero(agreement >= options.min_confidence)
    first = np.searchsorted(component[joined], component[short])
    after = np.minimum(first + _SAMPLE, np.searchsorted(component[joined], component[short], side="right"))
    sizes = after - first
    rows = np.repeat(first, sizes) + np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    agree, evidence = _compared(onsets, np.repeat(members[short], sizes), members[joined[rows]], options)
    owner = np.repeat(np.arange(len(short)), sizes)
    mean = np.bincount(owner, agree, len(short)) / np.maximum(1, sizes)
    surest = np.zeros(len(short))
    np.maximum.at(surest, owner, evidence)
    agreement[short] = np.where(surest >= threshold, mean, 0.0)
    return agreement
