"""Every path of the controller and of its page, tried without, with a wrong and with each right credential."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route
from tools import access as table

from srtm.control import run
from srtm.control.access.rules import RULES, rule_of
from srtm.control.access.token import Role
from srtm.control.controller import Controller
from srtm.control.discovery.registry import Registry
from srtm.control.options import ControllerOptions
from srtm.control.service import Service
from srtm.control.store import Store
from srtm.errors import ControlError
from tests.broker.running import PATIENCE_S
from tests.control.running import controller_with_page

APP = run.app(Service(Controller(ControllerOptions(), Store(), 1), Registry(1, 1)))
ROLES = (Role.VIEWER, Role.OPERATOR, Role.ADMIN, Role.BROKER)
NAMES = {"{topic}": "t", "{publisher}": "p", "{publisher:path}": "p", "{name}": "absent"}


def paths() -> list[tuple[str, str]]:
    """Every method and path of the application: of the OpenAPI document, and of routes that it does not list."""
    found = {(method.upper(), path) for path, methods in APP.openapi()["paths"].items() for method in methods}
    for route in APP.router.routes:
        if isinstance(route, Route) and not route.path.startswith("/v1"):
            methods = set(route.methods or ()) or {getattr(route.endpoint, "_method", "GET")}
            found |= {(method, route.path) for method in methods - {"HEAD"}}
    return sorted(found)


PATHS = paths()


def ruled() -> set[tuple[str, str]]:
    return {(method, path.replace(":path}", "}")) for path, rules in RULES.items() for method in rules}


def test_every_path_has_a_rule_and_every_rule_a_path() -> None:
    assert len(PATHS) > 35
    assert set(PATHS) == ruled()


def test_the_documentation_has_the_rules() -> None:
    text = table.PAGE.read_text()
    assert text == table.page(text), "run `make docs`"


def test_what_has_no_rule_is_for_admins() -> None:
    admins = frozenset({Role.ADMIN})
    assert rule_of("GET", "/v1/new") == rule_of("PUT", "/ping") == rule_of("GET", "/v1/topics/") == admins


def filled(path: str) -> str:
    for name, value in NAMES.items():
        path = path.replace(name, value)
    return path


class Closed:
    """A controller with a token of each role, and somebody who asks it."""

    def __init__(self, api: httpx.Client, page: str, secrets: dict[Role, str]) -> None:
        self.api, self.page, self.secrets = api, page, secrets

    def status(self, method: str, path: str, secret: str | None, at: str = "") -> int:
        headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
        with self.api.stream(method, at + filled(path), headers=headers, json={}) as answer:  # some never end
            return answer.status_code


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Closed]:
    folder = tmp_path_factory.mktemp("store")
    with ExitStack() as stack:
        served, page = stack.enter_context(controller_with_page(data_path=str(folder)))
        base = f"http://127.0.0.1:{served.http}"
        api = stack.enter_context(httpx.Client(base_url=base, timeout=PATIENCE_S, trust_env=False))
        root = api.post("/v1/tokens", json={"name": "root", "role": "admin"}).json()["secret"]
        shown = {"Authorization": f"Bearer {root}"}
        secrets = {Role.ADMIN: root}
        for role in ROLES:
            if role is not Role.ADMIN:
                made = api.post("/v1/tokens", json={"name": role.value, "role": role.value}, headers=shown)
                secrets[role] = made.json()["secret"]
        assert api.put("/v1/topics/t", json={"r": 100, "b": 10}, headers=shown).status_code == 200
        yield Closed(api, page.rstrip("/"), secrets)


@pytest.mark.parametrize(("method", "path"), PATHS, ids=" ".join)
def test_who_may(closed: Closed, method: str, path: str) -> None:
    who = RULES[path if path in RULES else path.replace("{publisher}", "{publisher:path}")][method]
    revoked = "srtm_" + "0" * 16 + "_" + "A" * 43
    for secret in (None, "wrong", revoked, closed.secrets[Role.ADMIN][:-1]):
        status = closed.status(method, path, secret)
        if who is None:
            assert status not in (401, 403, 500) or path == "/v1/session", (secret, status)
        else:
            assert status == 401, (secret, status)
    for role in ROLES:
        if path.startswith("/v1/topics/{topic}") and method == "DELETE" and "publisher" not in path:
            break  # it would be gone for the others; the rules that let operators change it are the same
        status = closed.status(method, path, closed.secrets[role])
        if who is None or role in who:
            assert status not in (401, 403, 500), (role, status)
        else:
            assert status == 403, (role, status)


@pytest.mark.parametrize("path", ["/v1/topics", "/v1/brokers", "/v1/watch", "/v1/tokens", "/v1/audit"])
def test_the_port_of_the_page_has_the_same_rules(closed: Closed, path: str) -> None:
    assert closed.status("GET", path, None, closed.page) == 401
    assert closed.status("GET", path, closed.secrets[Role.ADMIN], closed.page) == 200


@pytest.mark.parametrize("path", ["/", "/page.js", "/page.css", "/policies.json"])
def test_the_page_itself_is_for_anyone(closed: Closed, path: str) -> None:
    assert closed.status("GET", path, None, closed.page) == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/nothing"),
        ("GET", "/v1/topics/"),
        ("HEAD", "/v1/topics"),
        ("OPTIONS", "/v1/topics"),
        ("PUT", "/ping"),
    ],
)
def test_what_is_not_there_says_nothing_to_strangers(closed: Closed, method: str, path: str) -> None:
    assert closed.status(method, path, None) == 401


def test_a_body_is_not_read_before_its_sender_may_send_it(closed: Closed) -> None:
    answer = closed.api.put("/v1/topics/t", content=b"{" * 1_000_000)
    assert answer.status_code == 401


def test_a_stranger_sends_little(closed: Closed) -> None:
    answer = closed.api.post("/v1/session", json={"token": "x" * 100_000})
    assert (answer.status_code, "exceeds 4096 bytes" in answer.text) == (413, True)
    admin = {"Authorization": f"Bearer {closed.secrets[Role.ADMIN]}"}
    many = {"publishers": [{"id": f"publisher-{number}"} for number in range(1000)]}
    assert closed.api.post("/v1/topics/t/publishers", json=many, headers=admin).status_code == 503  # there is no broker


def test_basic_credentials_are_for_nsq_clients(closed: Closed) -> None:
    url = closed.api.base_url.copy_with(username="any", password=closed.secrets[Role.VIEWER], path="/topics")
    assert httpx.get(url, trust_env=False).status_code == 200
    assert httpx.get(url.copy_with(password="wrong"), trust_env=False).status_code == 401


def test_the_audit_log_has_names_and_no_secrets(closed: Closed) -> None:
    operator = {"Authorization": f"Bearer {closed.secrets[Role.OPERATOR]}"}
    assert closed.api.post("/v1/topics/t/pause", headers=operator).status_code == 200
    admin = {"Authorization": f"Bearer {closed.secrets[Role.ADMIN]}"}
    entries: list[dict[str, Any]] = closed.api.get("/v1/audit", headers=admin).json()["entries"]
    tokens = {each["name"]: each["id"] for each in closed.api.get("/v1/tokens", headers=admin).json()["tokens"]}
    paused = next(each for each in entries if each["action"] == "pause")
    assert paused["who"] == f"operator#{tokens['operator']}@127.0.0.1"
    assert {"create token", "pause"} <= {each["action"] for each in entries}
    assert not [secret for secret in closed.secrets.values() if secret in str(entries)]


def test_a_revoked_token_ends_streams_and_sessions(closed: Closed) -> None:
    admin = {"Authorization": f"Bearer {closed.secrets[Role.ADMIN]}"}
    made = closed.api.post("/v1/tokens", json={"name": "short", "role": "viewer"}, headers=admin).json()
    with httpx.Client(base_url=closed.page, timeout=PATIENCE_S, trust_env=False) as browser:
        answer = browser.post("/v1/session", json={"token": made["secret"]}, headers={"Origin": closed.page})
        assert (answer.status_code, answer.json()["name"], answer.json()["role"]) == (200, "short", "viewer")
        with browser.stream("GET", "/v1/watch") as stream:
            assert stream.status_code == 200
            assert closed.api.delete("/v1/tokens/short", headers=admin).status_code == 204
            for _ in stream.iter_bytes():
                pass  # to its end
        assert browser.get("/v1/topics").status_code == 401


def test_a_session_is_for_the_page_alone(closed: Closed) -> None:
    with httpx.Client(base_url=closed.page, timeout=PATIENCE_S, trust_env=False) as browser:
        for origin in ("http://evil.example", "null", "http://["):
            answer = browser.post("/v1/session", json={"token": "x"}, headers={"Origin": origin})
            assert (answer.status_code, "cross-origin" in answer.text) == (403, True)
        token = {"token": closed.secrets[Role.OPERATOR]}
        cookie = browser.post("/v1/session", json=token, headers={"Origin": closed.page}).headers["set-cookie"]
        assert cookie.endswith("; Path=/; Max-Age=43200; HttpOnly; SameSite=Strict")
        for headers, status in (
            ({}, 403),
            ({"Origin": "http://evil.example"}, 403),
            ({"Sec-Fetch-Site": "cross-site"}, 403),
            ({"Sec-Fetch-Site": "same-origin"}, 200),
            ({"Origin": closed.page}, 200),
        ):
            assert browser.post("/v1/topics/t/pause", headers=headers).status_code == status, headers
        assert browser.delete("/v1/session", headers={"Origin": closed.page}).status_code == 204
        assert browser.get("/v1/topics").status_code == 401


def test_the_first_token_closes_the_controller(tmp_path: Path) -> None:
    with (
        controller_with_page(data_path=str(tmp_path)) as (served, _),
        httpx.Client(base_url=f"http://127.0.0.1:{served.http}", trust_env=False) as api,
    ):
        assert api.get("/v1/topics").status_code == 200
        refused = api.post("/v1/tokens", json={"name": "ops", "role": "operator"})
        assert (refused.status_code, "role admin" in refused.text) == (409, True)
        root = api.post("/v1/tokens", json={"name": "root", "role": "admin", "expires_s": 3600}).json()
        assert root["secret"].startswith(f"srtm_{root['id']}_")
        assert api.get("/v1/topics").status_code == 401
        assert api.get("/v1/health").json() == {"brokers_alive": 0}
        api.headers["Authorization"] = f"Bearer {root['secret']}"
        (listed,) = api.get("/v1/tokens").json()["tokens"]
        assert (listed["name"], listed["role"], listed["expired"]) == ("root", "admin", False)
        assert "secret" not in listed
        assert api.delete("/v1/tokens/root").status_code == 204
        del api.headers["Authorization"]
        assert api.get("/v1/topics").status_code == 200  # as before the first one


def test_a_token_of_the_option_remains_enough_and_reading_free() -> None:
    with (
        controller_with_page(token="s3cret") as (served, _),
        httpx.Client(base_url=f"http://127.0.0.1:{served.http}", trust_env=False) as api,
    ):
        assert api.get("/v1/topics").status_code == 200
        assert api.put("/v1/topics/t", json={"r": 1, "b": 1}).status_code == 401
        shown = {"Authorization": "Bearer s3cret"}
        assert api.put("/v1/topics/t", json={"r": 1, "b": 1}, headers=shown).status_code == 200
        entries = api.get("/v1/audit").json()["entries"]
        assert [each["who"] for each in entries] == ["(SRTM_TOKEN)@127.0.0.1"]


def test_a_controller_that_nobody_could_use_does_not_start() -> None:
    with pytest.raises(ControlError, match="start with SRTM_TOKEN"), controller_with_page(auth_required=True):
        pytest.fail("it must not serve")


@pytest.mark.parametrize(
    ("options", "warned"),
    [({}, False), ({"host": "0.0.0.0"}, True), ({"host": "0.0.0.0", "token": "s3cret"}, False)],
)
def test_a_controller_that_everybody_can_use_says_so(
    options: dict[str, str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with controller_with_page(**options, broadcast_address="127.0.0.1"):
        assert any("may do everything" in record.getMessage() for record in caplog.records) is warned
