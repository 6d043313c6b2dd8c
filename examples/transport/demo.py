"""`make demo`: a city whose sensors publish through SRTM, placed without care at first, and then with it.

`play.py` plays it, in a process of its own. This one watches over it: when the play is over, stopped with Ctrl-C or
killed, it ends what is left of it, removes its files, and says how it went. The play does the same if this is killed.
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
A city: {sensors} sensors publish to topic {traffic}; a Spark job counts vehicles and publishes to topic {signals};
traffic lights subscribe to it. Topic {traffic} has one contract, a token bucket: {r} messages a second and
bursts of {b}. Policy lb spreads the sensors, and with them the bucket, over all brokers; then policy srtm
places the same sensors. After about 90 seconds a table compares the two. Ctrl-C stops the demo.
"""


def main(seconds: float, figures: Path | None = None) -> None:
    """Watch over a play."""
    began = time.monotonic()
    leave.adopt()
    told: list[int] = []
    players: list[subprocess.Popen[bytes]] = []

    def stop(number: int, _: object) -> None:
        told.append(number)
        for each in players:  # who cannot wait says it twice
            each.send_signal(signal.SIGTERM if len(told) == 1 else signal.SIGKILL)

    for number in leave.STOPS:
        signal.signal(number, stop)
    folder = Path(tempfile.mkdtemp(prefix="srtm-demo-"))
    player = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("play.py")), str(folder), str(seconds)],
        env={**os.environ, "TMPDIR": str(folder), archive.SWITCH: os.environ.get(archive.SWITCH) or archive.EXISTING},
        start_new_session=True,  # Ctrl-C at a terminal is ours to pass on
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
        signal.raise_signal(told[0])  # so that make and shells see what it was
    if code:
        leave.last_line(why or f"its main process {leave.ended(code)}")
        sys.exit(1)
    print("Done; nothing is left running.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A city on SRTM: see the penalty happen, and disappear.")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="how long the sensors report under each policy (%(default)g)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file, too")
    options = parser.parse_args()
    if not options.seconds >= LEAST_S:
        parser.error(f"--seconds {options.seconds:g}: sensors need at least {LEAST_S:g} s")
    main(options.seconds, options.json)
