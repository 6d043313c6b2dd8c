"""Claims judged: what the paper says, what it measured, what we did, and whether that holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from srtm.lab.result import Result, Rows


@dataclass(frozen=True, slots=True)
class Verdict:
    """One claim, for one profile of b where a result has several; `holds` is None where it could not be judged."""

    result: str
    b_at: str
    claim: str
    paper: str
    ours: str
    holds: bool | None

    @property
    def word(self) -> str:
        """The verdict for people."""
        return {True: "holds", False: "does not hold", None: "not judged"}[self.holds]


def judge(results: Iterable[Result], found: Mapping[str, Rows]) -> list[Verdict]:
    """Every claim of these results; `found` may have rows of others, which some claims compare with."""
    verdicts = []
    for result in results:
        for name, rows in found[result.name].variants().items():
            for claim in result.claims:
                missing = [other for other in claim.needs if other not in found]
                if missing:
                    holds, ours = None, f"run {', '.join(missing)} as well"
                else:
                    others = [found[other].variants()[name] for other in claim.needs]
                    holds, ours = claim.judge(rows, *others)
                verdicts.append(Verdict(result.name, name, claim.says, claim.paper, ours, holds))
    return verdicts
