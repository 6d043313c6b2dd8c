"""Shared by both ways of drawing: how panels are grouped, their colours, and the two themes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from srtm.lab.results import family, known

if TYPE_CHECKING:
    from collections.abc import Mapping

    from srtm.lab.result import Panel, Result, Rows

OF_PAPER = ", paper"
COLOURS = ("#e0792b", "#3b8ed0", "#2aa67a", "#c77dbb")  # legible on white and black, and for colour-blind readers


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of everything but the data."""

    text: str
    grid: str
    paper: str


THEMES = {"light": Theme("#222222", "#dddddd", "#ffffff"), "dark": Theme("#dddddd", "#444444", "#0d1117")}


@dataclass(frozen=True, slots=True)
class Drawn:
    """A result's panels, one for each profile of b."""

    result: Result
    panels: Mapping[str, Panel]

    @classmethod
    def of(cls, name: str, rows: Rows) -> Drawn:
        """The panels of a result, drawn from its rows."""
        result = known(name)
        return cls(result, {variant: result.draw(part) for variant, part in rows.variants().items()})


def families(found: Mapping[str, Rows]) -> dict[str, list[Drawn]]:
    """Results by figure, in their order."""
    together: dict[str, list[Drawn]] = {}
    for name, rows in found.items():
        if not rows:
            continue
        together.setdefault(family(name), []).append(Drawn.of(name, rows))
    return together


def colours(panel: Panel) -> list[str]:
    """A colour for every series; the paper's series has the colour of ours."""
    names = list(dict.fromkeys(series.name.removesuffix(OF_PAPER) for series in panel.series))
    return [COLOURS[names.index(series.name.removesuffix(OF_PAPER)) % len(COLOURS)] for series in panel.series]


def heading(panel: Panel, variant: str) -> str:
    """A panel's title."""
    return f"{panel.title}; b at {variant}" if variant else panel.title
