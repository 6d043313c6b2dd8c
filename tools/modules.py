"""The first line of every module → the tables of docs/architecture.md. `make docs` writes them; a test compares."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import srtm

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
PACKAGE = Path(srtm.__file__).parent
BEGIN, END = "<!-- modules: written by tools/modules.py -->\n", "<!-- end of modules -->\n"


def summary(module: Path) -> str:
    """The first paragraph of a module's docstring, in one line."""
    about = ast.get_docstring(ast.parse(module.read_text()))
    assert about, f"{module} has no docstring"
    return re.sub(r"\s+", " ", about.split("\n\n")[0]).replace("|", "\\|")


def tables() -> str:
    """A table for each package and room: its modules, and what each is for."""
    folders = sorted({module.parent for module in PACKAGE.rglob("*.py")} - {PACKAGE})
    sections = []
    for folder in folders:
        modules = sorted(module for module in folder.glob("*.py") if module.stem != "__init__")
        name = folder.relative_to(PACKAGE)
        section = f"{'#' * (2 + len(name.parts))} {name}/\n\n{summary(folder / '__init__.py')}\n"
        if modules:
            rows = "".join(f"| `{module.name}` | {summary(module)} |\n" for module in modules)
            section += f"\n| module | what it does |\n|---|---|\n{rows}"
        sections.append(section)
    return "\n".join(sections)


def page(text: str) -> str:
    """The page with its tables as the code is now."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
