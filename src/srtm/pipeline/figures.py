"""Figures of the jobs' results, drawn by plotly: interactive, in one HTML file that needs no network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from srtm.errors import PipelineError, TraceError
from srtm.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from srtm.pipeline.penalty import TopicPenalty
    from srtm.pipeline.plan import Plans
    from srtm.pipeline.profile import TopicProfile

_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
)  # distinguishable for colour-blind readers
_STROKES = ("solid", "dash", "dot", "dashdot")
_LAYOUT: dict[str, Any] = {
    "template": "plotly_white",
    "font": {"family": "system-ui, sans-serif", "size": 14},
    "margin": {"l": 70, "r": 20, "t": 60, "b": 60},
    "height": 420,
    "legend": {"orientation": "h", "y": -0.25},
}


def envelope(line: TopicProfile) -> Any:
    """The fullest windows of a topic, with its token bucket."""
    assert line.bucket is not None
    seconds = [window_ns / NS_PER_S for window_ns in line.envelope]
    figure = empty(
        f"{line.topic}: messages in any window of length Δ",
        "window length Δ (s)",
        "messages",
        log_x=True,
        log_y=True,
    )
    _add(figure, "fullest window of the trace", seconds, list(line.envelope.values()), 0, mode="lines+markers")
    allowed = [line.bucket.b + line.bucket.r * second for second in seconds]
    name = f"b + r·Δ with r = {line.bucket.r:,g}/s, b = {line.bucket.b:,g}"
    _add(figure, name, seconds, allowed, 1, mode="lines")
    long = [second for second in seconds if line.rate_mps * second >= 1]
    _add(figure, "mean rate·Δ", long, [line.rate_mps * second for second in long], 2, mode="lines", dash="dot")
    return figure


def comparison(plans: Plans) -> Any:
    """Tail latency of every policy on every number of brokers, against the SLO."""
    figure = empty(f"{plans.topic}: cost of each split", "brokers k", "p99 end to end (ms)", log_x=False, log_y=True)
    for number, policy in enumerate(dict.fromkeys(plan.policy for plan in plans.plans)):
        known = [plan for plan in plans.plans if plan.policy == policy and plan.latency]
        even = sorted((plan for plan in known if not plan.fitted), key=lambda plan: plan.k)
        ks = [plan.k for plan in even]
        tails = [plan.latency.total.p99 / NS_PER_MS for plan in even if plan.latency]
        # Policies often agree: with different strokes, one line shows through another.
        _add(figure, policy, ks, tails, number, mode="lines+markers", dash=_STROKES[number % len(_STROKES)])
        for plan in known:
            if plan.fitted and plan.latency:
                tail = plan.latency.total.p99 / NS_PER_MS
                _add(figure, f"{policy}, fitted", [plan.k], [tail], number, mode="markers", symbol="star")
    limit_ms = plans.slo.limit_ns / NS_PER_MS
    ends = [min(plan.k for plan in plans.plans), max(plan.k for plan in plans.plans)]
    figure.add_scatter(name=f"SLO, {limit_ms:g} ms", x=ends, y=[limit_ms] * 2, mode="lines", line={"color": "#888"})
    figure.update_xaxes(dtick=1)
    return figure


def waits(line: TopicPenalty) -> Any:
    """Mean wait over time, as recorded and with one bucket."""
    figure = empty(
        f"{line.topic}: waiting for tokens",
        "time since the first window (s)",
        "mean wait (ms)",
        log_x=False,
        log_y=False,
    )
    begin_ns = line.windows[0].begin_ns
    seconds = [(window.begin_ns - begin_ns) / NS_PER_S for window in line.windows]
    means = {
        "recorded, with the bucket split": [window.whole.split for window in line.windows],
        "with one bucket": [window.whole.one for window in line.windows],
    }
    for number, (name, found) in enumerate(means.items()):
        values = [each.total_ns / each.messages / NS_PER_MS for each in found]
        _add(figure, name, seconds, values, number, mode="lines+markers")
    figure.update_yaxes(rangemode="tozero")
    return figure


def write_page(path: Path, title: str, figures: Sequence[Any]) -> None:
    """Write a page with the figures one below the other."""
    body = "\n".join(f"<section>{plot}</section>" for plot in as_html(figures))
    write_text(path, page(title, body))


def write_text(path: Path, text: str) -> None:
    """Write a page; TraceError if that fails."""
    try:
        path.write_text(text)
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror}", path=str(path)) from None


def as_html(figures: Sequence[Any]) -> list[str]:
    """The HTML of each figure; the first includes plotly's code."""
    return [
        figure.to_html(full_html=False, include_plotlyjs=number == 0, config={"displaylogo": False, "responsive": True})
        for number, figure in enumerate(figures)
    ]


def page(title: str, body: str) -> str:
    """A whole page around a body."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; }} h2 {{ font-size: 1.25rem; margin-top: 2.5rem; }} h3 {{ font-size: 1.05rem; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; margin: 1rem 0; }}
th, td {{ padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: bottom; }}
td {{ white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 8rem; }}
thead th {{ border-bottom: 2px solid #888; }}
.note {{ overflow-wrap: anywhere; }}
.good {{ color: #00663f; font-weight: 600; }} .bad {{ color: #b00020; font-weight: 600; }} .note {{ color: #555; }}
</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def empty(title: str, x: str, y: str, *, log_x: bool = False, log_y: bool = False) -> Any:
    """A figure without data."""
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise PipelineError("figures need plotly: pip install 'srtm[spark]'") from None
    figure = go.Figure(layout={**_LAYOUT, "title": title})
    figure.update_xaxes(title=x, type="log" if log_x else "linear")
    figure.update_yaxes(title=y, type="log" if log_y else "linear")
    return figure


def _add(
    figure: Any,
    name: str,
    x: Sequence[float],
    y: Sequence[float],
    number: int,
    *,
    mode: str,
    dash: str = "solid",
    symbol: str = "circle",
) -> None:
    colour = _COLOURS[number % len(_COLOURS)]
    line, marker = {"color": colour, "dash": dash}, {"color": colour, "symbol": symbol, "size": 8}
    figure.add_scatter(name=name, x=list(x), y=list(y), mode=mode, line=line, marker=marker)
