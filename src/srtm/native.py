"""Compiled modules: which of the broker's modules run as machine code, and why not, if they do not.

`python -m tools.native` compiles the modules on a message's way with mypyc, from the very sources that the interpreter
runs otherwise, into `_native/`. Its manifest has a hash of every source that the compiler read.

Always holds:
- compiled modules are imported all or none, and only while every one of these sources is as it was compiled: code that
  was edited since then runs interpreted;
- with SRTM_INTERPRETED set, nothing compiled is imported.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from importlib.util import source_hash, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(**_how):
        """Tell mypyc how to compile a class; interpreted, it changes nothing."""
        return lambda kind: kind


PACKAGE = Path(__file__).parent
FOLDER = PACKAGE / "_native"
MANIFEST = "manifest"
SUFFIX = EXTENSION_SUFFIXES[0]


def hash_of(source: Path) -> str:
    """The hash of a source file, as manifests have it."""
    return source_hash(source.read_bytes()).hex()


def manifest(folder: Path = FOLDER) -> dict[str, str]:
    """The hashes of the sources that the modules in a folder were compiled from, by their paths in the package."""
    lines = (folder / MANIFEST).read_text().splitlines()
    return {path: known for known, path in (line.split() for line in lines)}


def stale(folder: Path = FOLDER, package: Path = PACKAGE) -> list[str]:
    """The sources that changed after they were compiled, or are gone."""
    return [
        path
        for path, known in manifest(folder).items()
        if not (package / path).is_file() or hash_of(package / path) != known
    ]


def compiled_modules(folder: Path = FOLDER) -> dict[str, str]:
    """The files of the modules that are compiled for this Python, by their names."""
    files = folder.glob(f"*{SUFFIX}")
    return {file.name.removesuffix(SUFFIX): str(file) for file in files}


@cache
def _chosen() -> tuple[dict[str, str], str]:
    """The compiled modules to import, and why there are none."""
    if os.environ.get("SRTM_INTERPRETED"):
        return {}, "SRTM_INTERPRETED is set"
    modules = compiled_modules()
    if not modules:
        return {}, ""
    try:
        changed = stale()
    except (OSError, ValueError):
        return {}, "the compiled modules have no manifest; run make native"
    if changed:
        return {}, f"{changed[0]} changed since it was compiled; run make native"
    return modules, ""


def is_compiled() -> bool:
    """Whether the modules on a message's way run compiled."""
    return bool(_chosen()[0])


def build() -> str:
    """How this SRTM runs: `compiled`, or `interpreted` and why, if a compiled build is at hand."""
    modules, why = _chosen()
    return "compiled" if modules else f"interpreted: {why}" if why else "interpreted"


class _Finder:
    """Finds compiled modules before Python finds their sources."""

    @staticmethod
    def find_spec(
        name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a compiled module is; None leaves the search to Python."""
        if not name.startswith("srtm"):
            return None
        file = _chosen()[0].get(name)
        return spec_from_file_location(name, file, loader=ExtensionFileLoader(name, file)) if file else None


def install() -> None:
    """Import compiled modules from now on, as far as they may be."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
