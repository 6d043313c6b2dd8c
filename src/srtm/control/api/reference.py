"""The API reference in Markdown, from the OpenAPI document: served at /docs, and written to docs/http-api.md."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from starlette.responses import PlainTextResponse
from starlette.routing import Route

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request

_INTRODUCTION = """\
# HTTP API

`make docs` writes this page from the OpenAPI document that a controller serves at `/openapi.json`; `/docs` serves it.
The API listens on port 4161, and on the page's port.
If the controller has tokens, requests must send one: `Authorization: Bearer …`.
[access.md](access.md#every-port-and-path) says which role each request takes.
[control.md](control.md#api) has examples, [discovery.md](discovery.md) describes the endpoints of nsqlookupd, and
[broker.md](broker.md) those of brokers.
"""
_LIMITS = {
    "minLength": "length ≥ {:,}",
    "maxLength": "length ≤ {:,}",
    "maxItems": "at most {:,}",
    "minimum": "≥ {:,g}",
    "exclusiveMinimum": "> {:,g}",
    "maximum": "≤ {:,g}",
    "pattern": "`{}`",
}


def page(api: dict[str, Any]) -> str:
    """The reference: endpoints in the order of the code, then the JSON shapes that they take and return."""
    parts = [_INTRODUCTION]
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
    table = "\n| parameter | in | type | |\n|---|---|---|---|\n" + "\n".join(map(_row, rows)) + "\n" if rows else ""
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
    return f"### {name}\n\n{said}| field | type | | |\n|---|---|---|---|\n" + "\n".join(map(_row, rows)) + "\n"


def _kind(schema: dict[str, Any]) -> str:
    """A value's type in a word or two."""
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
    limits = [text.format(each[key]) for each in parts for key, text in _LIMITS.items() if key in each]
    return "; ".join([*([schema["description"]] if "description" in schema else []), *limits])


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def route(app: FastAPI) -> Route:
    """GET /docs. FastAPI's own page would load scripts from another site."""

    async def docs(_: Request) -> PlainTextResponse:
        return PlainTextResponse(page(app.openapi()))

    return Route("/docs", docs)
