"""Checks of files and folders that a program makes before it starts."""

from __future__ import annotations

import tempfile
from pathlib import Path


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
