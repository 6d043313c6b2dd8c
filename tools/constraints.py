"""pyproject.toml → constraints.txt: one version of every package that SRTM and its extras need, by `make constraints`.

The present constraints stay in force, so only what changed in pyproject.toml changes; `--upgrade` takes the newest
versions instead. pip resolves and reports; it installs nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
HEADER = (
    "# Written by `make constraints` from pyproject.toml; `make constraints UPGRADE=1` takes the newest versions.\n"
)


def requirements() -> list[str]:
    """Everything that SRTM and all its extras require directly, as pyproject.toml states it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    return sorted({*project["dependencies"], *(requirement for extra in extras for requirement in extra)})


def resolved(*, upgrade: bool) -> dict[str, str]:
    """The version that pip chooses for each package, dependencies of dependencies included."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    present = [] if upgrade or not CONSTRAINTS.exists() else ["--constraint", str(CONSTRAINTS)]
    done = subprocess.run([*pip, *present, *requirements()], check=True, stdout=subprocess.PIPE, text=True)
    packages = [package["metadata"] for package in json.loads(done.stdout)["install"]]
    return {package["name"]: package["version"] for package in packages}


def written(versions: dict[str, str]) -> str:
    """The file's text: a line for each package, by name."""
    return HEADER + "".join(f"{name}=={versions[name]}\n" for name in sorted(versions, key=str.casefold))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that pyproject.toml allows")
    CONSTRAINTS.write_text(written(resolved(upgrade=parser.parse_args().upgrade)))
