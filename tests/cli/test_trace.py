from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import srtm
from srtm import native
from srtm.cli.app import run
from srtm.workload.publishers import Population, Workload
from srtm.workload.trace import load


def test_synth_writes_the_workload_that_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.parquet"
    options = "--topic sensors --publishers 50 --rate 20 --batch 5 --process periodic --group-size 10 --jitter 4ms"
    assert (
        run(["trace", "synth", *options.split(), "--duration", "3s", "--seed", "9", "--json", "--out", str(out)]) == 0
    )
    facts = json.loads(capsys.readouterr().out)
    (topic,) = load(out)
    expected = Workload((Population(50, 20.0, 5, "periodic", 10, 4_000_000),), 3 * 10**9, 9).arrivals()
    assert (topic.arrivals.times_ns == expected.times_ns).all()
    assert topic.topic == facts["topic"] == "sensors"
    assert facts["messages"] == len(topic.arrivals.times_ns) == 3_000
    assert facts["rate"] == 1_000
    assert facts["bytes"] == out.stat().st_size


def test_messages_instead_of_a_duration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "synth", "--process", "periodic", "--messages", "2e4", "--out", str(tmp_path / "t")]) == 0
    assert "20,000 messages from 1,000 publishers over 2 s" in capsys.readouterr().out


def test_an_existing_file_is_not_overwritten_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.parquet"
    out.write_text("mine")
    assert run(["trace", "synth", "--duration", "1s", "--out", str(out)]) == 2
    assert "exists; choose another name" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert run(["trace", "synth", "--duration", "1s", "--force", "--out", str(out)]) == 0
    assert len(load(out)) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--publishers 0", "publishers = 0"),
        ("--process often", "it must be poisson or periodic"),
        ("--duration soon", "'soon' is not a duration"),
        ("--duration 1s --messages 5", "exclude each other"),
        ("--messages 0", "between 1 and 1e15"),
        ("--jitter 1h", "must not exceed"),
        ("--rate many", "--rate"),
        ("--colour red", "No such option"),
    ],
)
def test_bad_usage_is_exit_code_2_and_one_clear_line(
    options: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["trace", "synth", *options.split(), "--out", str(tmp_path / "t.parquet")]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "synth", "--out", str(tmp_path / "no" / "t.parquet")]) == 2
    assert "existing folder" in capsys.readouterr().err


@pytest.mark.processes
def test_interrupted_it_leaves_no_file(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "srtm",
        "trace",
        "synth",
        "--messages",
        "1e12",
        "--out",
        str(tmp_path / "t.parquet"),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 30
        while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 1
    assert list(tmp_path.iterdir()) == []


def test_devices_are_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "synth", "--duration", "1s", "--force", "--out", "/dev/null"]) == 2
    assert "give a file in an existing folder" in capsys.readouterr().err
    assert Path("/dev/null").is_char_device()


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"srtm {srtm.__version__} ({native.build()})"
    assert run(["trace", "synth", "--help"]) == 0
    assert "srtm trace synth --publishers 1000" in capsys.readouterr().out
