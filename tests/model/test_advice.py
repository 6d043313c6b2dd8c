"""Advice from findings: each kind has a case that asks for it, and one just beside that does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from srtm.model.advice import KINDS, Findings, FoundGroup, judged
from srtm.model.bucket import TokenBucket
from srtm.units import NS_PER_MS

FITTING = Findings(6000, 100, 60.0, 100.0, 110.0, 50.0, access_ns=0, one_bucket_ns=0)
BUCKET = TokenBucket.of(110, 50)
SLO_NS = NS_PER_MS
NAMES = tuple(f"p{number}" for number in range(6))
SILENT = dict.fromkeys(NAMES)


def kinds(found: Findings, bucket: TokenBucket = BUCKET, **more: dict[str, str | None]) -> list[str]:
    declared = more.get("declared", SILENT)
    before = {name: group for name, group in more.get("before", {}).items() if group is not None}
    return [each.kind for each in judged(found, bucket, SLO_NS, declared, before)]


def test_a_contract_that_fits_needs_no_advice() -> None:
    assert kinds(FITTING) == []


@pytest.mark.parametrize(
    "found",
    [
        replace(FITTING, rate_mps=220.0, needs_r=242.0),
        replace(FITTING, needs_b=100.0, one_bucket_ns=SLO_NS // 5, access_ns=SLO_NS // 5),
    ],
)
def test_too_small_by_rate_or_by_burst(found: Findings) -> None:
    assert kinds(found) == ["contract-too-small"]
    assert kinds(replace(found, messages=99)) == [], "too few messages to tell"
    assert kinds(replace(found, span_s=4.0)) == [], "too short to tell"
    (advice,) = judged(found, BUCKET, SLO_NS, SILENT, {})
    assert advice.evidence["needs"] == {"r": found.needs_r, "b": found.needs_b}
    assert advice.evidence["contract"] == {"r": 110.0, "b": 50.0}
    assert f"({found.needs_r:g}/s, {found.needs_b:g})" in advice.text


@pytest.mark.parametrize(("r", "b"), [(221, 50), (110, 101)])
def test_too_large_beyond_twice_what_it_needs(r: int, b: int) -> None:
    assert kinds(FITTING, TokenBucket.of(r, b)) == ["contract-too-large"]
    assert kinds(FITTING, TokenBucket.of(r - 1, b - 1)) == []
    assert kinds(replace(FITTING, span_s=29.0), TokenBucket.of(r, b)) == []


def test_an_slo_that_waiting_alone_nearly_breaks_is_at_risk() -> None:
    at_risk = replace(FITTING, access_ns=8 * SLO_NS // 10)
    (advice,) = judged(at_risk, BUCKET, SLO_NS, SILENT, {})
    assert (advice.kind, advice.evidence["access_p99_ms"]) == ("slo-at-risk", 0.8)
    assert "0.8 ms of it come from the split" in advice.text
    assert kinds(replace(FITTING, access_ns=7 * SLO_NS // 10)) == []
    assert kinds(replace(FITTING, access_ns=None)) == []


def test_groups_that_nobody_declared() -> None:
    found = replace(FITTING, groups=(FoundGroup(NAMES[:3], 0.9), FoundGroup(NAMES[3:5], 0.8)))
    (advice,) = judged(found, BUCKET, SLO_NS, SILENT, {})
    assert advice.kind == "groups-found"
    assert [each["publishers"] for each in advice.evidence["groups"]] == [list(NAMES[:3]), list(NAMES[3:5])]
    assert advice.text.startswith("5 of 100 publishers burst together in 2 groups")
    declared = {**SILENT, **dict.fromkeys(NAMES[:3], "a"), **dict.fromkeys(NAMES[3:], "b")}
    assert kinds(found, declared=declared) == []
    assert kinds(found, declared={**declared, "p4": None}) == [], "one alone does not burst together"


def test_publishers_that_changed_their_group() -> None:
    groups = (FoundGroup(("p0", "p1"), 0.9), FoundGroup(("p2", "p3", "p4", "p5"), 0.9))
    found = replace(FITTING, groups=groups)
    declared: dict[str, str | None] = {name: "a" if name < "p3" else "b" for name in NAMES}
    (advice,) = judged(found, BUCKET, SLO_NS, declared, {})
    assert advice.kind == "groups-changed"
    assert [(each["publisher"], each["from"]) for each in advice.evidence["moved"]] == [("p2", "a")]
    assert kinds(found, before=declared) == ["groups-found", "groups-changed"]
    same: dict[str, str | None] = {name: "a" if name < "p2" else "b" for name in NAMES}
    assert kinds(found, declared=same) == [], "names of groups do not matter"


def test_every_kind_is_listed_once() -> None:
    assert len(set(KINDS)) == len(KINDS) == 5
