"""The examples run, and say what the README says that they say."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise

import pytest

from tests.broker.running import running
from tests.conftest import ROOT


def run(example: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / example), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_drl_penalty_grows_with_every_broker_and_srtm_avoids_it() -> None:
    shown = run("drl_penalty.py")
    access = [float(number) for number in re.findall(r"^ +\d +([0-9.]+) ms", shown, re.MULTILINE)]
    assert len(access) == 6
    assert access[0] == 0
    assert all(before < after for before, after in pairwise(access))
    assert "SRTM chooses 1 of 6" in shown


def test_the_concepts_show_what_the_example_prints() -> None:
    page = (ROOT / "docs/concepts.md").read_text()
    for line in run("drl_penalty.py").splitlines():
        assert line in page, f"docs/concepts.md does not show: {line}"


def test_a_publisher_and_a_subscriber() -> None:
    with running() as broker:
        address = f"127.0.0.1:{broker.broker.tcp_port}"
        assert run("publisher.py", address) == "3 messages acknowledged\n"
        assert run("subscriber.py", address) == "green\nyellow\nred\n"


@pytest.mark.skipif(find_spec("nsq") is None, reason="needs pynsq: pip install pynsq")
def test_a_stock_client() -> None:
    with running() as broker:
        assert run("stock_client.py", f"127.0.0.1:{broker.broker.tcp_port}") == "hello from pynsq\n"
