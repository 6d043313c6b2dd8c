"""The rules of CONTRIBUTING.md that no linter checks and that are not about one module's behaviour."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tools import constraints

import srtm
from tests.conftest import ROOT

SOURCE = ROOT / "src" / "srtm"
TESTS = ROOT / "tests"
GENERATED = {"http-api.md", "changelog.md"}  # written from the code, and an include of CHANGELOG.md
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name not in GENERATED),
]
ABBREVIATIONS = re.compile(r"\b(?:[A-Z]|e\.g|i\.e|vs|etc|App|Eq|Fig|Figs|Prop|Sec)\.")
MARKER = re.compile(r"^ *(?:[-*]|\d+\.) +")
LABEL = re.compile(r"^\*{1,2}[^*]+[.?]\*{1,2} ")  # **Rejects.** …
SENTENCE_ENDS = re.compile(r"[.!?][)\"'*]*(?= +[\"'(*]*[A-Z`\[])")
WRITTEN = re.compile(r"^<!-- (\w+): written by .*?^<!-- end of \1 -->$", re.DOTALL | re.MULTILINE)  # from the code
LINE_ENDS = re.compile(r"[.!?:][)\"'*]*$")
# Phrases that are not English, with what to write instead (STYLE: active voice, a named subject, the usual term).
NOT_ENGLISH = {
    r"\bwhere there (?:is|are) none\b": "if there is no …",
    r"\bwhat is there\b": "name the thing",
    r"\bthere is no \S+: there (?:is|are)\b": "unknown …; known: …",
    r"(?:^|[.:;] )Who (?!\w+\?)\w+ (?:does|may|can|is|has|wants|needs)\b": "name the subject",
    r"\b(?:is|are) (?:believed|told) what\b": "trusts, gets",
    r"\btells the whole of\b": "has the details",
    r"\bfor want of\b": "without",
    r"\bwhoever (?:asks|looks|wants)\b": "name the subject",
}


def prose(text: str) -> Iterator[list[tuple[int, str]]]:
    """The paragraphs and list items of a page, as numbered lines: no code, tables, headings or HTML."""
    fenced, found = False, list[tuple[int, str]]()
    text = WRITTEN.sub(lambda part: "\n" * part[0].count("\n"), text)
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        ignored = fenced or not line.strip() or re.match(r"```|#|\||!\[|<|:::| {4}", line)
        if ignored or MARKER.match(line):
            if found:
                yield found
            found = []
        if not ignored:
            words = re.sub(r"`[^`]*`", "`x`", MARKER.sub("", line, count=1).strip())
            found.append((number, re.sub(r"\]\([^)]*\)", "]", words)))
    if found:
        yield found


def misplaced(text: str) -> list[str]:
    """Lines of a page that hold several sentences, or a part of one."""
    wrong = []
    for paragraph in prose(text):
        for number, line in paragraph:
            words = ABBREVIATIONS.sub("x", LABEL.sub("", line))
            if SENTENCE_ENDS.search(words):
                wrong.append(f"{number}: several sentences: {line}")
        wrong += [f"{number}: goes on below: {line}" for number, line in paragraph[:-1] if not LINE_ENDS.search(line)]
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_have_one_sentence_per_line(page: Path) -> None:
    assert misplaced(page.read_text()) == []


def test_a_line_with_two_sentences_or_half_a_one_is_found() -> None:
    assert misplaced("One sentence. And another.") == ["1: several sentences: One sentence. And another."]
    assert misplaced("A sentence that\ngoes on.") == ["1: goes on below: A sentence that"]
    fine = "# A. B\n\nBy C. Li, e.g. Fig. 3.\nIt says:\n\n- **A label.** It is `a. B`.\n- more\n\n```\nX. Y\n```\n"
    assert misplaced(fine) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_avoid_phrases_that_are_not_english(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", WRITTEN.sub("", page.read_text()), flags=re.DOTALL | re.MULTILINE)
    found = {phrase: remedy for phrase, remedy in NOT_ENGLISH.items() if re.search(phrase, text, re.MULTILINE)}
    assert found == {}


def test_the_version_is_stated_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/srtm/__init__.py"
    texts = [ROOT / "pyproject.toml", ROOT / "Makefile", ROOT / "mkdocs.yml"]
    for folder, kinds in {"src": "py", "deploy": "*", "tests": "py", "examples": "py"}.items():
        texts += [path for path in (ROOT / folder).rglob(f"*.{kinds}") if path.suffix not in (".pyc", ".png")]
    stated = [path.relative_to(ROOT) for path in texts if f'"{srtm.__version__}"' in path.read_text()]
    assert stated == [Path("src/srtm/__init__.py")]


def test_the_changelog_begins_with_what_is_unreleased_and_with_this_version() -> None:
    first, second, *_ = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(srtm.__version__)}\] - \d{{4}}-\d\d-\d\d", second)


def test_constraints_are_as_make_constraints_writes_them() -> None:
    text = constraints.CONSTRAINTS.read_text()
    versions = dict(line.split("==") for line in text.removeprefix(constraints.HEADER).splitlines())
    assert text == constraints.written(versions)
    pinned = {canonicalize_name(name): version for name, version in versions.items()}
    required = [Requirement(text) for text in constraints.requirements()]
    missing = [
        str(each) for each in required if not each.specifier.contains(pinned.get(canonicalize_name(each.name), "0"))
    ]
    assert missing == [], "run `make constraints`"


def test_every_verb_of_make_is_in_its_help() -> None:
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert set(re.findall(r'@echo "make ([\w-]+)', text)) == set(phony.split()) - {"help"}


def test_tests_mirror_the_packages() -> None:
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    assert {str(folder) for folder in folders if not (SOURCE / folder).is_dir()} <= {"examples"}


def imported(path: Path) -> set[str]:
    """The top-level names that a file imports, but for typing."""
    tree = ast.parse(path.read_text())
    typing = [each for each in ast.walk(tree) if isinstance(each, ast.If) and "TYPE_CHECKING" in ast.unparse(each.test)]
    skipped = {node for block in typing for node in ast.walk(block)}
    nodes = [node for node in ast.walk(tree) if node not in skipped]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("folder", ["model", "sim", "workload"])
def test_tests_of_the_theory_have_no_clock(folder: str) -> None:
    clocks = {"asyncio", "socket", "subprocess", "threading", "time"}
    assert {
        path.name: imported(path) & clocks for path in (TESTS / folder).glob("*.py") if imported(path) & clocks
    } == {}


def test_the_naive_twin_shares_nothing_with_the_product() -> None:
    assert "srtm" not in imported(TESTS / "naive.py")
    assert "srtm" in imported(TESTS / "test_units.py")


def test_what_is_reproducible_has_a_seed() -> None:
    unseeded = re.compile(r"\b(?:default_rng|Random)\(\)")
    folders = [*(SOURCE / name for name in ("model", "sim", "workload", "lab", "pipeline")), TESTS, ROOT / "bench"]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(files) > 200
    assert [path.name for path in files if unseeded.search(path.read_text())] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "adr").glob("0*.md")), ids=lambda page: page.stem)
def test_decisions_say_context_choice_and_cost(page: Path) -> None:
    headings = re.findall(r"^(?:## |\*\*)(Context|Choice|Cost)\b", page.read_text(), re.MULTILINE)
    assert headings == ["Context", "Choice", "Cost"]
