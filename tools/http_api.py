"""The controller's OpenAPI document → docs/http-api.md. `make docs` writes it; a test holds it against the code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from srtm.control import run
from srtm.control.controller import Controller
from srtm.control.options import ControllerOptions
from srtm.control.registry import Registry
from srtm.control.service import Service
from srtm.control.store import Store

PAGE = Path(__file__).parent.parent / "docs" / "http-api.md"
INTRODUCTION = """\
# HTTP API

Written by `make docs` from the OpenAPI document that a controller serves at `/openapi.json` (readable at `/docs`).
It is at port 4161, and at the page's. Who changes something shows the token, if any: `Authorization: Bearer …`.
[control.md](control.md#api) has examples, [discovery.md](discovery.md) what is nsqlookupd's, [broker.md](broker.md)
what brokers answer.
"""
LIMITS = {
    "minLength": "length ≥ {:,}",
    "maxLength": "length ≤ {:,}",
    "maxItems": "at most {:,}",
    "minimum": "≥ {:,g}",
    "exclusiveMinimum": "> {:,g}",
    "maximum": "≤ {:,g}",
    "pattern": "`{}`",
}


def document() -> dict[str, Any]:
    """The OpenAPI document of a controller."""
    return run.app(Service(Controller(ControllerOptions(), Store(), 1), Registry(1, 1))).openapi()


def page(api: dict[str, Any]) -> str:
    """The same as Markdown: endpoints in the order of the code, then the shapes that they take and give."""
    parts = [INTRODUCTION]
    for path, methods in api["paths"].items():
        parts += [_endpoint(path, method.upper(), operation) for method, operation in methods.items()]
    parts.append("## Shapes\n")
    parts += [_shape(name, schema) for name, schema in sorted(api["components"]["schemas"].items())]
    return "\n".join(parts)


def _endpoint(path: str, method: str, operation: dict[str, Any]) -> str:
    rows = [
        (f"`{each['name']}`", each["in"], _kind(each["schema"]), _notes(each["schema"]))
        for each in operation.get("parameters", [])
    ]
    if body := operation.get("requestBody"):
        (content,) = body["content"].values()
        rows.append(("body", "JSON", _kind(content["schema"]), ""))
    table = "\n| | in | is | |\n|---|---|---|---|\n" + "\n".join(map(_row, rows)) + "\n" if rows else ""
    answers = "; ".join(f"{status} {_answer(answer)}" for status, answer in sorted(operation["responses"].items()))
    return f"## {method} {path}\n\n{operation['description']}\n{table}\nAnswers: {answers}.\n"


def _answer(answer: dict[str, Any]) -> str:
    schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
    said = {"Successful Response": "done"}.get(answer["description"], answer["description"])
    return f"{said} ({_kind(schema)})" if "$ref" in schema else said


def _shape(name: str, schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    rows = [
        (
            f"`{field}`",
            _kind(each),
            "required" if field in required else f"default `{json.dumps(each.get('default'))}`",
            _notes(each),
        )
        for field, each in schema["properties"].items()
    ]
    said = f"{schema['description']}\n\n" if "description" in schema else ""
    return f"### {name}\n\n{said}| | is | | |\n|---|---|---|---|\n" + "\n".join(map(_row, rows)) + "\n"


def _kind(schema: dict[str, Any]) -> str:
    """What a value is, in a word or two."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'])}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_kind(schema['additionalProperties'])}"
    return str(schema.get("type", schema.get("const", "anything")))


def _notes(schema: dict[str, Any]) -> str:
    parts = [schema, *schema.get("anyOf", [])]
    limits = [text.format(each[key]) for each in parts for key, text in LIMITS.items() if key in each]
    return "; ".join([*([schema["description"]] if "description" in schema else []), *limits])


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(document()))
