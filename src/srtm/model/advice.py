"""Advice about a topic: what its latest traffic says about its contract, its SLO and its correlation groups.

In: findings over a window of arrivals, the contract in force, groups as declared and as found before. Out: advice, each
with its evidence. Pure: when advice begins and ends is for others to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from srtm.model.drift import drift
from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from srtm.model.bucket import TokenBucket

Kind = Literal["contract-too-small", "contract-too-large", "slo-at-risk", "groups-found", "groups-changed"]
KINDS: tuple[Kind, ...] = get_args(Kind)

FEWEST_MESSAGES, SHORTEST_S = 100, 5.0  # below these, nothing is said about the contract
_LARGE_MESSAGES, _LARGE_S = 1_000, 30.0  # and to call it too large takes more
_LARGE = 2.0  # times what the topic needs
_WAIT = 0.1  # of the SLO: a p99 wait in one bucket that is the contract's fault
_RISK = 0.8  # of the SLO: a p99 wait for tokens that leaves too little for everything else
_NAMED = 10  # publishers that a text names


class FoundGroup(NamedTuple):
    """Publishers that burst together, and how certain that is."""

    publishers: tuple[str, ...]
    confidence: float

    @property
    def name(self) -> str:
        """The name of a group that nobody declared: after its first publisher."""
        return f"g-{self.publishers[0]}"


@dataclass(frozen=True, slots=True)
class Findings:
    """What a topic's arrivals in the window say; waits are of the quantile 0.99, by the contract in force."""

    messages: int
    publishers: int
    span_s: float
    rate_mps: float
    needs_r: float
    needs_b: float
    access_ns: int | None = None  # as recorded
    one_bucket_ns: int | None = None  # if the bucket were not split
    groups: tuple[FoundGroup, ...] = ()

    @property
    def group_of(self) -> dict[str, str]:
        """The group of each publisher that is in one."""
        return {publisher: group.name for group in self.groups for publisher in group.publishers}


class Advice(NamedTuple):
    """One piece of advice, in a sentence, and the numbers behind it."""

    kind: Kind
    text: str
    evidence: dict[str, Any]


def judged(
    found: Findings,
    bucket: TokenBucket,
    slo_ns: int,
    declared: Mapping[str, str | None],
    before: Mapping[str, str],
) -> list[Advice]:
    """The advice that findings support. `declared` has all publishers; `before` are groups that were found earlier."""
    advice = []
    if found.messages >= FEWEST_MESSAGES and found.span_s >= SHORTEST_S:
        advice += _of_contract(found, bucket, slo_ns)
        advice += _of_slo(found, slo_ns)
    return advice + _of_new_groups(found, declared) + _of_changed_groups(found, declared, before)


def _of_contract(found: Findings, bucket: TokenBucket, slo_ns: int) -> list[Advice]:
    r, b = float(bucket.r), float(bucket.b)
    wait_ns = found.one_bucket_ns or 0
    evidence = {
        "messages": found.messages,
        "window_s": round(found.span_s, 1),
        "rate": round(found.rate_mps, 3),
        "needs": {"r": found.needs_r, "b": found.needs_b},
        "contract": {"r": r, "b": b},
        "one_bucket_p99_ms": wait_ns / NS_PER_MS,
    }
    terms = f"(r, b) = ({r:g}/s, {b:g})"
    needs = f"({found.needs_r:g}/s, {found.needs_b:g})"
    if found.rate_mps > r or wait_ns > _WAIT * slo_ns:
        # Publishers that are held back send no more than the contract allows, so the topic may need more than this.
        text = f"the contract {terms} is too small: the topic needs at least {needs}; raise r and b to that"
        return [Advice("contract-too-small", text, evidence)]
    settled = found.messages >= _LARGE_MESSAGES and found.span_s >= _LARGE_S
    if settled and (r > _LARGE * found.needs_r or b > _LARGE * found.needs_b):
        text = f"the contract {terms} is too large: the topic needs {needs}; lower r and b to free capacity"
        return [Advice("contract-too-large", text, evidence)]
    return []


def _of_slo(found: Findings, slo_ns: int) -> list[Advice]:
    if found.access_ns is None or found.access_ns < _RISK * slo_ns:
        return []
    wait_ms, slo_ms, one_ms = found.access_ns / NS_PER_MS, slo_ns / NS_PER_MS, (found.one_bucket_ns or 0) / NS_PER_MS
    text = (
        f"the p99 wait for tokens is {wait_ms:.3g} ms of an SLO of {slo_ms:g} ms;"
        f" {max(0.0, wait_ms - one_ms):.3g} ms of it come from the split of the bucket"
    )
    evidence = {"access_p99_ms": wait_ms, "one_bucket_p99_ms": one_ms, "slo_ms": slo_ms}
    return [Advice("slo-at-risk", text, evidence)]


def _of_new_groups(found: Findings, declared: Mapping[str, str | None]) -> list[Advice]:
    new, members = [], 0
    for group in found.groups:
        silent = [name for name in group.publishers if declared.get(name) is None]
        if len(silent) > 1:
            members += len(silent)
            new.append({"group": group.name, "publishers": silent, "confidence": round(group.confidence, 4)})
    if not new:
        return []
    text = (
        f"{members:,} of {found.publishers:,} publishers burst together in {len(new)} group{'s' * (len(new) != 1)} that"
        " nobody declared; declare them, or run srtm advise --auto groups"
    )
    return [Advice("groups-found", text, {"groups": new, "publishers": found.publishers})]


def _of_changed_groups(found: Findings, declared: Mapping[str, str | None], before: Mapping[str, str]) -> list[Advice]:
    known = {**before, **{name: group for name, group in declared.items() if group is not None}}
    group_of = found.group_of
    moved = [
        {"publisher": name, "from": said, "to": seen}
        for name, said, seen in drift(known.keys() & group_of.keys(), known, group_of).moved
        if said is not None and seen is not None
    ]
    if not moved:
        return []
    names = ", ".join(str(each["publisher"]) for each in moved[:_NAMED])
    more = f" and {len(moved) - _NAMED:,} more" if len(moved) > _NAMED else ""
    text = f"{names}{more} burst{'s' * (len(moved) == 1)} with another group than before"
    return [Advice("groups-changed", text, {"moved": moved})]
