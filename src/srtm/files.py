"""Files and folders that a program checks before it starts, and secrets that it reads from files."""

from __future__ import annotations

import tempfile
from pathlib import Path

from srtm.errors import InputError


def not_readable(path: str) -> str | None:
    """Say why a file cannot be read; None if it can."""
    try:
        with Path(path).open("rb"):
            return None
    except OSError as error:
        return error.strerror or str(error)


def not_writable(folder: str) -> str | None:
    """Say why no file can be created in a folder; None if one can."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def read_secret(path: str) -> str:
    """Return the secret that a file holds, without white space around it; InputError if there is none."""
    try:
        found = Path(path).read_text().strip()
    except OSError as error:
        raise InputError(f"cannot read a secret from {path}: {error.strerror}", path=path) from None
    except UnicodeDecodeError:
        raise InputError(f"cannot read a secret from {path}: not text", path=path) from None
    if not found or not found.isprintable() or len(found.split()) != 1:
        raise InputError(f"{path} must hold one secret on one line, without spaces", path=path)
    return found
