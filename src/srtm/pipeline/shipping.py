"""Shipping: a zip of this package's source, sent to Spark's workers through a session."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import srtm

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def ship(spark: SparkSession) -> None:
    """Send this package to the session's workers, for clusters that do not have SRTM installed.

    Jobs that start later find it, on executors that join later, too. The workers' Python still needs the libraries that
    SRTM imports: numpy, numba and pyarrow, and httpx and msgspec for streams. A version of SRTM that is installed there
    is not used. Shipping twice sends nothing again.
    """
    spark.addArtifacts(str(_package()), pyfile=True)


@cache
def _package() -> Path:
    """A zip of this package; it stays until this process ends, because a driver serves it to executors that come late.

    Workers of a shared server keep files by name, so the name identifies the content: the same source always gives the
    same bytes, and another source gives another name.
    """
    source = Path(srtm.__file__).parent
    packed = BytesIO()
    with ZipFile(packed, "w", ZIP_DEFLATED) as package:
        for file in sorted(source.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                package.writestr(ZipInfo(str(file.relative_to(source.parent))), file.read_bytes(), ZIP_DEFLATED)
    content = packed.getvalue()
    folder = tempfile.mkdtemp(prefix="srtm-package-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder, f"srtm-{sha256(content).hexdigest()[:16]}.zip")
    path.write_bytes(content)
    return path
