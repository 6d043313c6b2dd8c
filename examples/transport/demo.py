"""`make demo`: a city whose sensors publish through SRTM, placed without care at first, and then with it.

It starts a cluster, the city's Spark job, sensors and lights; places topic `traffic` with `lb`, then with `srtm`; and
asks Spark what the recorded runs say. Ctrl-C ends it at any time, and leaves nothing running.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import city
import httpx
import signals

from srtm.cli.common import new_table, print_table
from srtm.cli.latency import jitter
from srtm.units import format_ns

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = Path(__file__).parent
BROKERS = 4
PHASE_S = 28  # of each policy
SETTLED_S = 8  # of it that are not looked at
SLO_MS = 50.0  # fsync before every OK takes its time on any disk


class Demo:
    """The demo's processes, and what they said."""

    def __init__(self, ends: ExitStack, folder: Path) -> None:
        self._ends = ends
        self._folder = folder
        self._traces = folder / "traces"
        self._began = time.monotonic()
        self.controller = ""
        self.rows: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"{time.monotonic() - self._began:5.1f} s  {text}", flush=True)

    def start_cluster(self) -> None:
        """`srtm up`, and where it is."""
        self.say(f"starting a controller and {BROKERS} brokers")
        command = ["srtm", "up", "--brokers", str(BROKERS), "--free-ports", "--data-path", str(self._folder / "data")]
        up = self._spawn(["-m", *command, "--trace-folder", str(self._traces)])
        assert up.stdout is not None
        for line in up.stdout:
            if line.startswith("controller"):
                self.controller = line.split()[1]
            if line.startswith(("page", "ready")):
                self.say(line.strip())
            if line.startswith("ready"):
                return
        raise SystemExit("the cluster did not start")

    def run_policy(self, policy: str) -> None:
        """The sensors report for a while, placed by this policy; what they saw becomes a row of the table."""
        self.say(f"policy {policy}: {len(city.sensors())} sensors at {city.JUNCTIONS} junctions report for {PHASE_S} s")
        wish = {**city.CONTRACT, "slo_ms": SLO_MS, "policy": policy, "durability": "disk", "publishers": city.sensors()}
        self._ask("PUT", f"/v1/topics/{city.TRAFFIC}", wish)
        sensors = self._spawn([str(HERE / "sensors.py"), self.controller, str(PHASE_S)])
        time.sleep(SETTLED_S)
        self._record("start", f"{policy}-")
        time.sleep(PHASE_S - SETTLED_S - 1)
        seen = self._ask("GET", f"/v1/topics/{city.TRAFFIC}")
        sensors.wait()
        self._record("stop")
        self.rows.append({**seen, "policy": policy})
        self._ask("DELETE", f"/v1/topics/{city.TRAFFIC}")

    def start_lights(self, seconds: float) -> subprocess.Popen[str]:
        """The lights, who follow the signals."""
        return self._spawn([str(HERE / "lights.py"), self.controller, str(seconds)])

    def table(self) -> None:
        """Both policies side by side."""
        title = f"topic {city.TRAFFIC}: the same sensors, the same contract"
        table = new_table("policy", "brokers", "p99 access", "p99 total", f"p99 ≤ {SLO_MS:g} ms", title=title)
        for row in self.rows:
            parts = [f"{row[name]['p99']:.3g} ms" if row[name] else "—" for name in ("access_ms", "total_ms")]
            table.add_row(row["policy"], str(row["k"]), *parts, "met" if row["slo_met"] else "not met")
        print_table(table)

    def analyse(self, spark: SparkSession) -> None:
        """What the pipeline says of the recorded runs."""
        from srtm.model.bucket import TokenBucket
        from srtm.model.timeline import Timeline
        from srtm.pipeline.conformance import conformance
        from srtm.pipeline.groups import groups
        from srtm.pipeline.penalty import penalty
        from srtm.pipeline.profile import profile
        from srtm.pipeline.report import findings, write_report

        contract = Timeline(TokenBucket.of(self.rows[0]["r"], self.rows[0]["b"]))
        table = new_table("recorded run", "messages", "rate", "found groups", "penalty a message", "kept its contract")
        for row in self.rows:
            folder = self._folder / row["policy"]
            folder.mkdir()
            for file in self._traces.glob(f"{row['policy']}-*.parquet"):
                file.rename(folder / file.name)
            self.say(f"Spark looks at the trace of {row['policy']}")
            profiled = _of_traffic(profile(folder, spark))
            grouped = _of_traffic(groups(folder, spark))
            cost = _of_traffic(penalty(folder, contract, spark))
            judged = _of_traffic(conformance(folder, contract, spark))
            waited = format_ns(cost.whole.penalty_ns / cost.messages) if cost.whole else "—"
            table.add_row(
                row["policy"],
                f"{profiled.messages:,}",
                f"{float(profiled.rate_mps):,.0f}/s",
                str(len(grouped.groups)),
                waited,
                "yes" if judged.conforms else "NO",
            )
        print_table(table)
        report = Path("demo-report.html").resolve()
        write_report(report, findings(self._folder / self.rows[-1]["policy"], spark, contracts=contract))
        print(f"report: {report}")

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        answer = httpx.request(method, self.controller + path, json=body, timeout=30.0)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def _record(self, verb: str, prefix: str = "") -> None:
        for broker in self._ask("GET", "/v1/brokers")["brokers"]:
            query = f"?file={prefix}{broker['name']}.parquet" if prefix else ""
            httpx.post(f"{broker['http']}/srtm/trace/{verb}{query}", timeout=30.0).raise_for_status()

    def _spawn(self, arguments: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
        self._ends.callback(_end, process)
        return process


def _of_traffic(lines: list[Any]) -> Any:
    return next(line for line in lines if line.topic == city.TRAFFIC)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
    process.wait()


def main() -> None:
    """The whole of it."""
    from srtm.pipeline.session import spark_session

    folder = Path(tempfile.mkdtemp(prefix="srtm-demo-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as ends:
        ends.callback(shutil.rmtree, folder, ignore_errors=True)
        demo = Demo(ends, folder)
        demo.start_cluster()
        wish = {"r": 1000, "b": 1000, "slo_ms": 1000.0, "fit": "none"}
        demo._ask("PUT", f"/v1/topics/{city.SIGNALS}", wish)
        demo._ask("PUT", f"/v1/topics/{city.TRAFFIC}", {"r": 1000, "b": 1000, "durability": "disk", "fit": "none"})
        demo._ask("DELETE", f"/v1/topics/{city.TRAFFIC}")
        demo.say("starting Spark")
        spark = ends.enter_context(spark_session(options={"spark.sql.shuffle.partitions": "2"}))
        query = signals.start(spark, demo.controller, folder / "checkpoint")
        ends.callback(query.stop)
        lights = demo.start_lights(2 * PHASE_S + 12)
        for policy in ("lb", "srtm"):
            demo.run_policy(policy)
        demo.table()
        heard = json.loads(lights.communicate()[0])
        age = f"{heard['p50_s']:.1f} s (median) after the sensors" if heard["signals"] else "never"
        print(f"lights: {heard['signals']} signals for {heard['junctions']} junctions, {age}")
        query.processAllAvailable()
        query.stop()
        demo.analyse(spark)
        longest_ns, lost = jitter()
        print(f"this host alone: longest gap {format_ns(longest_ns)}, {lost:.1%} of the time lost")
        demo.say("done; stopping everything")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped; nothing is left running") from None
