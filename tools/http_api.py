"""The controller's OpenAPI document → docs/http-api.md. `make docs` writes it; a test compares it with the code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from srtm.control import run
from srtm.control.api.reference import page
from srtm.control.controller import Controller
from srtm.control.discovery.registry import Registry
from srtm.control.options import ControllerOptions
from srtm.control.service import Service
from srtm.control.store import Store

PAGE = Path(__file__).parent.parent / "docs" / "http-api.md"


def document() -> dict[str, Any]:
    """The OpenAPI document of a controller."""
    return run.app(Service(Controller(ControllerOptions(), Store(), 1), Registry(1, 1))).openapi()


if __name__ == "__main__":
    PAGE.write_text(page(document()))
