"""The report: all figures and claims on one self-contained HTML page, in light and dark."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from srtm.lab.claims import judge
from srtm.lab.drawing import THEMES, colours, families, heading
from srtm.lab.results import known
from srtm.pipeline import figures

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from srtm.lab.claims import Verdict
    from srtm.lab.result import Panel, Rows, Value
    from srtm.lab.sweep import Settings

_STYLE = """<style>
:root { color-scheme: light dark; }
body { max-width: 84rem; }
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); gap: 1rem; }
.beside > * { min-width: 0; }
td, th { text-align: left !important; }
td:nth-child(n+3):not(:last-child) { white-space: normal; }
@media (prefers-color-scheme: dark) {
  body { background: #0d1117; color: #ddd; } th, td { border-color: #333; }
  .good { color: #5fd39a; } .bad { color: #ff8a8a; } .note { color: #aaa; }
}
</style>"""
_SCRIPT = """<script>
const dark = matchMedia("(prefers-color-scheme: dark)"), themes = THEMES;
function paint() {
  const [text, grid] = themes[dark.matches ? "dark" : "light"], change = {"font.color": text};
  for (const axis of ["xaxis", "yaxis"]) { change[axis + ".gridcolor"] = grid; change[axis + ".linecolor"] = grid; }
  for (const figure of document.querySelectorAll(".plotly-graph-div")) {
    Plotly.relayout(figure, change);
    Plotly.Plots.resize(figure); // it was drawn before its neighbour was there
  }
}
dark.addEventListener("change", paint); addEventListener("load", paint);
</script>"""
_READING = (
    "Points are means, bars standard deviations, numbers beside points k. p99 is that of the worst broker, because the "
    "SLO must hold at each; in Fig. 6 it is that of all messages."
)


def write_page(path: Path, found: Mapping[str, Rows], settings: Settings) -> None:
    """Write the page of these results."""
    verdicts = judge([known(name) for name in found], found)
    drawn = [each for together in families(found).values() for each in together]
    plots = [_figure(panel, variant) for each in drawn for variant, panel in each.panels.items()]
    pieces = iter(figures.as_html(plots))
    holds = sum(verdict.holds is True for verdict in verdicts)
    body = [
        _STYLE,
        f"<h1>The paper's evaluation, {'live' if settings.live else 'simulated'}</h1>",
        f'<p class="note">{_made(settings)}. {holds} of {len(verdicts)} claims hold. {_READING}</p>',
        _table(verdicts),
    ]
    for each in drawn:
        own = [verdict for verdict in verdicts if verdict.result == each.result.name]
        body += [
            f'<h2 id="{each.result.name}">{each.result.name}: {escape(each.result.title)}</h2>',
            f"<p>{escape(each.result.shows)}</p>",
            '<div class="beside">',
            *(f"<div>{next(pieces)}</div>" for _ in each.panels),
            "</div>",
            _table(own),
        ]
    themes = {name: [theme.text, theme.grid] for name, theme in THEMES.items()}
    body.append(_SCRIPT.replace("THEMES", str(themes)))
    figures.write_text(path, figures.page("SRTM: the lab", "\n".join(body)))


def write_claims(path: Path, found: Mapping[str, Rows], settings: Settings) -> None:
    """Write the table of claims as Markdown."""
    verdicts = judge([known(name) for name in found], found)
    holds = sum(verdict.holds is True for verdict in verdicts)
    lines = [
        f"{_made(settings)}: {holds} of {len(verdicts)} claims hold.",
        "",
        "| result | b at | claim | paper | ours | |",
        "|---|---|---|---|---|---|",
        *(f"| {v.result} | {v.b_at or '—'} | {v.claim} | {v.paper} | {v.ours} | {v.word} |" for v in verdicts),
    ]
    for name, rows in found.items():
        if columns := known(name).columns:
            heads = columns.values()
            lines += ["", f"**{name}**", "", f"| {' | '.join(heads)} |", f"|{'---|' * len(columns)}"]
            lines += [f"| {' | '.join(shown(row[column]) for column in columns)} |" for row in rows]
    figures.write_text(path, "\n".join(lines) + "\n")


def shown(value: Value) -> str:
    """A value of a row, formatted for a table."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


def _made(settings: Settings) -> str:
    scale = f", {settings.live.name}" if settings.live else ""
    tiny = ", tiny form" if settings.tiny else ""
    return f"Seed {settings.seed}, {settings.repetitions} repetitions{tiny}{scale}"


def _table(verdicts: Sequence[Verdict]) -> str:
    kinds = {True: "good", False: "bad", None: "note"}
    rows = [
        f'<tr><td><a href="#{v.result}">{v.result}</a></td><td>{v.b_at or "—"}</td><td>{escape(v.claim)}</td>'
        f"<td>{escape(v.paper)}</td><td>{escape(v.ours)}</td>"
        f'<td class="{kinds[v.holds]}">{v.word}</td></tr>'
        for v in verdicts
    ]
    heads = "".join(f"<th>{head}</th>" for head in ("result", "b at", "claim", "paper", "ours", "verdict"))
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _figure(panel: Panel, variant: str) -> Any:
    figure = figures.empty(heading(panel, variant), panel.x, panel.y, log_y=panel.log_y)
    for number, (series, colour) in enumerate(zip(panel.series, colours(panel), strict=True)):
        paper = "paper" in series.name
        figure.add_scatter(
            name=series.name,
            x=list(series.x),
            y=list(series.y),
            error_y={"array": list(series.error), "thickness": 1} if series.error else None,
            mode=("lines+markers" if series.line else "markers") + ("+text" if series.labels else ""),
            text=list(series.labels) if series.labels else None,
            textposition="top right" if number % 2 == 0 else "bottom right",
            textfont={"color": colour, "size": 12},
            line={"color": colour, "dash": "dot" if paper else "solid"},
            marker={"color": colour, "size": 9, "symbol": "x" if paper else "circle"},
        )
    figure.update_layout(paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", margin={"t": 50, "l": 70})
    ticks = sorted({x for series in panel.series for x in series.x})
    figure.update_xaxes(tickvals=ticks)
    if panel.slo_ms:
        line = {"color": "#888", "dash": "dash", "width": 1}
        figure.add_scatter(name="SLO", x=[ticks[0], ticks[-1]], y=[panel.slo_ms] * 2, mode="lines", line=line)
    return figure
