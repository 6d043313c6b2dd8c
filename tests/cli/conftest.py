"""The Spark of the pipeline's tests, for commands that are run in this process."""

from __future__ import annotations

from tests.pipeline.conftest import spark

__all__ = ["spark"]
