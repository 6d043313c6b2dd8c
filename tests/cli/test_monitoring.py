"""What monitors use: `srtm check`, `srtm debug bundle`, `srtm generate`, and logs that programs can read."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from srtm import program
from srtm.cli.app import run
from srtm.cli.cluster.check import Verdict, judged
from srtm.cli.cluster.generate import dashboard
from srtm.net.sockets import listen
from tests.broker.running import Client, Running, fetch, running
from tests.conftest import PARTS, ROOT
from tests.control.running import controller
from tests.programs import wait_for

SECRET = "not-to-be-shown"
LINE = re.compile(r"SRTM (OK|WARNING|CRITICAL|UNKNOWN): [^|\n]+( \|( '[^']+'=\S+)+)?\n")


@contextmanager
def cluster(**options: Any) -> Iterator[tuple[str, Running]]:
    """A controller and a broker with a topic whose messages were received."""
    with ExitStack() as stack:
        served = stack.enter_context(controller(**options))
        at = f"127.0.0.1:{served.tcp}"
        token = options.get("control_token")
        broker = stack.enter_context(
            running(controller=at, broadcast_address="127.0.0.1", name="one", control_token=token)
        )
        url = f"http://127.0.0.1:{served.http}"
        headers = {"Authorization": f"Bearer {options.get('token')}"}
        api = stack.enter_context(httpx.Client(base_url=url, headers=headers, trust_env=False))
        wait_for(lambda: [each["status"] for each in api.get("/v1/brokers").json()["brokers"]] == ["alive"])
        contract = {"r": 1000, "b": 100, "slo_ms": 10_000, "fit": "none", "publishers": [{"id": "p"}]}
        api.put("/v1/topics/t", json=contract).raise_for_status()
        wait_for(lambda: api.get("/v1/topics/t").json()["state"] == "placed")
        client = stack.enter_context(Client(broker.address))
        reader = stack.enter_context(Client(broker.address)).subscribe("t", "c", 10)
        client.publish("t", b"x")
        reader.message()
        wait_for(lambda: api.get("/v1/topics/t").json()["total_ms"])
        yield url, broker


def test_one_line_and_a_code(capfd: pytest.CaptureFixture[str]) -> None:
    with cluster() as (url, broker):
        assert run(["check", "--controller", url]) == 0
        said = capfd.readouterr().out
        assert LINE.fullmatch(said)
        assert said.startswith("SRTM OK: 1 broker alive, 1 topic, every SLO met | 'brokers_alive'=1;;1:;0;1 ")
        assert "'t_p99'=" in said
        assert run(["check", "--controller", url, "--brokers", "2"]) == 2
        assert capfd.readouterr().out.startswith("SRTM CRITICAL: 1 broker alive, at least 2 required | ")
        assert run(["check", "--controller", url, "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["status"] == "OK"
        capfd.readouterr()
        for stranger in (broker.url, f"127.0.0.1:{broker.address[1]}"):  # a broker's HTTP, and its NSQ
            assert run(["check", "--controller", stranger]) == 3
            said = capfd.readouterr().out
            assert LINE.fullmatch(said)
            assert said.startswith("SRTM UNKNOWN: ")


def test_no_controller_is_critical_and_nonsense_unknown(capfd: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
    assert run(["check", "--controller", f"127.0.0.1:{port}"]) == 2
    assert "SRTM CRITICAL: no controller answers" in capfd.readouterr().out
    with controller() as served:
        # nsqlookupd's own answers are JSON of another shape.
        assert run(["check", "--controller", f"127.0.0.1:{served.http}/topics?"]) == 3
    assert "SRTM UNKNOWN:" in capfd.readouterr().out


def topic(**changes: Any) -> dict[str, Any]:
    points = {"p50": 0.1, "p95": 0.2, "p99": 0.5}
    usual = {"topic": "t", "slo_met": True, "opening_s": None, "waits_for": [], "state": "fitted"}
    usual |= {"over_contract": False, "rate": 20.0, "r": 10.0, "shares": {"overdue": False}}
    return {**usual, "waiting": 0, "total_ms": points, "slo_ms": 1.0, **changes}


ALIVE = {"name": "one", "status": "alive", "rate": 5}


@pytest.mark.parametrize(
    ("members", "topics", "verdict", "words"),
    [
        ([ALIVE], [topic()], Verdict.OK, "every SLO met"),
        ([ALIVE], [], Verdict.OK, "no topics under contract"),
        ([], [], Verdict.CRITICAL, "0 brokers alive, at least 1 required"),
        ([ALIVE, {"name": "two", "status": "dead", "rate": 0}], [], Verdict.WARNING, "two is dead"),
        ([ALIVE, {"name": "two", "status": "joining", "rate": 0}], [], Verdict.OK, "1 broker alive"),
        ([ALIVE], [topic(slo_met=False)], Verdict.CRITICAL, "t misses its SLO (0.5 ms of 1 ms)"),
        ([ALIVE], [topic(slo_met=None, total_ms=None)], Verdict.OK, "1 topic, too little traffic to judge SLOs"),
        ([ALIVE], [topic(), topic(slo_met=None)], Verdict.OK, "2 topics, 1 SLO met, others idle"),
        (
            [ALIVE],
            [topic(slo_met=False, over_contract=True)],
            Verdict.CRITICAL,
            "20 msg/s arrive, but the contract passes 10",
        ),
        ([ALIVE], [topic(state="opening", opening_s=29.0)], Verdict.OK, "1 topic"),
        ([ALIVE], [topic(opening_s=31.0, waits_for=["two"])], Verdict.WARNING, "t waits for two"),
        ([ALIVE], [topic(state="no capacity")], Verdict.WARNING, "t fits on no brokers"),
        (
            [ALIVE],
            [
                topic(
                    shares={
                        "overdue": True,
                        "short_of": "only 67 % of (r, b) is in force",
                        "short_since_s": 40.0,
                        "waits_for": ["two"],
                    }
                )
            ],
            Verdict.WARNING,
            "t: only 67 % of (r, b) is in force, for 40 s, waiting for two",
        ),
        ([ALIVE, {"name": "a\nb", "status": "silent", "rate": 0}], [], Verdict.WARNING, "a\\nb is silent"),
    ],
)
def test_what_is_how_bad(members: Any, topics: Any, verdict: Verdict, words: str) -> None:
    found, said, _ = judged(members, topics, 1, 30.0)
    assert found is verdict
    assert words in "; ".join(said)


def test_a_bundle_has_everything_but_secrets(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "controller.log"
    log.write_text("what it said")
    out = tmp_path / "bundle.tar.gz"
    with cluster(token=SECRET, control_token=SECRET) as (url, _):
        command = ["debug", "bundle", "--controller", url, "--out", str(out), "--log", str(log)]
        assert run(command) == 0
        said = capfd.readouterr()
        assert said.out == f"{out}\n"
        assert "controller/options.json: the token is missing" in said.err
        secret = tmp_path / "secret"
        secret.write_text(f"{SECRET}\n")
        assert run([*command, "--token-file", str(secret)]) == 0
        assert capfd.readouterr().err == ""
    with tarfile.open(out) as archive:
        files = {each.name: archive.extractfile(each) for each in archive.getmembers()}
        found = {name.removeprefix("bundle/"): file.read() for name, file in files.items() if file}
    assert not [name for name, content in found.items() if SECRET.encode() in content]
    options = json.loads(found["controller/options.json"])["options"]
    assert options["token"] == options["control_token"] == "(given)"
    assert json.loads(found["versions.json"])["packages"]["httpx"]
    assert found["logs/0-controller.log"] == b"what it said"
    assert json.loads(found["problems.json"]) == {}
    assert json.loads(found["topics/t/topic.json"])["events"]
    assert json.loads(found["brokers/0-one/stats.json"])["topics"]
    assert b"srtm_cluster_broker_up" in found["controller/metrics.txt"]


def test_a_bundle_without_a_cluster_says_what_is_missing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bundle.tar.gz"
    assert run(["debug", "bundle", "--controller", "127.0.0.1:1", "--out", str(out)]) == 0
    assert "skipped controller/topics.json: no controller answers" in capfd.readouterr().err
    assert run(["debug", "bundle", "--log", str(tmp_path / "none")]) == 2


def promtool(*arguments: str, **options: Any) -> str:
    command = [PARTS["promtool"].path or "", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.mark.needs("promtool")
def test_prometheus_takes_rules_and_configuration(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rules, config = tmp_path / "srtm-alerts.yml", tmp_path / "prometheus.yml"
    assert run(["generate", "prometheus", "--out", str(rules)]) == 0
    assert run(["generate", "prometheus", "--scrape", "--controller", "10.0.0.7:4161", "--out", str(config)]) == 0
    capfd.readouterr()
    assert "11 rules found" in promtool("check", "rules", str(rules))
    promtool("check", "config", str(config), cwd=tmp_path)
    assert '"http://10.0.0.7:4161/v1/targets"' in config.read_text()


# Series over three minutes, in steps of 15 s, and the alerts that they raise.
STORIES: list[tuple[dict[str, str], list[str]]] = [
    ({'srtm_cluster_topic_slo_met{topic="t"}': "1x4 0x8"}, ["SRTMSLOMissed"]),
    ({'srtm_cluster_topic_slo_met{topic="t"}': "1x12"}, []),
    ({'srtm_cluster_broker_up{broker="a"}': "1x12", 'srtm_cluster_broker_up{broker="b"}': "0x12"}, ["SRTMBrokerDown"]),
    ({'up{job="srtm-controller"}': "0x12"}, ["SRTMControllerDown"]),
    ({'srtm_topic_shares_idle_ratio{topic="t"}': "0.33x12"}, ["SRTMSharesIdle"]),
    ({'srtm_topic_shares_idle_ratio{topic="t"}': "0.33x2 0x10"}, []),
    ({'up{job="srtm-controller"}': "1x12"}, ["SRTMNoBroker"]),
    (
        {
            'srtm_cluster_topic_penalty_seconds{topic="t"}': "0.006x12",
            'srtm_cluster_topic_slo_seconds{topic="t"}': "0.01x12",
        },
        ["SRTMPenaltyHigh"],
    ),
    ({'srtm_cluster_topic_state{topic="t",state="opening"}': "1x12"}, ["SRTMTopicOpening"]),
    ({'srtm_channel_lost_total{topic="t",channel="c"}': "0x6 5x6"}, ["SRTMMessagesLost"]),
    ({'srtm_cluster_topic_lending_accused{topic="t",broker="b"}': "1x12"}, ["SRTMLendingAccused"]),
]


def test_prometheus_shows_a_token_that_it_reads_from_a_file(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "prometheus", "--scrape", "--controller", "https://c:4161", "--token-file", "/etc/viewer"]
    assert run(command) == 0
    controller, brokers = yaml.safe_load(capfd.readouterr().out)["scrape_configs"]
    shown = {"credentials_file": "/etc/viewer"}
    assert (controller["scheme"], controller["authorization"]) == ("https", shown)
    assert brokers["http_sd_configs"][0]["authorization"] == shown
    assert "authorization" not in brokers  # brokers are shown no token of the controller


@pytest.mark.needs("promtool")
def test_rules_raise_the_alerts_they_should(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rules = tmp_path / "alerts.yml"
    assert run(["generate", "prometheus", "--out", str(rules)]) == 0
    capfd.readouterr()
    names = re.findall(r"alert: (\w+)", rules.read_text())
    for number, (series, raised) in enumerate(STORIES):
        story = tmp_path / f"story-{number}.yml"
        inputs = [{"series": name, "values": _expanded(values)} for name, values in series.items()]
        firing = " or ".join(f'ALERTS{{alertstate="firing",alertname="{name}"}}' for name in names)
        expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in raised]
        question = {"expr": f"count by (alertname) ({firing})", "eval_time": "3m", "exp_samples": expected}
        test = {"interval": "15s", "input_series": inputs, "promql_expr_test": [question]}
        story.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "15s", "tests": [test]}))
        promtool("test", "rules", str(story))


def _expanded(values: str) -> str:
    """Values with how often, one by one."""
    parts = [part.partition("x") for part in values.split()]
    return " ".join(value for value, _, times in parts for _ in range(int(times) + 1))


def test_every_metric_of_dashboard_and_rules_is_there(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "prometheus"]) == 0
    rules = capfd.readouterr().out
    assert run(["generate", "grafana"]) == 0
    assert json.loads(capfd.readouterr().out) == dashboard()
    panels = dashboard()["panels"]
    named = set(re.findall(r"\b(?:srtm|process)_\w+", " ".join(each["targets"][0]["expr"] for each in panels) + rules))
    assert len(named) > 20
    with cluster() as (url, broker):
        there = set()
        for page in (url, broker.url):
            text = fetch(urllib.request.Request(f"{page}/metrics"))[1].decode()
            for family in text_string_to_metric_families(text):
                there |= {family.name, *(sample.name for sample in family.samples)}
    assert named - there == set()
    places = [tuple(each["gridPos"].values()) for each in panels]
    assert len(set(places)) == len(places)


def test_logs_for_programs_and_for_people(capfd: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("srtm.test")
    program.log_to_stderr("json", "info")
    log.debug("BROKER(one): not said")
    log.warning("BROKER(%s): no exchange: %s", "o\nne", 'it says "no"')
    log.info("plain words")
    first, second = (json.loads(line) for line in capfd.readouterr().err.splitlines())
    assert {**first, "time": ""} == {
        "time": "",
        "level": "warning",
        "noun": "BROKER",
        "name": "o\nne",
        "message": 'no exchange: it says "no"',
        "logger": "srtm.test",
    }
    assert second["message"] == "plain words"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first["time"])
    program.log_to_stderr("text", "info")
    log.info("BROKER(%s): alive", "o\nne")
    assert re.fullmatch(r"\S+ \S+ INFO BROKER\(o\\nne\): alive\n", capfd.readouterr().err)
    assert run(["controller", "--log-format", "xml"]) == 2
    assert "--log-format must be text or json, not 'xml'" in capfd.readouterr().err


@pytest.mark.processes
def test_a_controller_writes_its_log_as_it_is_told(tmp_path: Path) -> None:
    flags = ["--tcp-port", "0", "--http-port", "0", "--web-port", "none", "--log-format", "json"]
    log = tmp_path / "log"
    with log.open("w") as stderr:
        command = [sys.executable, "-m", "srtm", "controller", *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        try:
            assert process.stdout
            port = int(process.stdout.readline().rpartition(":")[2])
            url = f"http://127.0.0.1:{port}/v1/topics/t"
            httpx.put(url, json={"r": 1, "b": 1}, trust_env=False).raise_for_status()
        finally:
            process.terminate()
            process.communicate()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(each["noun"], each["name"]) for each in lines] == [("TOPIC", "t"), ("AUDIT", "127.0.0.1")]
    assert lines[1]["message"].startswith('create {"topic": "t", "r": 1.0')


def test_the_commands_of_the_operations_page_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    (block,) = re.findall(r"(?<!-->\n)```sh\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    with cluster() as (url, _):
        monkeypatch.setenv("SRTM_CONTROLLER", url)
        for line in block.strip().splitlines():
            expected = 2 if line == "srtm check --brokers 3" else 0  # there is one
            assert run(line.split()[1:]) == expected, line
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"srtm-alerts.yml", "prometheus.yml", "srtm-dashboard.json", "srtm-debug.tar.gz"}


def test_top_shows_what_matters_and_sorts_by_it(capfd: pytest.CaptureFixture[str]) -> None:
    with cluster() as (url, _):
        for name, r in (("a", 5), ("b", 7)):
            httpx.put(f"{url}/v1/topics/{name}", json={"r": r, "b": 1}, trust_env=False).raise_for_status()
        assert run(["top", "--once", "--controller", url]) == 0
        said = capfd.readouterr().out
        for word in ("waiting", "penalty", "p99 access", "loop lag", "rcap", "one"):
            assert word in said
        assert run(["top", "--json", "--sort", "p99", "--controller", url]) == 0
        assert [each["topic"] for each in json.loads(capfd.readouterr().out)["topics"]] == ["t", "a", "b"]
        assert run(["top", "--json", "--controller", url]) == 0
        assert [each["topic"] for each in json.loads(capfd.readouterr().out)["topics"]] == ["a", "b", "t"]
