"""Verdicts on claims: the paper's words, its number, our number, and whether the claim holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from srtm.lab.result import Kind, Result, Rows

HELD, FAILED, NOT_REPRODUCIBLE, NOT_JUDGED = "held", "failed", "not reproducible", "not judged"
WORDS = (HELD, FAILED, NOT_REPRODUCIBLE)
KINDS: tuple[Kind, ...] = ("paper", "calibration", "ours")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One claim, for one profile of b if a result has several; `holds` is None if it could not be judged."""

    result: str
    b_at: str
    claim: str
    paper: str
    ours: str
    holds: bool | None
    kind: Kind = "paper"
    where: str = ""
    why: str = ""
    reproducible: bool = True

    @property
    def word(self) -> str:
        """The verdict in words."""
        if not self.reproducible:
            return NOT_REPRODUCIBLE
        return {True: HELD, False: FAILED, None: NOT_JUDGED}[self.holds]


def judge(results: Iterable[Result], found: Mapping[str, Rows]) -> list[Verdict]:
    """Judge every claim of these results; `found` may hold rows of other results that claims compare with."""
    verdicts = []
    for result in results:
        for name, rows in found[result.name].variants().items():
            for claim in result.claims:
                holds: bool | None = None
                missing = [other for other in claim.needs if other not in found]
                if claim.judge is None:
                    ours = "—"
                elif missing:
                    ours = f"also needs {', '.join(missing)}"
                else:
                    others = [found[other].variants()[name] for other in claim.needs]
                    holds, ours = claim.judge(rows, *others)
                told = claim.judge is None or holds is False
                verdicts.append(
                    Verdict(
                        result.name,
                        name,
                        claim.says,
                        claim.paper,
                        ours,
                        holds,
                        claim.kind,
                        claim.where,
                        claim.reason(name) if told else "",
                        claim.judge is not None,
                    )
                )
    return verdicts


def rules(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """The verdicts under each rule for b, never added up; what has one rule counts with the paper's, the first."""
    by_rule: dict[str, list[Verdict]] = {}
    listed = list(verdicts)
    names = list(dict.fromkeys(verdict.b_at for verdict in listed if verdict.b_at)) or [""]
    for verdict in listed:
        by_rule.setdefault(verdict.b_at or names[0], []).append(verdict)
    return {name: by_rule[name] for name in names if name in by_rule}


def tally(verdicts: Iterable[Verdict]) -> dict[Kind, Counter[str]]:
    """How many claims of each kind have each verdict."""
    found: dict[Kind, Counter[str]] = {kind: Counter() for kind in KINDS}
    for verdict in verdicts:
        found[verdict.kind][verdict.word] += 1
    return found
