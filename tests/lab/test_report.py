"""The page is whole in itself, and figures are drawn for light and dark."""

from __future__ import annotations

import json
import re
from html import escape
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from srtm.cli.app import run
from srtm.lab import static, svg
from srtm.lab.drawing import Drawn, colours
from srtm.lab.result import Panel, Rows, Series
from srtm.lab.results import RESULTS

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from srtm.lab.sweep import Kept


def test_the_page_has_every_result_and_loads_nothing(
    kept: Kept, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, claims = tmp_path / "lab.html", tmp_path / "claims.md"
    where = ["--out", str(kept.folder), "--page", str(page), "--claims", str(claims)]
    assert run(["lab", "report", *where, "--json"]) == 0
    assert all(f"| {name} |" in claims.read_text() for name in RESULTS)
    assert json.loads(capsys.readouterr().out) == {"page": str(page), "figures": [], "missing": []}
    text = page.read_text()
    for name, result in RESULTS.items():
        assert f'id="{name}"' in text
        assert escape(result.shows) in text
    claims_ = sum(len(result.claims) for result in RESULTS.values())
    assert text.count("<article ") == claims_
    assert text.count("<article ") - text.count('<div class="pictures"></div>') == claims_ - len(RESULTS["gc"].claims)
    used, drawn = (set(re.findall(pattern, text)) for pattern in (r'<use href="#([^"]+)"', r'<symbol id="([^"]+)"'))
    assert used == drawn
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)
    assert "prefers-color-scheme: dark" in text


def test_figures_are_the_same_bytes_each_time(found: dict[str, Rows], tmp_path: Path) -> None:
    some = {name: found[name] for name in ("fig6a", "fig6b", "table1")}
    first, again = (static.write_figures(tmp_path / name, some) for name in ("first", "again"))
    stems = ("fig6", "fig6-dark", "table1", "table1-dark")
    assert {path.name for path in first} == {f"{stem}.{kind}" for stem in stems for kind in ("svg", "png")}
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes()
        if one.suffix == ".svg":
            drawn = "".join(ElementTree.parse(one).getroot().itertext())
            assert ("brokers k" if "fig6" in one.name else "rounds of 60 s") in drawn


def test_every_panel_has_axes_units_and_points(found: dict[str, Rows]) -> None:
    for name, rows in ((name, rows) for name, rows in found.items() if rows):
        for panel in Drawn.of(name, rows).panels.values():
            assert panel.x
            assert panel.y
            assert all(len(series.x) == len(series.y) > 0 for series in panel.series)
            if "latency" in panel.y:
                assert panel.slo_ms == 1
            if name.startswith(("fig7", "fig8", "fig9", "fig10", "fig11")):
                assert all(series.labels for series in panel.series if "paper" not in series.name), "k beside points"


def test_a_series_is_mean_deviation_and_label() -> None:
    rows = Rows({"x": x, "y": x + step, "k": 2, "kind": "a"} for x in (1, 3) for step in (-1, 1))
    series = Series.of("a", rows.where(kind="a"), "x", "y", label="k")
    assert (series.x, series.y, series.labels) == ([1.0, 3.0], [1.0, 3.0], ["2", "2"])
    assert series.error == [2**0.5, 2**0.5]
    assert Series.of("a", Rows(rows[:1]), "x", "y").error == [0.0]


def test_the_papers_points_have_the_colour_of_ours() -> None:
    names = ("Conc", "Max-Min", "Conc, paper", "Max-Min, paper")
    found = colours(Panel("", "", "", [Series(name, [1], [1]) for name in names]))
    assert found[:2] == found[2:]
    assert found[0] != found[1]


def test_a_picture_has_every_point_and_the_slo() -> None:
    series = [
        Series("ours", [1, 2], [0.5, 3.0], error=[0.1, 0.2], labels=["1", "2"]),
        Series("ours, paper", [2], [4.0]),
    ]
    text = svg.drawn(Panel("a", "x < y", "ms", series, log_y=True, slo_ms=1.0))
    picture = ElementTree.fromstring(f"<svg>{text}</svg>")
    assert len(picture.findall("circle")) == 2
    assert len(picture.findall("path[@class='slo']")) == 1
    words = [element.text for element in picture.iter("text")]
    assert {"ours", "ours, paper", "SLO", "x < y", "ms", "1", "2"} <= set(words)


def test_a_picture_shows_numbers_that_do_not_differ() -> None:
    for log_y in (False, True):
        assert "nan" not in svg.drawn(Panel("", "", "", [Series("flat", [5, 6], [1.0, 1.0])], log_y=log_y))
        assert "nan" not in svg.drawn(Panel("", "", "", [Series("point", [5], [0.0])]))
