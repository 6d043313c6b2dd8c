"""The rules of the controller's paths → the table in docs/access.md. `make docs` writes it; a test compares it."""

from __future__ import annotations

from pathlib import Path

from srtm.control.access.rules import RULES, Who

PAGE = Path(__file__).parent.parent / "docs" / "access.md"
BEGIN, END = "<!-- access: written by tools/access.py -->\n", "<!-- end of access -->\n"
_ROLES = ("viewer", "operator", "admin", "broker")


def table() -> str:
    """A row for each path and method: which roles may use it."""
    rows = [
        f"| {method} | `{path.replace(':path}', '}')}` | {'yes' if who is None else ''} | {_marks(who)} |\n"
        for path, methods in RULES.items()
        for method, who in methods.items()
    ]
    heads = " | ".join(("method", "path", "without a credential", *_ROLES))
    return f"| {heads} |\n|{'---|' * (3 + len(_ROLES))}\n{''.join(rows)}"


def _marks(who: Who) -> str:
    return " | ".join("yes" if who is None or role in {each.value for each in who} else "" for role in _ROLES)


def page(text: str) -> str:
    """The page with its table as the code is now."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
