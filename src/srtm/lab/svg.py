"""A panel as inline SVG. Text and axes have the colours of the page, so it is legible in light and dark."""

from __future__ import annotations

from html import escape
from math import ceil, floor, log10
from typing import TYPE_CHECKING

from srtm.lab.drawing import colours

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from srtm.lab.result import Panel, Series

WIDTH, HEIGHT = 340, 236
_LEFT, _RIGHT, _BOTTOM = 44, 14, 36
_LINE = 13  # height of a line of the legend
_MOST_TICKS = 8
STYLE = """
.axis { stroke: currentColor; stroke-opacity: .25; } .tick { fill: currentColor; font-size: 10px; }
.name { font-size: 10.5px; } .slo { stroke: currentColor; stroke-opacity: .7; stroke-dasharray: 4 3; }
"""


def drawn(panel: Panel) -> str:
    """The elements of a picture of WIDTH × HEIGHT."""
    names = [series.name for series in panel.series] + (["SLO"] if panel.slo_ms else [])
    top = 14 + _LINE * ceil(len(names) / 2)
    xs = sorted({x for series in panel.series for x in series.x})
    lows = [
        y - e for series in panel.series for y, e in zip(series.y, series.error or [0] * len(series.y), strict=True)
    ]
    ys = [y for series in panel.series for y in series.y] + ([panel.slo_ms] if panel.slo_ms else [])
    across = _linear(xs[0], xs[-1], _LEFT + 12, WIDTH - _RIGHT - 12)
    ticks = _log_ticks(min(y for y in ys if y > 0), max(ys)) if panel.log_y else _ticks(min(0.0, *lows), max(ys))
    up = _log if panel.log_y else _linear
    height = up(ticks[0], ticks[-1], HEIGHT - _BOTTOM, top + 6)
    parts = [
        f'<path class="axis" d="M{_LEFT} {height(y):.1f}H{WIDTH - _RIGHT}"/>'
        f'<text class="tick" x="{_LEFT - 4}" y="{height(y) + 3:.1f}" text-anchor="end">{_short(y)}</text>'
        for y in ticks
    ]
    every = ceil(len(xs) / _MOST_TICKS)
    parts += [
        f'<text class="tick" x="{across(x):.1f}" y="{HEIGHT - _BOTTOM + 13}" text-anchor="middle">{_short(x)}</text>'
        for x in xs[::every]
    ]
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(panel.x)}</text>')
    if panel.slo_ms:
        parts.append(f'<path class="slo" d="M{_LEFT} {height(panel.slo_ms):.1f}H{WIDTH - _RIGHT}"/>')
    shown = zip(panel.series, colours(panel), strict=True)
    parts += [_series(series, colour, across, height, number) for number, (series, colour) in enumerate(shown)]
    parts += _legend(panel, names)
    return "".join(parts)


def _series(
    series: Series, colour: str, across: Callable[[float], float], height: Callable[[float], float], number: int
) -> str:
    paper = "paper" in series.name
    places = [(across(x), height(y)) for x, y in zip(series.x, series.y, strict=True)]
    parts = []
    if series.line and len(places) > 1:
        dash = ' stroke-dasharray="2 3"' if paper else ""
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path fill="none" stroke="{colour}" stroke-width="1.6"{dash} d="M{line}"/>')
    for (x, _), y, error in zip(places, series.y, series.error or (), strict=False):
        if error:
            ends = f"M{x:.1f} {height(y - error):.1f}V{height(y + error):.1f}"
            parts.append(f'<path stroke="{colour}" stroke-opacity=".5" d="{ends}"/>')
    for x, y in places if len(places) <= 20 else ():
        cross = f'<path stroke="{colour}" stroke-width="2" d="M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6"/>'
        parts.append(cross if paper else f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>')
    below = 12 if number % 2 else -5
    parts += [
        f'<text class="tick" style="fill:{colour}" x="{x + 4:.1f}" y="{y + below:.1f}">{escape(label)}</text>'
        for (x, y), label in zip(places, series.labels or (), strict=False)
    ]
    return "".join(parts)


def _legend(panel: Panel, names: Sequence[str]) -> list[str]:
    parts = [f'<text class="name tick" x="2" y="{8 + _LINE * ceil(len(names) / 2):.0f}">{escape(panel.y)}</text>']
    marks = [*colours(panel), "currentColor"]
    for number, (name, colour) in enumerate(zip(names, marks, strict=False)):
        x, y = 8 + (WIDTH // 2) * (number % 2), 9 + _LINE * (number // 2)
        dash = ' stroke-dasharray="3 2"' if name == "SLO" or "paper" in name else ""
        parts.append(
            f'<path stroke="{colour}" stroke-width="2"{dash} d="M{x} {y - 3}h14"/>'
            f'<text class="name tick" x="{x + 18}" y="{y}">{escape(name)}</text>'
        )
    return parts


def _linear(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: begin + (value - low) / span * (end - begin)


def _log(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    linear = _linear(log10(low), log10(high), begin, end)
    return lambda value: linear(log10(max(value, low)))


def _ticks(low: float, high: float) -> list[float]:
    """About four round numbers around a range."""
    rough = ((high - low) or 1.0) / 4
    unit = 10 ** floor(log10(rough))
    step = next(step for step in (1, 2, 5, 10) if step * unit >= rough) * unit
    return [round(number * step, 9) for number in range(floor(low / step), ceil(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten around a range, and 2 and 5 between them if it is short."""
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) <= 3 else (1,)
    found = [step * 10.0**decade for decade in decades for step in steps]
    below = max((tick for tick in found if tick <= low), default=found[0])
    above = min((tick for tick in found if tick >= high), default=found[-1])
    return [tick for tick in found if below <= tick <= above] if below < above else [below, 2 * below]


def _short(value: float) -> str:
    return f"{value / 1_000:g}k" if abs(value) >= 1_000 else f"{value:.3g}"
