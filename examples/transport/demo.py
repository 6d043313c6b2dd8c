"""`make demo`: a city whose sensors publish through SRTM, placed first by `lb` and then by `srtm`.

`play.py` runs the demo in a process of its own; this process supervises it. When the demo ends, by itself, by Ctrl-C or
by a kill, this process stops what is left, removes the files, and prints the outcome. If this process is killed,
`play.py` does the same.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import city
import leave

from srtm.control.local.cluster import die_with
from srtm.pipeline.runtime import archive

LEAST_S = 4.0
SECONDS = 20.0
_INTRODUCTION = """\
A city: {sensors} sensors publish to topic {traffic}. A Spark job counts vehicles and publishes to topic {signals},
which the traffic lights subscribe to. Topic {traffic} has one contract, a token bucket: {r} messages per second
and bursts of {b}. First, policy lb spreads the sensors, and with them the bucket, over all brokers. Then policy
srtm places the same sensors. After about 90 seconds, a table compares the two. Press Ctrl-C to stop.
"""


def main(seconds: float, figures: Path | None = None) -> None:
    """Supervise one demo."""
    began = time.monotonic()
    leave.adopt()
    told: list[int] = []
    players: list[subprocess.Popen[bytes]] = []

    def stop(number: int, _: object) -> None:
        told.append(number)
        for each in players:  # a second Ctrl-C kills
            each.send_signal(signal.SIGTERM if len(told) == 1 else signal.SIGKILL)

    for number in leave.STOPS:
        signal.signal(number, stop)
    folder = Path(tempfile.mkdtemp(prefix="srtm-demo-"))
    player = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("play.py")), str(folder), str(seconds)],
        env={**os.environ, "TMPDIR": str(folder), archive.SWITCH: os.environ.get(archive.SWITCH) or archive.EXISTING},
        start_new_session=True,  # this process passes Ctrl-C on
        preexec_fn=partial(die_with, os.getpid()),
    )
    players.append(player)
    names = {"sensors": len(city.sensors()), "traffic": city.TRAFFIC, "signals": city.SIGNALS}
    print(_INTRODUCTION.format(**names, **city.CONTRACT), flush=True)
    if told:
        player.terminate()
    code = player.wait()
    leave.end_children()
    why = leave.why(folder)
    if figures is not None and code == 0:
        runs = json.loads((folder / "figures").read_text())
        figures.write_text(json.dumps({"seconds": time.monotonic() - began, "runs": runs}))
    shutil.rmtree(folder, ignore_errors=True)
    if told:
        leave.last_line(f"stopped by {'Ctrl-C' if told[0] == signal.SIGINT else signal.Signals(told[0]).name}")
        signal.signal(told[0], signal.SIG_DFL)
        signal.raise_signal(told[0])  # so that make and the shell see the signal
    if code:
        leave.last_line(why or f"the main process {leave.ended(code)}")
        sys.exit(1)
    print("Done; nothing is left running.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A city on SRTM: watch the DRL penalty appear, then disappear.")
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help="time that the sensors report under each policy (default: %(default)g)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    if not options.seconds >= LEAST_S:
        parser.error(f"--seconds must be at least {LEAST_S:g}, not {options.seconds:g}")
    main(options.seconds, options.json)
