"""What tests of commands share."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest

from srtm.pipeline import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def warm(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands take the session that is there: one of their own costs ten seconds."""
    monkeypatch.setattr(session, "spark_session", lambda **_: nullcontext(spark))
