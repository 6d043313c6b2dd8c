"""Brokers register with an identity: a certificate, a token of their own, or the shared one; others get nothing."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from srtm.control.access.access import Access
from srtm.control.access.brokers import MAX_REFUSED, Admission
from srtm.control.access.token import Role
from srtm.control.discovery.tcp import Applicant
from srtm.control.options import ControllerOptions
from srtm.control.store import Store
from srtm.net import certs
from srtm.protocol import lookup
from srtm.protocol.lookup import PeerInfo
from srtm.protocol.names import MAGIC_V1
from tests.broker.running import PATIENCE_S, running
from tests.control.running import controller, controller_with_page
from tests.programs import wait_for

NOW_NS = 1_800_000_000_000_000_000
SHARED = "shared-by-all-brokers"


def applicant(name: str, token: str = "", *names: str, address: str = "10.0.0.1:1", https_port: int = 0) -> Applicant:
    return Applicant(PeerInfo("host", name, 4150, 4151, "1.3.0", https_port), address, token, frozenset(names))


@pytest.fixture
def access(tmp_path: Path) -> Access:
    return Access(ControllerOptions(broker_token=SHARED), Store(tmp_path))


def test_an_open_controller_admits_every_broker(access: Access) -> None:
    assert Admission(ControllerOptions(), access).admit(applicant("any"), NOW_NS) is None


def test_a_closed_controller_admits_by_certificate_token_or_shared_token(access: Access) -> None:
    _, root = access.tokens.create("root", Role.ADMIN, NOW_NS)
    _, one = access.tokens.create("broker-1", Role.BROKER, NOW_NS)
    _, several = access.tokens.create("edge-*", Role.BROKER, NOW_NS)
    admission = Admission(ControllerOptions(), access)

    def why(*given: Any) -> str | None:
        return admission.admit(applicant(*given), NOW_NS)

    assert why("broker-1", one) is None
    assert why("edge-17", several) is None
    assert why("any", SHARED) is None
    assert why("broker-2", "", "broker-2", "host") is None
    assert "neither a broker token" in str(why("broker-2"))
    assert "wrong, expired or revoked" in str(why("broker-2", "guess"))
    assert "token 'broker-1' (role broker) is not of broker 'broker-2'" in str(why("broker-2", one))
    assert "token 'root' (role admin) is not of broker 'broker-2'" in str(why("broker-2", root))
    assert "its certificate is of broker-1, not of 'broker-2'" in str(why("broker-2", "", "broker-1"))
    access.tokens.remove("broker-1")
    assert "revoked" in str(why("broker-1", one))
    (first, *_) = admission.refused
    assert (first.peer.hostname, first.attempts) == ("broker-1", 1)


def test_the_list_of_refused_brokers_is_bounded_and_forgets_those_that_are_admitted(access: Access) -> None:
    access.tokens.create("root", Role.ADMIN, NOW_NS)
    admission = Admission(ControllerOptions(), access)
    for number in range(MAX_REFUSED + 50):
        admission.admit(applicant(f"b-{number}", address=f"10.0.0.1:{number + 1}"), NOW_NS + number)
    assert len(admission.refused) == MAX_REFUSED
    assert admission.refused[0].peer.hostname == "b-149"
    admission.admit(applicant("b-149", address="10.0.0.1:9"), NOW_NS + 200)
    assert admission.refused[0].attempts == 2
    admission.admit(applicant("b-149", SHARED), NOW_NS + 300)
    assert admission.refused[0].peer.hostname == "b-148"
    admission.admit(applicant("x" * 10_000), NOW_NS)
    assert len(admission.refused[0].described()["name"]) < 300


@contextmanager
def closed(folder: Path, **options: Any) -> Iterator[tuple[Any, httpx.Client]]:
    """A controller that needs credentials, and an admin's client."""
    with ExitStack() as stack:
        served = stack.enter_context(
            controller(data_path=str(folder), token="root-secret", auth_required=True, **options)
        )
        scheme, tls = "http", False
        if "tls_cert" in options:
            scheme, tls = "https", ssl.create_default_context(cafile=options["tls_root_ca_file"])  # type: ignore[assignment]
        api = httpx.Client(
            base_url=f"{scheme}://127.0.0.1:{served.http}", verify=tls, trust_env=False, timeout=PATIENCE_S
        )
        api.headers["Authorization"] = "Bearer root-secret"
        yield served, stack.enter_context(api)


def statuses(api: httpx.Client) -> dict[str, str]:
    return {each["name"]: each["status"] for each in api.get("/v1/brokers").json()["brokers"]}


def test_an_unknown_broker_is_listed_and_gets_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with closed(tmp_path) as (served, api), ExitStack() as stack:
        secret = api.post("/v1/tokens", json={"name": "one", "role": "broker"}).json()["secret"]
        at: dict[str, Any] = {"controller": f"127.0.0.1:{served.tcp}", "broadcast_address": "127.0.0.1"}
        stack.enter_context(running(**at, name="one", broker_token=secret))
        stack.enter_context(running(**at, name="two", broker_token=secret))
        stack.enter_context(running(**at, name="three"))
        wait_for(lambda: statuses(api) == {"one": "alive"} and len(api.get("/v1/brokers").json()["refused"]) == 2)
        refused = {each["name"]: each for each in api.get("/v1/brokers").json()["refused"]}
        assert "is not of broker 'two'" in refused["two"]["reason"]
        assert "neither a broker token" in refused["three"]["reason"]
        assert refused["three"]["from"].startswith("127.0.0.1:")
        assert refused["three"]["said"]["address"].startswith("127.0.0.1:")
        assert api.put("/v1/topics/t", json={"r": 100, "b": 10, "publishers": [{"id": "p"}]}).status_code == 200
        wait_for(lambda: api.get("/v1/topics/t").json()["state"] == "placed")
        assert [each["broker"] for each in api.get("/v1/topics/t").json()["brokers"]] == ["one"]
        assert [each["hostname"] for each in api.get("/nodes").json()["producers"]] == ["one"]

        from srtm.cli.app import run

        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("SRTM_TOKEN", "root-secret")
            assert run(["check", "--controller", f"http://127.0.0.1:{served.http}"]) == 1
        said = capfd.readouterr().out
        assert "broker three from 127.0.0.1:" in said
        assert "neither a broker token" in said


def test_whoever_registers_without_a_credential_is_told_why(tmp_path: Path) -> None:
    with closed(tmp_path) as (served, _), socket.create_connection(("127.0.0.1", served.tcp), PATIENCE_S) as broker:
        broker.sendall(MAGIC_V1 + lookup.identify(PeerInfo("127.0.0.1", "liar", 1, 2, "1.3.0"), "wrong"))
        said = b""
        while data := broker.recv(4096):
            said += data
        assert said[4:] == b"E_UNAUTHORIZED its token is wrong, expired or revoked"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("certificates")
    certs.make_authority(made)
    for name in ("controller", "one", "two"):
        certs.issue(made, name, ["127.0.0.1", "localhost"])
    return made


def of(folder: Path, name: str) -> dict[str, str]:
    path, key = certs.certificate(folder, name)
    authority, _ = certs.certificate(folder, certs.CA)
    return {"tls_cert": str(path), "tls_key": str(key), "tls_root_ca_file": str(authority)}


def secured(folder: Path, served: Any, name: str, **more: Any) -> Any:
    at = {"controller": f"tls://127.0.0.1:{served.tcp}", "broadcast_address": "127.0.0.1", "https_port": 0}
    return running(**{**at, **of(folder, more.pop("certificate", name)), "name": name, **more})


def test_a_cluster_by_tls_alone(folder: Path, tmp_path: Path) -> None:
    """Discovery, exchanges and the API speak TLS; a broker is known by its certificate."""
    with closed(tmp_path, **of(folder, "controller")) as (served, api), ExitStack() as stack:
        one = stack.enter_context(
            secured(folder, served, "one", tls_required=True, tls_client_auth_policy="require-verify")
        )
        stack.enter_context(secured(folder, served, "impostor", certificate="two"))
        wait_for(lambda: statuses(api) == {"one": "alive"} and api.get("/v1/brokers").json()["refused"])
        (refused,) = api.get("/v1/brokers").json()["refused"]
        assert refused["reason"] == "its certificate is of two, not of 'impostor'"
        assert api.get("/v1/brokers").json()["brokers"][0]["http"] == f"https://127.0.0.1:{one.broker.https_port}"
        assert api.get("/v1/targets").json()[0]["labels"]["__scheme__"] == "https"
        api.put("/v1/topics/t", json={"r": 100, "b": 10, "publishers": [{"id": "p"}]}).raise_for_status()
        wait_for(lambda: api.get("/v1/topics/t").json()["shares"]["in_force_ratio"] == 1)
        # By its certificate, a broker may ask for channels, and nothing else.
        context = ssl.create_default_context(cafile=of(folder, "one")["tls_root_ca_file"])
        context.load_cert_chain(of(folder, "one")["tls_cert"], of(folder, "one")["tls_key"])
        with httpx.Client(base_url=api.base_url, verify=context, trust_env=False) as broker:
            assert broker.get("/channels?topic=t").status_code == 200
            assert broker.get("/v1/topics").status_code == 403
            assert broker.get("/topics", headers={"X-Forwarded-For": "1.2.3.4"}).status_code == 200
        assert (
            httpx.get(
                f"{api.base_url}/topics",
                verify=ssl.create_default_context(cafile=of(folder, "one")["tls_root_ca_file"]),
                trust_env=False,
            ).status_code
            == 401
        )


def test_a_controller_with_a_ca_speaks_no_plain_http_to_brokers(folder: Path) -> None:
    with controller(**of(folder, "controller")) as served:
        tls = ssl.create_default_context(cafile=of(folder, "one")["tls_root_ca_file"])
        api = httpx.Client(base_url=f"https://127.0.0.1:{served.http}", verify=tls, trust_env=False)
        with api, secured(folder, served, "one", https_port=None):
            wait_for(lambda: api.get("/v1/brokers").json()["refused"])
            found = api.get("/v1/brokers").json()
            assert found["brokers"] == []
            assert "start this one with --https-port" in found["refused"][0]["reason"]


def test_a_broker_takes_exchanges_from_its_controller_alone(folder: Path, tmp_path: Path) -> None:
    with closed(tmp_path, **of(folder, "controller")) as (served, api), secured(folder, served, "one") as one:
        wait_for(lambda: statuses(api) == {"one": "alive"})
        https = f"https://127.0.0.1:{one.broker.https_port}/srtm/exchange"

        def status(url: str, name: str | None) -> int:
            context = ssl.create_default_context(cafile=of(folder, "one")["tls_root_ca_file"])
            if name is not None:
                context.load_cert_chain(of(folder, name)["tls_cert"], of(folder, name)["tls_key"])
            return httpx.post(url, content=b"{}", verify=context, trust_env=False).status_code

        assert status(f"{one.url}/srtm/exchange", None) == 401  # in plain text
        assert status(https, None) == 401
        assert status(https, "two") == 401  # of the same authority
        assert status(https, "controller") == 400  # who may ask, and asks nonsense


@pytest.mark.parametrize("port", ["tcp", "http"])
def test_ports_with_tls_answer_nothing_in_plain(folder: Path, port: str) -> None:
    with controller(**of(folder, "controller")) as served:
        with socket.create_connection(("127.0.0.1", getattr(served, port)), PATIENCE_S) as plain:
            plain.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"OK" not in plain.recv(100)
        with (
            pytest.raises(ssl.SSLCertVerificationError),
            socket.create_connection(("127.0.0.1", getattr(served, port)), PATIENCE_S) as raw,
        ):
            ssl.create_default_context().wrap_socket(raw, server_hostname="127.0.0.1")


def test_a_controller_may_require_client_certificates(folder: Path) -> None:
    with controller_with_page(**of(folder, "controller"), tls_client_auth_policy="require-verify") as (served, page):
        context = ssl.create_default_context(cafile=of(folder, "one")["tls_root_ca_file"])
        for url in (f"https://127.0.0.1:{served.http}/ping", page.replace("http:", "https:")):
            with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                httpx.get(url, verify=context, trust_env=False)
        context.load_cert_chain(of(folder, "one")["tls_cert"], of(folder, "one")["tls_key"])
        for url in (f"https://127.0.0.1:{served.http}/ping", page.replace("http:", "https:")):
            assert httpx.get(url, verify=context, trust_env=False).status_code == 200


def test_the_session_cookie_is_for_tls_alone(folder: Path) -> None:
    with controller_with_page(**of(folder, "controller"), token="s3cret") as (_, page):
        url = page.replace("http:", "https:").rstrip("/")
        tls = ssl.create_default_context(cafile=of(folder, "one")["tls_root_ca_file"])
        with httpx.Client(base_url=url, verify=tls, trust_env=False) as browser:
            answer = browser.post("/v1/session", json={"token": "s3cret"}, headers={"Origin": url})
            assert answer.headers["set-cookie"].endswith("; HttpOnly; SameSite=Strict; Secure")
            assert browser.get("/v1/session").json()["role"] == "admin"


def test_renewed_certificates_of_a_running_cluster(folder: Path, tmp_path: Path) -> None:
    """Controller and broker go on with certificates of another authority, without a restart."""
    live, other = tmp_path / "live", tmp_path / "other"
    live.mkdir()
    certs.make_authority(other)
    for name in ("controller", "one"):
        certs.issue(other, name, ["127.0.0.1", "localhost"])

    def install(source: Path) -> None:
        for path in source.iterdir():
            (live / path.name).write_bytes(path.read_bytes())

    install(folder)
    with closed(tmp_path / "store", **of(live, "controller")) as (served, api), secured(live, served, "one") as broker:
        wait_for(lambda: statuses(api) == {"one": "alive"})
        install(other)
        tls = ssl.create_default_context(cafile=str(certs.certificate(other, certs.CA)[0]))
        renewed = httpx.Client(base_url=api.base_url, headers=api.headers, verify=tls, trust_env=False)
        with renewed, socket.create_connection(("127.0.0.1", broker.broker.https_port), PATIENCE_S) as raw:
            with tls.wrap_socket(raw, server_hostname="127.0.0.1") as there:
                assert there.version()
            before = renewed.get("/v1/brokers").json()["brokers"][0]["oddities"]
            renewed.put("/v1/topics/t", json={"r": 100, "b": 10, "publishers": [{"id": "p"}]}).raise_for_status()
            wait_for(lambda: renewed.get("/v1/topics/t").json()["shares"]["in_force_ratio"] == 1)
            assert statuses(renewed) == {"one": "alive"}
            assert renewed.get("/v1/brokers").json()["brokers"][0]["oddities"] == before
