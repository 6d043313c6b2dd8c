"""The tiny form of everything, run once for all tests of the lab, on the Spark of the pipeline's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from srtm.lab.results import RESULTS
from srtm.lab.sweep import Kept, Settings, sweep, unfinished

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from srtm.lab.result import Rows

TINY = Settings(seed=1, repetitions=2, tiny=True)


@pytest.fixture(scope="session")
def kept(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    folder = Kept(tmp_path_factory.mktemp("lab"))
    folder.begin(TINY)
    sweep(unfinished(list(RESULTS.values()), TINY, folder), folder, spark, lambda _: None)
    return folder


@pytest.fixture(scope="session")
def found(kept: Kept) -> dict[str, Rows]:
    rows = {name: kept.rows(result, TINY) for name, result in RESULTS.items()}
    return {name: kept_rows for name, kept_rows in rows.items() if kept_rows is not None}
