"""The report: every claim with a picture of its evidence, on one self-contained HTML page, in light and dark."""

from __future__ import annotations

import re
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from srtm.lab import svg
from srtm.lab.claims import KINDS, NOT_JUDGED, WORDS, judge, rules, tally
from srtm.lab.results import family, known
from srtm.pipeline import figures

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from srtm.lab.claims import Verdict
    from srtm.lab.result import Claim, Rows, Value
    from srtm.lab.sweep import Settings

_STYLE = (
    """<style>
:root { color-scheme: light dark; }
body { max-width: 84rem; margin: 1rem auto; } main > p { max-width: 60rem; } h2 { margin: 2rem 0 .2rem; }
td, th { text-align: left !important; padding: .3rem .5rem; } th { white-space: normal; }
td.n { text-align: right !important; }
form { position: sticky; top: 0; z-index: 1; background: Canvas; padding: .5rem 0; display: flex; flex-wrap: wrap;
  gap: .4rem 1rem; border-bottom: 1px solid #8885; } select { font: inherit; max-width: 60vw; }
article { border-top: 1px solid #8885; padding: .8rem 0; display: grid; gap: .6rem 1.5rem;
  grid-template-columns: minmax(0, 1fr) minmax(0, 44rem); }
article p { margin: .2rem 0; } .says { font-weight: 600; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: .5rem; }
figure { margin: 0; min-width: 0; } figcaption { font-size: .8rem; }
figure svg { width: 100%; height: auto; max-width: 26rem; }
.held { color: #00663f; } .failed { color: #b00020; } .held, .failed, .open { font-weight: 600; }
.why { border-left: 3px solid #8888; padding-left: .6rem; font-size: .9rem; } [hidden] { display: none !important; }
@media (max-width: 60rem) { article { grid-template-columns: minmax(0, 1fr); } body { padding: 0 .7rem; } }
@media (prefers-color-scheme: dark) {
  body { background: #0d1117; color: #ddd; } form { background: #0d1117; } th, td { border-color: #333; }
  .held { color: #5fd39a; } .failed { color: #ff8a8a; } .note { color: #aaa; } a { color: #79b8ff; }
}
"""
    + svg.STYLE
    + "</style>"
)
_SCRIPT = """<script>
const form = document.querySelector("form"), claims = [...document.querySelectorAll("article")];
function choose() {
  const wanted = Object.fromEntries(new FormData(form));
  for (const part of document.querySelectorAll("[data-rule]"))
    part.hidden = Boolean(wanted.rule && part.dataset.rule && part.dataset.rule !== wanted.rule);
  for (const claim of claims) {
    const parts = [...claim.querySelectorAll("[data-word]")].filter(part => !part.hidden);
    const fits = ["figure", "kind"].every(name => !wanted[name] || claim.dataset[name] === wanted[name]);
    claim.hidden = !fits || !parts.some(part => !wanted.word || part.dataset.word === wanted.word);
  }
  for (const section of document.querySelectorAll("section"))
    section.hidden = ![...section.querySelectorAll("article")].some(claim => !claim.hidden);
  const left = claims.filter(claim => !claim.hidden).length;
  form.querySelector("output").value = `${left} of ${claims.length} claims`;
}
form.addEventListener("change", choose); choose();
</script>"""
_READING = (
    "Points are means, bars standard deviations, numbers beside points k. p99 is that of the worst broker, because the"
    " SLO must hold at each; in Fig. 6 it is that of all messages. Classes are counted apart: claims of the paper,"
    " calibration (what the preset was fitted on) and ours. So are the rules for b; a claim with one rule counts with"
    " the first."
)


def write_page(path: Path, found: Mapping[str, Rows], settings: Settings) -> None:
    """Write the page of these results."""
    verdicts = judge([known(name) for name in found], found)
    pictures: dict[str, str] = {}
    body = [
        _STYLE,
        f"<h1>The paper's evaluation, {'live' if settings.live else 'simulated'}</h1>",
        f'<p class="note">{escape(_made(settings))}. {_READING}</p>',
        _summary(verdicts),
        _filters(verdicts),
    ]
    for name, of_result in groupby(verdicts, lambda verdict: verdict.result):
        result, own = known(name), list(of_result)
        body.append(f'<section id="{name}"><h2>{name}: {escape(result.title)}</h2><p>{escape(result.shows)}</p>')
        for number, claim in enumerate(result.claims):
            judged = own[number :: len(result.claims)]
            body.append(_article(claim, judged, found[name].variants(), pictures))
        body.append("</section>")
    symbols = "".join(
        f'<symbol id="{name}" viewBox="0 0 {svg.WIDTH} {svg.HEIGHT}">{drawn}</symbol>'
        for name, drawn in pictures.items()
    )
    body += [f'<svg width="0" height="0" style="position:absolute">{symbols}</svg>', _SCRIPT]
    figures.write_text(path, figures.page("SRTM: the lab", "\n".join(body)))


def write_claims(path: Path, found: Mapping[str, Rows], settings: Settings) -> None:
    """Write the table of claims as Markdown, the reasons of those that fail, and the tables of results."""
    verdicts = judge([known(name) for name in found], found)
    by_rule = rules(verdicts)
    lines = [f"{_made(settings)}.", "", *_counted(by_rule), ""]
    pairs = " | ".join(f"{_named(rule)} | verdict" for rule in by_rule)
    lines += [f"| result | class | where | claim | paper | {pairs} |", f"|{'---|' * (5 + 2 * len(by_rule))}"]
    for (result, claim), of_claim in groupby(
        sorted(enumerate(verdicts), key=lambda each: _place(each[1], verdicts)),
        lambda each: (each[1].result, each[1].claim),
    ):
        judged = {verdict.b_at or next(iter(by_rule)): verdict for _, verdict in of_claim}
        one = next(iter(judged.values()))
        cells = [f"{judged[rule].ours} | {judged[rule].word}" if rule in judged else "— | —" for rule in by_rule]
        lines.append(f"| {result} | {one.kind} | {one.where or '—'} | {claim} | {one.paper} | {' | '.join(cells)} |")
    if told := [verdict for verdict in verdicts if verdict.why]:
        lines += ["", "**Why claims fail**", ""]
        lines += [f"- {v.result}{f', b at {v.b_at}' if v.b_at else ''}, *{v.claim}*: {_by_line(v.why)}" for v in told]
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


def _by_line(text: str) -> str:
    """One sentence per line, in an item of a list."""
    return re.sub(r"(?<=\.) (?=[A-Z])", "\n  ", text)


def _place(verdict: Verdict, verdicts: Sequence[Verdict]) -> int:
    """Where a claim comes first, under any rule."""
    return next(n for n, v in enumerate(verdicts) if (v.result, v.claim) == (verdict.result, verdict.claim))


def _made(settings: Settings) -> str:
    scale = f", {settings.live.name}" if settings.live else ""
    tiny = ", tiny form" if settings.tiny else ""
    return f"Seed {settings.seed}, {settings.repetitions} repetitions{tiny}{scale}"


def _named(rule: str) -> str:
    return f"b at {rule}" if rule else "ours"


def _counted(by_rule: Mapping[str, Sequence[Verdict]]) -> list[str]:
    """Class × verdict, as Markdown."""
    lines = [f"| | class | {' | '.join(WORDS)} |", f"|---|---|{'---:|' * len(WORDS)}"]
    for rule, verdicts in by_rule.items():
        for kind, counts in tally(verdicts).items():
            if counts.total():
                lines.append(f"| {_named(rule)} | {kind} | {' | '.join(str(counts[word]) for word in WORDS)} |")
    return lines


def _summary(verdicts: Sequence[Verdict]) -> str:
    heads = "".join(f"<th>{head}</th>" for head in ("", "class", *WORDS))
    rows = [
        f"<tr><td>{_named(rule)}</td><td>{kind}</td>"
        + "".join(f'<td class="n">{counts[word]}</td>' for word in WORDS)
        + "</tr>"
        for rule, some in rules(verdicts).items()
        for kind, counts in tally(some).items()
        if counts.total()
    ]
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _filters(verdicts: Sequence[Verdict]) -> str:
    words = [word for word in (*WORDS, NOT_JUDGED) if any(verdict.word == word for verdict in verdicts)]
    chosen: dict[str, dict[str, str]] = {
        "figure": {name: name for name in dict.fromkeys(family(verdict.result) for verdict in verdicts)},
        "verdict": {word: word for word in words},
        "class": {kind: kind for kind in KINDS if any(verdict.kind == kind for verdict in verdicts)},
        "b at": {rule: rule for rule in rules(verdicts) if rule},
    }
    names = {"figure": "figure", "verdict": "word", "class": "kind", "b at": "rule"}
    fields = [
        f'<label>{label} <select name="{names[label]}"><option value="">all</option>'
        + "".join(f'<option value="{value}">{text}</option>' for value, text in values.items())
        + "</select></label>"
        for label, values in chosen.items()
        if values
    ]
    return f"<form>{''.join(fields)}<output></output></form>"


def _article(claim: Claim, judged: Sequence[Verdict], variants: Mapping[str, Rows], pictures: dict[str, str]) -> str:
    """A claim, its verdict under each rule for b, and its pictures."""
    said, drawn = [], []
    for verdict in judged:
        style = verdict.word if verdict.word in ("held", "failed") else "open"
        rule = f"b at {verdict.b_at}: " if verdict.b_at else ""
        why = f'<p class="why">{escape(verdict.why)}</p>' if verdict.why else ""
        said.append(
            f'<div data-rule="{verdict.b_at}" data-word="{verdict.word}"><p><span class="{style}">{verdict.word}</span>'
            f" · {rule}{escape(verdict.ours)}</p>{why}</div>"
        )
        result = known(verdict.result)
        draw = claim.draw or result.draw
        panel = draw(variants[verdict.b_at]) if variants[verdict.b_at] else None
        if panel and panel.series:
            own = f"-{result.claims.index(claim)}" if claim.draw else ""
            name = f"p-{verdict.result}{own}-{list(variants).index(verdict.b_at)}"
            pictures.setdefault(name, svg.drawn(panel))
            title = f"{panel.title}; b at {verdict.b_at}" if verdict.b_at else panel.title
            drawn.append(
                f'<figure data-rule="{verdict.b_at}"><figcaption>{escape(title)}</figcaption>'
                f'<svg viewBox="0 0 {svg.WIDTH} {svg.HEIGHT}" role="img"><title>{escape(title)}</title>'
                f'<use href="#{name}"/></svg></figure>'
            )
    one = judged[0]
    where = f"section {one.where}" if one.where[:1].isdigit() else one.where
    place = f"{one.kind}{f' · {escape(where)}' if where else ''}"
    paper = f" · paper: {escape(one.paper)}" if one.paper != "—" else ""
    head = f'<p class="note">{one.result} · {place}{paper}</p><p class="says">{escape(one.claim)}</p>'
    return (
        f'<article data-figure="{family(one.result)}" data-kind="{one.kind}"><div>{head}{"".join(said)}</div>'
        f'<div class="pictures">{"".join(drawn)}</div></article>'
    )
