from __future__ import annotations

import json
from typing import TYPE_CHECKING

from srtm.cli.app import run

if TYPE_CHECKING:
    import pytest


def test_the_host_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["latency", "--intrinsic", "--duration", "50ms", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["longest_ns"] > 0
    assert 0 <= found["lost"] < 1
    assert run(["latency", "--intrinsic", "--duration", "20ms"]) == 0
    assert capsys.readouterr().out.startswith("longest gap ")
    assert run(["latency"]) == 2
