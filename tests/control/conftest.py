"""Brokers for tests of the control plane."""

from __future__ import annotations

from tests.broker.conftest import start

__all__ = ["start"]
