"""The folders' order (docs/architecture.md) is kept: a module imports only what stands above it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import srtm

PACKAGE = Path(srtm.__file__).parent
# From the top of the table in docs/architecture.md down; a name may import from itself and from any name before it.
LIBRARY = [
    "native",
    "errors",
    "units",
    "locks",
    "files",
    "options",
    "model",
    "protocol",
    "net",
    "workload",
    "program",
    "broker",
    "client",
    "sim",
    "pipeline",
    "control",
    "testing",
    "lab",
]
ORDER = [*LIBRARY, "web", "cli", "__init__", "__main__"]
ONLY_IN = {"pyspark": "pipeline"}
APART = {("client", "broker"), ("pipeline", "broker")}  # they meet on the wire, and share srtm.net
NOT_IN_MODEL = {
    "asyncio",
    "socket",
    "logging",
    "time",
    "datetime",
    "threading",
    "os",
    "random",
    "pyarrow",
    "uvloop",
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def layer_of(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(module: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: relative import; write the whole name"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def broken_rules(layer: str, imports: set[str]) -> list[str]:
    broken = []
    for name in imports:
        top, _, rest = name.partition(".")
        if top == "srtm" and (below := rest.partition(".")[0]) in ORDER and ORDER.index(below) > ORDER.index(layer):
            broken.append(f"{layer} imports {name}, which stands below it")
        if top == "srtm" and (layer, rest.partition(".")[0]) in APART:
            broken.append(f"{layer} imports {name}: what both need belongs into net")
        if top in ONLY_IN and layer != ONLY_IN[top]:
            broken.append(f"{layer} imports {top}, which only {ONLY_IN[top]} may")
        if layer in ("model", "protocol") and top in NOT_IN_MODEL:
            broken.append(f"{layer} imports {top}: it has no clock and no IO")
    return broken


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_upwards(module: Path) -> None:
    layer = layer_of(module)
    assert layer in ORDER, f"{layer} has no place in the order of layers"
    assert not broken_rules(layer, imports_of(module))


def test_the_rules_can_be_broken() -> None:
    assert broken_rules("model", {"srtm.workload.trace"})
    assert broken_rules("model", {"time"})
    assert broken_rules("protocol", {"asyncio"})
    assert broken_rules("sim", {"pyspark.sql"})
    assert broken_rules("client", {"srtm.broker.options"})
    assert broken_rules("pipeline", {"srtm.broker.disk.log.Log"})
    assert not broken_rules("sim", {"srtm.model.law", "numpy", "srtm.__version__"})


@pytest.mark.processes
@pytest.mark.parametrize(
    "module",
    ["srtm", "srtm.model.bucket", "srtm.model.scan", "srtm.sim", "srtm.protocol.server", "srtm.client", "srtm.cli.app"],
)
def test_imports_without_spark_and_uvloop(module: str) -> None:
    absent = "import sys; sys.modules['pyspark'] = sys.modules['uvloop'] = None"
    subprocess.run([sys.executable, "-c", f"{absent}; import {module}"], check=True)


@pytest.mark.processes
def test_the_broker_side_of_the_bucket_needs_no_compiler() -> None:
    code = "import sys, srtm.model.bucket; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def modules_of_srtm() -> dict[str, Path]:
    """Every module by its dotted name."""
    names = {".".join(("srtm", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in MODULES}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


def imported_modules() -> dict[str, set[str]]:
    """Every module, and the modules that it names in an import, those for typing included."""
    modules = modules_of_srtm()
    return {
        name: {each if each in modules else each.rpartition(".")[0] for each in imports_of(path)} & modules.keys()
        for name, path in modules.items()
    }


def cyclic(imports: dict[str, set[str]]) -> set[str]:
    """The modules that no order satisfies: what is left without those that import nothing, or are not imported."""
    left = {name: imported - {name} for name, imported in imports.items()}
    while True:
        needed = {each for imported in left.values() for each in imported}
        kept = {name: imported & left.keys() for name, imported in left.items() if imported and name in needed}
        if kept == left:
            return set(left)
        left = kept


def test_no_module_imports_itself_in_the_end() -> None:
    assert cyclic(imported_modules()) == set()
    assert cyclic({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": {"d"}, "f": set()}) == {"a", "b", "c"}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_fits_its_noun(module: Path) -> None:
    assert len(module.read_text().splitlines()) <= 400, "which second noun moved in?"


def attributes(kind: ast.ClassDef) -> set[str]:
    """What a class keeps: names that its methods assign to `self`."""
    return {
        node.attr
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def test_a_class_keeps_at_most_fifteen_things() -> None:
    sizes = {
        f"{name}.{kind.name}": len(attributes(kind))
        for name, path in modules_of_srtm().items()
        for kind in ast.walk(ast.parse(path.read_text()))
        if isinstance(kind, ast.ClassDef)
    }
    assert {name: size for name, size in sizes.items() if size > 15} == {}
    assert max(sizes.values()) > 10
