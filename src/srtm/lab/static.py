"""Figures for documents: every figure as SVG and PNG, for light and dark pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from srtm.errors import InputError, PipelineError
from srtm.lab.drawing import THEMES, colours, families, heading

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from srtm.lab.drawing import Drawn, Theme
    from srtm.lab.result import Panel, Rows

_WIDTH, _HEIGHT = 5.2, 3.4  # inches of a panel


def write_figures(folder: Path, found: Mapping[str, Rows]) -> list[Path]:
    """Draw every figure that has rows, and return the files written."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise PipelineError("drawing figures needs matplotlib; pip install 'srtm[lab]'") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--figures: cannot create {folder}: {error.strerror}") from None
    written = []
    for name, together in families(found).items():
        for theme_name, theme in THEMES.items():
            stem = name if theme_name == "light" else f"{name}-dark"
            # The same rows give the same bytes: no date and no random names.
            with mpl.rc_context({"svg.hashsalt": stem, "svg.fonttype": "none", **_colours(theme)}):
                figure = _figure(together)
                for kind, extra in (("svg", {"metadata": {"Date": None}}), ("png", {"dpi": 110})):
                    path = folder / f"{stem}.{kind}"
                    figure.savefig(path, **extra)
                    written.append(path)
    return written


def _colours(theme: Theme) -> dict[str, Any]:
    parts = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")
    grounds = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    return {
        **dict.fromkeys(parts, theme.text),
        **dict.fromkeys(grounds, theme.paper),
        "axes.edgecolor": theme.grid,
        "grid.color": theme.grid,
        "font.size": 10,
        "font.family": "sans-serif",
    }


def _figure(together: Sequence[Drawn]) -> Any:
    from matplotlib.figure import Figure

    variants = len(together[0].panels)
    # Profiles of b are drawn side by side; with a single profile, panels are.
    rows, columns = (len(together), variants) if variants > 1 else (1, len(together))
    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey="row" if variants > 1 else False).ravel()
    cells = [(drawn, variant, panel) for drawn in together for variant, panel in drawn.panels.items()]
    for axis, (drawn, variant, panel) in zip(axes, cells, strict=True):
        letter = f"({drawn.result.name[-1]}) " if len(together) > 1 else ""
        _draw(axis, panel, letter + heading(panel, variant))
    named = {name: line for axis in axes for line, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named, loc="outside lower center", ncols=3 * columns, frameon=False)
    return figure


def _draw(axis: Any, panel: Panel, title: str) -> None:
    from matplotlib.ticker import LogLocator

    # Labels stay legible on lines.
    ground = {"facecolor": axis.get_facecolor(), "edgecolor": "none", "pad": 0.5, "alpha": 0.7}
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(panel.x)
    axis.set_ylabel(panel.y)
    axis.grid(visible=True, linewidth=0.6)
    axis.set_axisbelow(True)
    if panel.log_y:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
    for number, (series, colour) in enumerate(zip(panel.series, colours(panel), strict=True)):
        paper = "paper" in series.name
        style = {"color": colour, "marker": "x" if paper else "o", "markersize": 7 if paper else 4, "capsize": 3}
        line = "none" if not series.line else ":" if paper else "-"
        axis.errorbar(series.x, series.y, yerr=series.error, label=series.name, linestyle=line, **style)
        for x, y, label in zip(series.x, series.y, series.labels or (), strict=False):
            place = {"xytext": (4, 4 if number % 2 == 0 else -11), "textcoords": "offset points"}
            axis.annotate(label, (x, y), color=colour, fontsize=8, bbox=ground, **place)
    if panel.slo_ms:
        axis.axhline(panel.slo_ms, color="#888888", linestyle="--", linewidth=1, label="SLO")
    axis.set_xticks(sorted({x for series in panel.series for x in series.x}))
    axis.margins(x=0.08, y=0.15)
    if not panel.log_y:
        axis.set_ylim(
            bottom=-0.03 * axis.get_ylim()[1]
        )  # a standard deviation may reach below zero; a latency does not
