"""`srtm topic` against a real controller and broker: whatever a topic is called, that one is meant."""

from __future__ import annotations

import json
import re

import httpx
import pytest

from srtm.cli.app import run
from srtm.cli.common import in_ms
from srtm.client.cluster import topic_path
from tests.cli.test_monitoring import cluster

NAMES = ["y#ephemeral", ".", "..", "a.b-c_D"]
CONTRACT = ["--r", "10", "--b", "5", "--fit", "none"]


def test_a_name_means_that_topic_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    with cluster() as (url, _):
        at = ["--controller", url]
        for name in NAMES:
            assert run(["topic", "create", name, *CONTRACT, *at]) == 0
            capfd.readouterr()
            assert run(["topic", "show", name, "--json", *at]) == 0
            assert json.loads(capfd.readouterr().out)["topic"] == name
        assert run(["topic", "ls", "--json", *at]) == 0
        assert {each["topic"] for each in json.loads(capfd.readouterr().out)["topics"]} == {"t", *NAMES}
        for name in NAMES:
            assert run(["topic", "rm", name, *at]) == 0
        capfd.readouterr()
        for verb in ("show", "rm", "fit", "explain"):
            for name in ("../brokers/one", "../brokers", "t?x=1", "bad/name", "", "t#x"):
                assert run(["topic", verb, name, *at]) == 2
                assert "invalid topic or channel name" in capfd.readouterr().err
        assert run(["topic", "create", "bad/name", *CONTRACT, *at]) == 2
        assert 'invalid topic or channel name "bad/name"' in capfd.readouterr().err
        assert [each["name"] for each in httpx.get(f"{url}/v1/brokers", trust_env=False).json()["brokers"]] == ["one"]


def test_a_bare_slo_is_in_ms_and_publishers_are_listed_and_forgotten(capfd: pytest.CaptureFixture[str]) -> None:
    with cluster() as (url, _):
        at = ["--controller", url]
        assert run(["topic", "create", "u", *CONTRACT, "--slo-p99", "5", "--json", *at]) == 0
        assert json.loads(capfd.readouterr().out)["slo_ms"] == 5
        asked = {"publishers": [{"id": "../p", "rate": 2.5, "group": "g"}, {"id": "q"}]}
        httpx.post(f"{url}/v1/topics/t/publishers", json=asked, trust_env=False).raise_for_status()
        assert run(["topic", "publishers", "t", *at]) == 0
        assert re.search(r"\.\./p +g +2\.5 +one", capfd.readouterr().out)
        assert run(["topic", "publishers", "t", "--rm", "../p", "--json", *at]) == 0
        assert {each["id"] for each in json.loads(capfd.readouterr().out)["publishers"]} == {"p", "q"}
        assert run(["topic", "publishers", "t", "--rm", "nobody", *at]) == 1
        assert "nobody" in capfd.readouterr().err
        assert run(["topic", "publishers", "t", "--rm", "", *at]) == 2


def test_a_contract_is_changed_in_place(capfd: pytest.CaptureFixture[str]) -> None:
    with cluster() as (url, _):
        at = ["--controller", url]
        assert run(["topic", "create", "u", *CONTRACT, *at]) == 0
        assert run(["topic", "create", "u", "--r", "20", "--b", "5", "--fit", "none", *at]) == 1
        assert "srtm topic set" in capfd.readouterr().err
        assert run(["topic", "set", "u", "--r", "20", "--slo-p99", "3", *at]) == 0
        assert capfd.readouterr().out == "topic u: (r, b) = (20/s, 5), p99 within 3 ms, srtm\n"
        assert run(["topic", "set", "u", "--no-adapt", "--fit", "measure", "--policy", "lb", "--json", *at]) == 0
        now = json.loads(capfd.readouterr().out)
        assert (now["r"], now["b"], now["fit"], now["policy"]) == (20, 5, "measure", "lb")
        assert (now["adapt_window_s"], now["adapt_period_s"]) == (10, 1)
        adaptation = ["--adapt-window", "1m", "--adapt-period", "5"]
        assert run(["topic", "set", "u", *adaptation, "--json", *at]) == 0
        now = json.loads(capfd.readouterr().out)
        assert (now["adapt_window_s"], now["adapt_period_s"]) == (60, 5)
        assert run(["topic", "create", "v", *CONTRACT, *adaptation, "--json", *at]) == 0
        now = json.loads(capfd.readouterr().out)
        assert (now["adapt_window_s"], now["adapt_period_s"]) == (60, 5)
        assert run(["topic", "create", "w", *CONTRACT, "--lending", "early", *at]) == 0
        assert run(["topic", "set", "w", "--lending", "auto", "--json", *at]) == 0
        assert '"mode": "auto"' in capfd.readouterr().out
        assert run(["topic", "show", "w", *at]) == 0
        assert "lending auto, now off: 0 asks (0 unanswered), 0 tokens lent" in capfd.readouterr().out
        assert run(["topic", "set", "w", "--lending", "often", *at]) == 2
        assert "unknown lending 'often'; choose auto, off, when_waiting or early" in capfd.readouterr().err
        assert run(["topic", "set", "u", "--adapt-period", "1500ms", *at]) == 2
        assert "--adapt-period must be whole seconds, not 1500ms" in capfd.readouterr().err
        assert run(["topic", "set", "u", "--adapt-period", "61", *at]) == 1
        assert "use a shorter period or a longer window" in capfd.readouterr().err
        assert run(["topic", "set", "u", *at]) == 2
        assert "give --r" in capfd.readouterr().err
        assert run(["topic", "set", "nobody", "--r", "1", *at]) == 1
        capfd.readouterr()
        assert run(["topic", "create", "d", *CONTRACT, "--durability", "disk", *at]) == 1
        assert "on disk: one has no --data-path" in capfd.readouterr().err


def test_milliseconds_have_no_exponent() -> None:
    shown = {0.01234: "0.0123 ms", 12.34: "12.3 ms", 999.4: "999 ms", 999.6: "1,000 ms", 16_649.0: "16,649 ms"}
    assert {value: in_ms(value) for value in shown} == shown


@pytest.mark.parametrize(("r", "b"), [("nan", "1"), ("inf", "1"), ("1", "nan"), ("-1", "1"), ("1", "-inf")])
def test_numbers_that_are_no_bucket(r: str, b: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["topic", "create", "t", "--r", r, "--b", b, "--controller", "127.0.0.1:1"]) == 2
    assert capfd.readouterr().err.startswith("srtm: ")


@pytest.mark.parametrize("name", [".", "..", "x/../y?z#w", "é %2F"])
def test_names_in_paths_are_quoted(name: str) -> None:
    url = httpx.URL("http://c").join(topic_path("t#ephemeral", "publishers", name))
    assert url.raw_path.decode().count("/") == 5
    assert url.path == f"/v1/topics/t#ephemeral/publishers/{name}"
