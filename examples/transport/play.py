"""The demo itself: `python play.py FOLDER SECONDS`; `demo.py` starts and supervises it.

It starts a cluster, the city's Spark job, sensors and lights. It places topic `traffic` with `lb` and then with `srtm`,
for so many seconds each, and lets Spark analyze the recorded runs. Sensors already report while Spark starts, so that
its job is warm when the first run begins. All files but the reports are in the folder.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import city
import httpx
import leave
import signals
import table
from fairness import Sample, Second, Stretch
from leave import Over
from starting import StartingSpark, keep_sparks_words

from srtm.control.local.cluster import die_with
from srtm.errors import SRTMError
from srtm.model.bucket import TokenBucket
from srtm.model.timeline import Timeline
from srtm.pipeline.report import findings, write_report
from srtm.pipeline.runtime import archive
from srtm.pipeline.runtime.failures import Place, explanation

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

HERE = Path(__file__).parent
BROKERS = 4
CLUSTER, SENSORS, LIGHTS = "the cluster (srtm up)", "the sensors' process", "the lights' process"
PROBE = "the probe's process"
SETTLE_S = 6.0  # before recording: sensors connect, and shares follow their traffic
LATE_S = 4.0  # after the end of a run, before a line explains the wait
WARM_UP_S = 15.0  # limit for the first batch of Spark's job
RESTARTS = 2  # of Spark's job; on a busy host its Python workers may miss Spark's limit of ten seconds
PATIENCE_S = 15.0  # for a controller or broker that restarts


class Play:
    """The processes of a demo, and what they report."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder = folder
        self._traces = folder / "traces"
        self._seconds = seconds
        self._began = time.monotonic()
        self._running: dict[str, tuple[subprocess.Popen[str], threading.Thread]] = {}
        self._spark: SparkSession | None = None
        self._query: StreamingQuery | None = None
        self._restarts = RESTARTS
        self._heard: list[tuple[float, float]] = []
        self._looked: dict[str, tuple[float, float]] = {}
        self._runs: list[table.Run] = []
        self._samples: list[Sample] = []
        self._host: list[Second] = []
        self._http = httpx.Client(timeout=30.0)
        self._ready = threading.Event()
        self._controller = ""

    def say(self, text: str) -> None:
        """Print a line of progress."""
        print(f"{time.monotonic() - self._began:5.1f} s  {text}", flush=True)

    def start_cluster(self) -> None:
        """Start `srtm up`, which takes a few seconds."""

        def hear(line: str) -> None:
            name, _, rest = line.partition(":")
            if name == "controller":
                self._controller = rest.split()[0]
            elif name == "page":
                self.say(f"live page: {rest.strip()}")
            elif line.startswith("ready"):
                self._ready.set()
            elif "ended" in line:  # a process that srtm up restarts
                self.say(line)

        self.say(f"starting a controller and {BROKERS} brokers on this machine")
        command = ["srtm", "up", "--brokers", str(BROKERS), "--free-ports", "--data-path", str(self._folder / "data")]
        self._spawn(CLUSTER, ["-m", *command, "--trace-folder", str(self._traces)], hear)

    def start_city(self) -> None:
        """Start sensors, lights and the probe as soon as the brokers are ready."""

        def hear(line: str) -> None:
            said = json.loads(line)
            if "first" in said:
                self.say(f"first message received: {json.dumps(said['first'])}")
            self._heard += said.get("heard", [])

        while not self._ready.wait(0.1):
            self.check()
        self._ask("PUT", f"/v1/topics/{city.SIGNALS}", {**city.SIGNALS_CONTRACT, "slo_ms": 1000.0, "fit": "none"})
        kept = f"topic={city.TRAFFIC}&durability=disk&retain_acknowledged=true"  # for Spark, which has no channel
        for broker in self._brokers():
            self._answer("POST", f"{broker['http']}/topic/create?{kept}").raise_for_status()
        self._place("lb")
        self._spawn(LIGHTS, [str(HERE / "lights.py"), self._controller], hear)
        self._spawn(PROBE, [str(HERE / "probe.py")], lambda line: self._host.append(Second(**json.loads(line))))
        self._start_sensors(3600)

    def warm_up(self, spark: SparkSession) -> None:
        """Start Spark's job, and wait until it has processed its first reports."""
        self.say("starting the Spark job; sensors already report, but nothing is measured yet")
        self._spark = spark
        self._start_job()
        until = time.monotonic() + WARM_UP_S
        while not self._counted() and time.monotonic() < until:
            self.wait(0.2)
        self._stop_sensors()
        self._ask("DELETE", f"/v1/topics/{city.TRAFFIC}")

    def _counted(self) -> bool:
        return self._query is not None and any(batch["numInputRows"] for batch in self._query.recentProgress)

    def _start_job(self) -> None:
        assert self._spark is not None
        self._query = signals.start(self._spark, self._controller, self._folder / "checkpoint")

    def _place(self, policy: str) -> None:
        wish = {**city.CONTRACT, "slo_ms": city.SLO_MS, "policy": policy, "durability": "disk"}
        self._ask("PUT", f"/v1/topics/{city.TRAFFIC}", {**wish, "publishers": city.sensors()})

    def _start_sensors(self, seconds: float) -> subprocess.Popen[str]:
        return self._spawn(SENSORS, [str(HERE / "sensors.py"), self._controller, str(seconds)])

    def _stop_sensors(self) -> None:
        process, _ = self._running.pop(SENSORS)
        process.terminate()
        process.wait()

    def run_policy(self, policy: str) -> None:
        """Place the sensors by this policy, and let them report for a while."""
        count, junctions = len(city.sensors()), city.JUNCTIONS
        self.say(f"policy {policy}: {count} sensors at {junctions} junctions report for {self._seconds:g} s")
        self._place(policy)
        sensors = self._start_sensors(self._seconds)
        settle_s = min(SETTLE_S, self._seconds / 3)
        began_s = time.time()
        self._watch(settle_s)
        settled_s = time.time()
        self._record("start", f"{policy}-")
        self.say(f"policy {policy}: recording")
        seen = self._watch(self._seconds - settle_s - 1)
        late = time.monotonic() + LATE_S
        while sensors.poll() is None:
            self.wait(0.1)
            if seen["access_ms"] is None:  # on a busy host, sensors start late, and the first second is over late
                seen = self._watch(0.5)
            if time.monotonic() > late:
                late = float("inf")
                waiting = self._ask("GET", f"/v1/topics/{city.TRAFFIC}")["waiting"]
                self.say(f"policy {policy}: {waiting} messages still wait for tokens; waiting until all have passed")
        self.check()
        self._running.pop(SENSORS)
        self._record("stop")
        ended_s = time.time()
        self._looked[policy] = settled_s, ended_s
        first, recorded = (
            Stretch.between(begin_s, end_s, self._samples, self._host)
            for begin_s, end_s in ((began_s, settled_s), (settled_s, ended_s))
        )
        run = table.Run(policy, seen, first, recorded)
        self._runs.append(run)
        self._ask("DELETE", f"/v1/topics/{city.TRAFFIC}")
        self.say(f"policy {policy}: done; {run.seen['k']} of {BROKERS} brokers used, p99 access {run.p99('access_ms')}")

    def _watch(self, seconds: float) -> dict[str, Any]:
        """Wait, and sample the topic each second; return the last sample."""
        until = time.monotonic() + seconds
        while True:
            self.wait(min(1.0, until - time.monotonic()))
            seen: dict[str, Any] = self._ask("GET", f"/v1/topics/{city.TRAFFIC}")
            self._samples.append(Sample.of(time.time(), seen))
            if time.monotonic() >= until:
                return seen

    def stop_city(self) -> None:
        """Let the Spark job and the lights finish."""
        assert self._query is not None
        self.say("waiting for the last signals")
        self._query.processAllAvailable()
        self.wait(0.5)
        self.stop_job()
        for name in (PROBE, LIGHTS):
            process, hearing = self._running.pop(name)
            process.terminate()
            hearing.join()
        for run in self._runs:
            begin_s, end_s = self._looked[run.policy]
            run.ages_s = [age_s for reported_s, age_s in self._heard if begin_s <= reported_s < end_s]

    def stop_job(self) -> None:
        """Stop the Spark job, if it runs; in another thread, because Ctrl-C may have cut this one off from Java."""
        query, self._query = self._query, None
        if query is not None:
            stopping = threading.Thread(target=_stop_quietly, args=[query], daemon=True)
            stopping.start()
            stopping.join(PATIENCE_S)

    def conclude(self, spark: SparkSession) -> None:
        """Analyze the recorded runs, and print the table."""
        named = {city.TRAFFIC: city.CONTRACT, city.SIGNALS: city.SIGNALS_CONTRACT}
        contracts = {topic: Timeline(TokenBucket.of(each["r"], each["b"])) for topic, each in named.items()}
        reports = []
        for run in self._runs:
            self.say(f"Spark is analyzing the run under {run.policy}")
            folder = self._folder / run.policy
            folder.mkdir()
            for file in self._traces.glob(f"{run.policy}-*.parquet"):
                file.rename(folder / file.name)
            if any(folder.iterdir()):
                run.found = findings(folder, spark, contracts=contracts)
                reports.append(Path(f"demo-report-{run.policy}.html").resolve())
                write_report(reports[-1], run.found)
            self.check()
        (self._folder / "figures").write_text(json.dumps([run.figures() for run in self._runs]))
        print(flush=True)
        table.show(self._runs)
        for report in reports:
            print(f"report: {report}")

    def check(self) -> None:
        """Raise if a process or the Spark job has ended."""
        for name, (process, _) in self._running.items():
            code = process.poll()
            if code or (code == 0 and name == CLUSTER):
                raise Over(f"{name} {leave.ended(code)}")
        if self._query is not None and not self._query.isActive:
            problem = self._query.exception()
            if problem is None or not self._restarts:
                raise problem or Over("the Spark job ended")
            self._restarts -= 1
            self.say(f"{explanation(str(problem), Place('this machine'))}; restarting its job from the checkpoint")
            self._start_job()

    def wait(self, seconds: float) -> None:
        """Sleep while everything runs."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(min(0.2, left))

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        answer = self._answer(method, self._controller + path, body)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def _answer(self, method: str, url: str, body: object = None) -> httpx.Response:
        """The answer of a controller or broker; waits for one that restarts."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                answer = self._http.request(method, url, json=body)
                if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() > until:
                    return answer
            except httpx.TransportError as error:
                if time.monotonic() > until:
                    raise Over(f"{url} does not answer ({error})") from None
            self.wait(0.5)

    def _brokers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("GET", "/v1/brokers")["brokers"]
        return found

    def _record(self, verb: str, prefix: str = "") -> None:
        for broker in self._brokers():
            query = f"?file={prefix}{broker['name']}.parquet" if prefix else ""
            answer = self._answer("POST", f"{broker['http']}/srtm/trace/{verb}{query}")
            if answer.status_code == httpx.codes.CONFLICT:
                self.say(f"{broker['name']} restarted; its recording is lost")
            else:
                answer.raise_for_status()

    def _spawn(
        self, name: str, arguments: list[str], hear: Callable[[str], None] | None = None
    ) -> subprocess.Popen[str]:
        with not_interrupted():
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=subprocess.PIPE,
                stderr=sys.stderr,
                text=True,
                start_new_session=True,
                preexec_fn=partial(die_with, os.getpid()),
            )
        assert process.stdout is not None
        lines = process.stdout

        def listen() -> None:
            for line in lines:
                if hear:
                    hear(line.strip())

        hearing = threading.Thread(target=listen, daemon=True)
        hearing.start()
        self._running[name] = process, hearing
        return process


def play(folder: Path, seconds: float) -> None:
    """Run the whole demo."""
    demo = Play(folder, seconds)
    if archive.being_made():
        demo.say("an earlier command is still building Spark's class archive, at low priority")
    demo.start_cluster()
    demo.say("starting Spark at the same time")
    with ExitStack() as stack:
        starting = StartingSpark(folder, stack)
        demo.start_city()
        spark = starting.wait(demo.wait)
        signal.signal(signal.SIGINT, _stop)  # replaces the handler of Spark
        stack.callback(demo.stop_job)
        demo.warm_up(spark)
        for policy in ("lb", "srtm"):
            demo.run_policy(policy)
        demo.stop_city()
        demo.conclude(spark)


def _stop_quietly(query: StreamingQuery) -> None:
    with suppress(Exception):  # Java may be gone
        query.stop()


_stopped, _starting = threading.Event(), threading.Event()


def _stop(*_: object) -> None:
    """Handle the first signal; ignore later ones, so that the cleanup is not interrupted."""
    _stopped.set()
    for number in leave.STOPS:
        signal.signal(number, signal.SIG_IGN)
    if not _starting.is_set():
        raise KeyboardInterrupt


@contextmanager
def not_interrupted() -> Iterator[None]:
    """Delay Ctrl-C while a process starts: Python drops exceptions raised in fork handlers."""
    _starting.set()
    try:
        yield
    finally:
        _starting.clear()
    if _stopped.is_set():
        raise KeyboardInterrupt


def main(folder: Path, seconds: float) -> int:
    """Run the demo, and clean up after it; if the supervisor is gone, remove the files and print the outcome."""
    watcher = os.getppid()
    leave.adopt()
    keep_sparks_words(folder / "spark.log")
    for number in leave.STOPS:
        signal.signal(number, _stop)
    failed = True
    try:
        play(folder, seconds)
        failed = False
    except KeyboardInterrupt:
        leave.note_why(folder, "stopped")
    except (Over, SRTMError) as error:
        what, _, remedy = str(error).partition(": ")
        leave.note_why(folder, what if "--spark-conf" in remedy else str(error))  # the demo has no such flag
    except Exception as error:
        if not _stopped.is_set():  # otherwise it is how Spark reports Ctrl-C
            traceback.print_exc()
            print(*(folder / "spark.log").read_text(errors="replace").splitlines()[-20:], sep="\n", file=sys.stderr)
        leave.note_why(folder, f"{type(error).__name__}, see above")
    leave.end_children()
    if os.getppid() != watcher:
        shutil.rmtree(folder, ignore_errors=True)
        leave.last_line("the supervising process was killed")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2])))
