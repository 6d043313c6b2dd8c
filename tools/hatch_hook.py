"""The build hook of hatchling: a wheel has the compiled modules if they can be compiled here, and is pure otherwise.

An editable installation is left to `make native`, because sources change. SRTM_INTERPRETED=1 builds a pure wheel.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # hatchling loads this file by its path

from tools import native  # noqa: E402


class CompiledWheel(BuildHookInterface):  # type: ignore[misc]
    """Adds compiled modules to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, unless the checkout has modules that were compiled from these sources for this Python."""
        if version == "editable" or os.environ.get("SRTM_INTERPRETED"):
            return
        folder = native.PACKAGE / "_native"
        if not native.fresh(folder):
            self._made = tempfile.TemporaryDirectory(prefix="srtm-wheel-")
            folder = Path(self._made.name) / "_native"
            try:
                native.compile_into(folder)
            except native.NotCompiled as problem:
                self.app.display_warning(f"the wheel has no compiled modules: {problem}")
                return
        build_data["pure_python"], build_data["infer_tag"] = False, True
        build_data["force_include"] |= {str(file): f"srtm/_native/{file.name}" for file in folder.iterdir()}
