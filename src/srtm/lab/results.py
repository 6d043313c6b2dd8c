"""All results by name: those of the paper in its order, then those beyond it."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from srtm.errors import InputError
from srtm.lab import (
    adaptor,
    agreement,
    burst_split,
    fast_fit,
    fig6,
    fig7,
    fig8,
    fig9,
    fig11,
    found_groups,
    garbage,
    kernel_time,
    lending,
    lent_splits,
    other_minute,
    prop1,
    shipped,
    sync,
    table1,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from srtm.lab.result import Result

_FILES = (
    *(prop1, sync, kernel_time, garbage, adaptor, fig6, fig7, fig8, fig9, fig11, table1, other_minute),
    *(fast_fit, burst_split, lending, lent_splits, found_groups, agreement, shipped),
)
LIVE = "-live"
RESULTS: dict[str, Result] = {result.name: result for file in _FILES for result in file.RESULTS}


def live() -> dict[str, Result]:
    """Live forms in the same order, with names such as fig6a-live."""
    from srtm.lab.live import fig6a, fig7, fig8, fig9, kernel_time  # a whole cluster is behind them

    return {result.name: result for file in (kernel_time, fig6a, fig7, fig8, fig9) for result in file.RESULTS}


def known(name: str) -> Result:
    """The result of this name, in either form."""
    return RESULTS[name] if name in RESULTS else live()[name]


def named_live(names: Sequence[str]) -> list[Result]:
    """The live forms of these results."""
    forms = {name.removesuffix(LIVE): result for name, result in live().items()}
    wanted = [result.name for result in named(names)]
    found = [forms[name] for name in wanted if name in forms]
    if not found:
        raise InputError(f"{' and '.join(wanted)} cannot run live; results with a live form: {', '.join(forms)}")
    return found


def named(names: Sequence[str]) -> list[Result]:
    """The results of these names, each once, in order; `fig7` stands for its panels, `all` for everything."""
    chosen = set()
    for name in names:
        found = [known for known in RESULTS if name in ("all", known, family(known))]
        if not found:
            near = get_close_matches(name, RESULTS, 1)
            hint = f"did you mean {near[0]}?" if near else f"known results: {', '.join(RESULTS)}, all"
            raise InputError(f"unknown result {name!r}; {hint}", name=name)
        chosen.update(found)
    return [result for result in RESULTS.values() if result.name in chosen]


def family(name: str) -> str:
    """The figure of a panel: fig7 for fig7c; any other result stands for itself."""
    return name[:-1] if name.startswith("fig") and name[-1] in "abcd" else name
