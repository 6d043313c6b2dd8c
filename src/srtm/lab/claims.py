"""Verdicts on claims: the paper's words, its number, our number, and whether the claim holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from srtm.lab.result import Result, Rows


@dataclass(frozen=True, slots=True)
class Verdict:
    """One claim, for one profile of b if a result has several; `holds` is None if it could not be judged."""

    result: str
    b_at: str
    claim: str
    paper: str
    ours: str
    holds: bool | None

    @property
    def word(self) -> str:
        """The verdict in words."""
        return {True: "holds", False: "does not hold", None: "not judged"}[self.holds]


def judge(results: Iterable[Result], found: Mapping[str, Rows]) -> list[Verdict]:
    """Judge every claim of these results; `found` may hold rows of other results that claims compare with."""
    verdicts = []
    for result in results:
        for name, rows in found[result.name].variants().items():
            for claim in result.claims:
                missing = [other for other in claim.needs if other not in found]
                if missing:
                    holds, ours = None, f"also needs {', '.join(missing)}"
                else:
                    others = [found[other].variants()[name] for other in claim.needs]
                    holds, ours = claim.judge(rows, *others)
                verdicts.append(Verdict(result.name, name, claim.says, claim.paper, ours, holds))
    return verdicts
