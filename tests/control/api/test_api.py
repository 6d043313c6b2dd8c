"""The HTTP API against whoever may call it: everything that its OpenAPI document allows, and much that it does not."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from fractions import Fraction
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import checks
from schemathesis.openapi import from_dict

from srtm.control import run
from srtm.control.controller import Controller
from srtm.control.discovery.registry import Registry
from srtm.control.options import ControllerOptions
from srtm.control.service import Service
from srtm.control.statistics import slo_met
from srtm.control.store import Store
from tests.broker.running import PATIENCE_S, running
from tests.control.running import controller
from tests.programs import wait_for

TOKEN = "s3cret"
SHOWN = {"Authorization": f"Bearer {TOKEN}"}
LATE_S = 0.1  # within which watchers are told

DOCUMENT = run.app(Service(Controller(ControllerOptions(), Store(), 1), Registry(1, 1))).openapi()
SCHEMA = from_dict(DOCUMENT).exclude(path_regex="/watch$")  # which never ends
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]


@pytest.fixture(scope="module")
def api() -> Iterator[httpx.Client]:
    """A controller with a token and one broker, and a client that shows the token."""
    with ExitStack() as stack:
        served = stack.enter_context(controller(token=TOKEN))
        stack.enter_context(running(controller=f"127.0.0.1:{served.tcp}", broadcast_address="127.0.0.1", name="one"))
        url = f"http://127.0.0.1:{served.http}"
        client = stack.enter_context(httpx.Client(base_url=url, headers=SHOWN, timeout=PATIENCE_S, trust_env=False))
        wait_for(lambda: alive(client))
        yield client


def alive(client: httpx.Client) -> bool:
    return [each["status"] for each in client.get("/v1/brokers").json()["brokers"]] == ["alive"]


@pytest.fixture
def topic(api: httpx.Client) -> Iterator[str]:
    """A topic under contract, for one test."""
    assert api.put("/v1/topics/contracted", json={"r": 100, "b": 10}).status_code == 200
    yield "contracted"  # a name that no fuzzing hits upon
    api.delete("/v1/topics/contracted")


@SCHEMA.parametrize()
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
def test_what_the_document_says_holds(case: schemathesis.Case[Any], api: httpx.Client) -> None:
    if case.path_parameters and case.path_parameters.get("name") == "one":
        return  # the broker of all other tests is not to be drained
    case.call_and_validate(base_url=str(api.base_url), headers=SHOWN, checks=CHECKS, timeout=PATIENCE_S)


def changing() -> list[tuple[str, str]]:
    return [
        (method.upper(), path.format(topic="t", publisher="p", name="one"))
        for path, methods in DOCUMENT["paths"].items()
        for method in methods
        if method != "get" and path != "/v1/session"  # where anyone may log in
    ]


@pytest.mark.parametrize(("method", "path"), changing())
@pytest.mark.parametrize("shown", [None, "Bearer wrong", TOKEN, f"Basic {TOKEN}", "Bearer", "Bearer \xff"])
def test_whoever_changes_anything_shows_the_token(api: httpx.Client, method: str, path: str, shown: str | None) -> None:
    headers = {} if shown is None else {b"Authorization": shown.encode("latin-1")}
    answer = httpx.request(method, str(api.base_url).rstrip("/") + path, headers=headers, json={}, trust_env=False)
    assert answer.status_code == 401
    assert "Authorization: Bearer" in answer.json()["detail"]


@pytest.mark.parametrize(
    "path", ["/v1/topics", "/v1/topics/contracted", "/v1/topics/contracted/publishers", "/v1/brokers"]
)
def test_whoever_only_looks_shows_nothing(api: httpx.Client, topic: str, path: str) -> None:
    del topic
    assert httpx.get(f"{api.base_url}{path}", trust_env=False).status_code == 200


def contract(**changes: Any) -> str:
    return json.dumps({"r": 100.0, "b": 10.0, **changes})


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (contract(r=float("nan")), "r"),
        (contract(r=float("inf")), "r"),
        (contract(b=float("-inf")), "b"),
        (contract(r=-1), "r"),
        (contract(r=0), "r"),
        (contract(r=0.0001), "r"),
        (contract(r=1e308), "r"),
        (contract(b=0.999), "b"),
        (contract(b=1e18), "b"),
        (contract(b=10**400), "b"),
        (contract(r="fast"), "r"),
        (contract(r=None), "give both r and b, or neither"),
        (json.dumps({}), "give r and b, or publishers"),
        (contract(quantile="0."), "quantile"),
        (contract(quantile="0.0"), "quantile"),
        (contract(quantile="1"), "quantile"),
        (contract(quantile="0.9999999999"), "quantile"),
        (contract(quantile=0.99), "quantile"),
        (contract(slo_ms=0), "slo_ms"),
        (contract(slo_ms=float("nan")), "slo_ms"),
        (contract(policy="best"), "policy"),
        (contract(adapt_window_s=2), "adapt_window_s"),
        (contract(adapt_window_s=10.5), "adapt_window_s"),
        (contract(adapt_period_s=0), "adapt_period_s"),
        (contract(adapt_period_s=11), "longer than adapt_window_s (10)"),
        (contract(lending="often"), "unknown lending 'often'; choose auto, off, when_waiting or early"),
        (contract(lending=1), "lending"),
        (contract(durability="tape"), "durability"),
        (contract(durability="disk", overflow="drop"), "cannot drop messages"),
        (contract(surprise=1), "surprise"),
        (contract(publishers=[{"id": ""}]), "id"),
        (contract(publishers=[{"id": "p" * 257}]), "id"),
        (contract(publishers=[{"id": "\ud800"}]), "id"),
        (contract(**{"\ud800": 1}), "unicode"),
        (contract(publishers=[{"id": "p", "rate": -1}]), "rate"),
        (contract(publishers=[{"id": "p", "batch": 0}]), "batch"),
        (contract(publishers=[{"id": "p", "jitter_ms": float("inf")}]), "jitter_ms"),
        (contract(publishers=[{"id": str(number)} for number in range(100_001)]), "publishers"),
        ("[" * 100_000, "parsing"),
        ("9" * 5_000, "parsing"),
        ("nonsense", "JSON"),
        ("", "required"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(api: httpx.Client, body: str, where: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = api.put("/v1/topics/refused", content=body.encode(errors="surrogatepass"), headers=headers)
    assert answer.status_code in (400, 422)
    assert where in answer.text
    assert api.get("/v1/topics/refused").status_code == 404


@pytest.mark.parametrize("name", ["a b", "a%2Fb", "ä", "x" * 65, "a%23ephemeral%20", "%00", "a%0Ab"])
def test_a_name_that_no_topic_can_have(api: httpx.Client, name: str) -> None:
    answer = api.put(f"/v1/topics/{name}", json={"r": 100, "b": 10})
    assert answer.status_code in (404, 422)
    assert name not in [each["topic"] for each in api.get("/v1/topics").json()["topics"]]


def test_publishers_may_be_called_anything(api: httpx.Client, topic: str) -> None:
    names = ["a b", "a/b", "ä☃", "..", "?x=1#y", "%2F", "'; DROP TABLE publishers; --", '"', "\x00"]
    answer = api.post(f"/v1/topics/{topic}/publishers", json={"publishers": [{"id": name} for name in names]})
    assert answer.status_code == 200
    assert set(answer.json()["publishers"]) == set(names)
    kept = [each["id"] for each in api.get(f"/v1/topics/{topic}/publishers").json()["publishers"]]
    assert sorted(kept) == sorted(names)


def test_a_publisher_is_removed_by_its_name(api: httpx.Client, topic: str) -> None:
    names = ["a b", "a/b", "ä☃", "?x=1#y", "%2F"]
    api.post(f"/v1/topics/{topic}/publishers", json={"publishers": [{"id": name} for name in names]})
    for name in names:
        assert api.delete(f"/v1/topics/{topic}/publishers/{quote(name, safe='')}").status_code == 204
    assert api.get(f"/v1/topics/{topic}/publishers").json()["publishers"] == []


def test_a_publisher_that_is_named_twice_counts_once(api: httpx.Client, topic: str) -> None:
    twice = [{"id": "p", "rate": 1}, {"id": "p", "rate": 2}]
    answer = api.post(f"/v1/topics/{topic}/publishers", json={"publishers": twice})
    assert list(answer.json()["publishers"]) == ["p"]
    found = api.get(f"/v1/topics/{topic}/publishers").json()["publishers"]
    assert [(each["id"], each["rate"]) for each in found] == [("p", 2.0)]


def test_another_contract_for_the_same_topic_is_a_conflict(api: httpx.Client, topic: str) -> None:
    assert api.put(f"/v1/topics/{topic}", json={"r": 100, "b": 10}).status_code == 200
    answer = api.put(f"/v1/topics/{topic}", json={"r": 100, "b": 11})
    assert answer.status_code == 409
    assert "srtm topic set" in answer.json()["detail"]
    assert api.get(f"/v1/topics/{topic}").json()["b"] == 10


def test_a_contract_is_changed_while_the_topic_goes_on(api: httpx.Client) -> None:
    """What is not named stays; brokers hold the new shares, all of them; it is in the audit log."""
    topic = "changing"
    api.put(f"/v1/topics/{topic}", json={"r": 100, "b": 10, "fit": "none", "slo_ms": 5}).raise_for_status()
    api.post(f"/v1/topics/{topic}/publishers", json={"publishers": [{"id": "p"}]}).raise_for_status()
    changed = api.patch(f"/v1/topics/{topic}", json={"r": 50, "b": 8}).raise_for_status().json()
    assert (changed["r"], changed["b"], changed["slo_ms"], changed["fit"]) == (50, 8, 5, "none")
    wait_for(lambda: shares(api, topic) == [(50, 8)])
    api.patch(f"/v1/topics/{topic}", json={"r": 200, "b": 20}).raise_for_status()
    wait_for(lambda: shares(api, topic) == [(200, 20)])
    assert api.patch(f"/v1/topics/{topic}", json={"slo_ms": 7, "policy": "lb"}).json()["slo_ms"] == 7
    kept = api.get(f"/v1/topics/{topic}").json()
    assert (kept["r"], kept["b"], kept["policy"]) == (200, 20, "lb")
    newest = next(each for each in api.get("/v1/audit").json()["entries"] if each["action"] == "change")
    assert newest["arguments"] == {"topic": topic, "slo_ms": 7.0, "policy": "lb"}
    adapted = api.patch(f"/v1/topics/{topic}", json={"adapt_window_s": 30, "adapt_period_s": 5}).json()
    assert (adapted["adapt_window_s"], adapted["adapt_period_s"], adapted["r"]) == (30, 5, 200)
    assert adapted["lending"]["mode"] == "off"
    lending = api.patch(f"/v1/topics/{topic}", json={"lending": "auto"}).json()["lending"]
    assert (lending["mode"], lending["chosen"], lending["asked"]) == ("auto", "off", 0)  # one broker has nobody to ask
    longer = api.patch(f"/v1/topics/{topic}", json={"adapt_period_s": 31})
    assert (longer.status_code, "use a shorter period" in longer.text) == (422, True)
    for wrong in (
        {"b": 0},
        {"r": -1},
        {"adapt_window_s": 0},
        {"lending": "often"},
        {"durability": "disk"},
        {"quantile": "0.0"},
        {"policy": "best"},
        {"r": 1e-9},
    ):
        assert api.patch(f"/v1/topics/{topic}", json=wrong).status_code == 422
    api.delete(f"/v1/topics/{topic}").raise_for_status()
    assert api.patch("/v1/topics/unknown", json={"r": 1}).status_code == 404


@pytest.mark.parametrize(
    ("sent", "over", "met"), [(0, 0, None), (1, 0, True), (1, 1, None), (50, 1, None), (50, 2, False), (100, 1, True)]
)
def test_one_late_message_of_a_few_decides_nothing(sent: int, over: int, met: bool | None) -> None:
    assert slo_met(sent, over, Fraction(1, 100)) is met


def shares(api: httpx.Client, topic: str) -> list[tuple[float, float]]:
    held = [(each["r"], each["b"]) for each in api.get(f"/v1/topics/{topic}").json()["brokers"]]
    return [share for share in held if share != (0, 0)]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/topics/unknown", None),
        ("DELETE", "/v1/topics/unknown", None),
        ("POST", "/v1/topics/unknown/fit", None),
        ("POST", "/v1/topics/unknown/move", {"publishers": ["p"], "broker": "one"}),
        ("GET", "/v1/topics/unknown/explain", None),
        ("GET", "/v1/topics/unknown/publishers", None),
        ("DELETE", "/v1/topics/unknown/publishers/p", None),
    ],
)
def test_an_unknown_topic_comes_with_the_remedy(api: httpx.Client, method: str, path: str, body: Any) -> None:
    answer = api.request(method, path, json=body)
    assert answer.status_code == 404
    assert answer.json()["detail"] == "topic 'unknown' is not under contract; create it first"


def test_who_cannot_be_moved_or_fitted_is_named(api: httpx.Client, topic: str) -> None:
    assert "register them first" in api.post(f"/v1/topics/{topic}/fit").json()["detail"]
    for wish, words in (
        ({"publishers": ["ghost"], "broker": "one"}, "no publisher 'ghost'"),
        ({"publishers": ["ghost"], "broker": "nobody"}, "unknown broker 'nobody'; known brokers: one"),
    ):
        answer = api.post(f"/v1/topics/{topic}/move", json=wish)
        assert answer.status_code == 409
        assert words in answer.json()["detail"]
    assert api.delete("/v1/brokers/nobody").status_code == 404
    assert api.post("/v1/brokers/nobody/drain").status_code == 404


def test_a_bucket_is_profiled_from_what_publishers_declare(api: httpx.Client) -> None:
    calm = [{"id": str(number), "rate": 10, "process": "periodic"} for number in range(20)]
    assert api.put("/v1/topics/profiled", json={"publishers": calm}).json()["r"] == pytest.approx(220, rel=0.05)
    api.delete("/v1/topics/profiled")
    for rate, words in ((1e9, "cannot predict 1,000,000,000 msg/s"), (0.001, "no arrivals")):
        answer = api.put("/v1/topics/profiled", json={"publishers": [{"id": "p", "rate": rate}]})
        assert answer.status_code == 422
        assert words in answer.json()["detail"]


def test_a_hundred_thousand_publishers_at_once(api: httpx.Client, topic: str) -> None:
    many = [{"id": str(number), "group": f"g{number // 30}", "rate": 0.1} for number in range(100_000)]
    answer = api.post(f"/v1/topics/{topic}/publishers", json={"publishers": many}, timeout=60)
    assert answer.status_code == 200
    assert len(answer.json()["publishers"]) == 100_000
    wait_for(lambda: alive(api))  # brokers are not spoken to meanwhile


def test_a_topic_that_no_contract_holds_is_published_anywhere(api: httpx.Client) -> None:
    answer = api.post("/v1/topics/free/publishers", json={"publishers": [{"id": "p"}]})
    assert answer.json()["managed"] is False
    assert answer.json()["publishers"]["p"]["broker"] == "one"
    assert api.get("/v1/topics/free").status_code == 404


def test_without_a_broker_publishers_are_told_to_come_later() -> None:
    with controller() as served:
        url = f"http://127.0.0.1:{served.http}/v1/topics"
        assert httpx.put(f"{url}/t", json={"r": 100, "b": 10}, trust_env=False).status_code == 200
        for topic in ("t", "free"):
            answer = httpx.post(f"{url}/{topic}/publishers", json={"publishers": [{"id": "p"}]}, trust_env=False)
            assert answer.status_code == 503
            assert "start one with --controller" in answer.json()["detail"]


def test_who_watches_is_told_at_once(api: httpx.Client, topic: str) -> None:
    url = f"{api.base_url}/v1/topics/{topic}/watch"
    with httpx.stream("GET", url, timeout=PATIENCE_S, trust_env=False) as watch:
        lines = watch.iter_lines()
        assert next(lines) == "event: brokers"
        delays = []
        for number in range(5):
            api.post(f"/v1/topics/{topic}/publishers", json={"publishers": [{"id": f"p{number}"}]}).raise_for_status()
            wait_for(lambda: api.get("/v1/brokers").json()["brokers"][0]["status"] == "alive")
            began = time.monotonic()
            move = {"publishers": [f"p{number}"], "broker": "one"}
            api.post(f"/v1/topics/{topic}/move", json=move).raise_for_status()
            while next(lines) != "event: moved":
                pass
            delays.append(time.monotonic() - began)
    assert min(delays) < LATE_S  # of several, because the machine may be busy with something else


def test_a_contract_names_who_may_publish_and_subscribe(api: httpx.Client, topic: str) -> None:
    path = f"/v1/topics/{topic}"
    assert api.get(path).json()["may_publish"] == api.get(path).json()["may_subscribe"] == []
    made = api.patch(path, json={"may_publish": ["sensors", "ops"], "may_subscribe": ["cloud"]}).json()
    assert (made["may_publish"], made["may_subscribe"]) == (["sensors", "ops"], ["cloud"])
    assert api.patch(path, json={"r": 120}).json()["may_publish"] == ["sensors", "ops"]
    assert api.patch(path, json={"may_publish": []}).json()["may_publish"] == []
    for wrong in ({"may_publish": [""]}, {"may_publish": "sensors"}, {"may_subscribe": [1]}):
        assert api.patch(path, json=wrong).status_code == 422
