"""Findings in, advice out, over HTTP and on the command line; the shapes are contracts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx

from srtm.cli.app import run
from tests.control.running import controller

if TYPE_CHECKING:
    import pytest

FOUND: dict[str, Any] = {"messages": 6000, "publishers": 2, "span_s": 60, "rate": 200, "r": 220, "b": 40}
GROUP = {"publishers": ["p", "q"], "confidence": 0.75}


def findings(birth: int, batch: int = 0, **more: Any) -> dict[str, Any]:
    return {"query": "q", "batch": batch, "topics": [{"topic": "t", "birth": birth, **FOUND, **more}]}


def test_findings_become_advice_everywhere(capfd: pytest.CaptureFixture[str]) -> None:
    with controller() as served, httpx.Client(base_url=f"http://127.0.0.1:{served.http}", trust_env=False) as api:
        made = api.put("/v1/topics/t", json={"r": 100, "b": 50, "slo_ms": 100}).json()
        assert api.get("/v1/topics/t/advice").json() == {"advice": []}
        posted = findings(made["birth"], groups=[GROUP], access_p99_ms=90.0, one_bucket_p99_ms=60.0)
        kinds = ["contract-too-small", "groups-found", "slo-at-risk"]
        assert api.post("/v1/findings", json=posted).json() == {"accepted": True, "advice": {"t": kinds}}
        assert api.post("/v1/findings", json=posted).json() == {"accepted": False, "advice": {"t": kinds}}
        advice = api.get("/v1/topics/t/advice").json()["advice"]
        assert [set(each) for each in advice] == [{"kind", "text", "since_s", "evidence"}] * 3
        assert sorted(each["kind"] for each in advice) == kinds
        (found,) = [each for each in advice if each["kind"] == "groups-found"]
        assert found["evidence"]["groups"] == [{"group": "g-p", **GROUP}]
        shown = api.get("/v1/topics/t").json()["advice"]
        assert [(each["kind"], each["text"]) for each in shown] == [(each["kind"], each["text"]) for each in advice]
        page = api.get("/metrics").text
        assert 'srtm_cluster_topic_advice{kind="contract-too-small",topic="t"} 1.0' in page
        assert 'srtm_cluster_topic_advice{kind="contract-too-large",topic="t"} 0.0' in page
        at = ["--controller", f"http://127.0.0.1:{served.http}"]
        assert run(["topic", "advice", "t", "--json", *at]) == 0
        said = json.loads(capfd.readouterr().out)
        assert [each["kind"] for each in said["advice"]] == [each["kind"] for each in advice]
        assert run(["topic", "advice", "t", *at]) == 0
        assert "contract-too-small (" in capfd.readouterr().out
        assert run(["topic", "advice", "unknown", *at]) == 1


def test_findings_need_the_token_and_their_shape() -> None:
    with (
        controller(token="s3cret") as served,
        httpx.Client(base_url=f"http://127.0.0.1:{served.http}", trust_env=False) as api,
    ):
        assert api.post("/v1/findings", json=findings(1)).status_code == 401
        shown = {"Authorization": "Bearer s3cret"}
        assert api.post("/v1/findings", json=findings(1), headers=shown).json()["accepted"]
        for wrong in ({"batch": -1}, {"auto": ["contracts"]}, {"topics": [{"topic": "t"}]}, {"surplus": 1}):
            assert api.post("/v1/findings", json=findings(1) | wrong, headers=shown).status_code == 422
        assert api.get("/v1/topics/t/advice").status_code == 404
