"""The small authority: its certificates serve TLS both ways, its keys are private, and it overwrites nothing."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from srtm.errors import InputError
from srtm.net import certs
from srtm.net.tls import client_context, names_in, server_context


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("authority")
    certs.make_authority(made)
    certs.issue(made, "broker-1", ["localhost", "127.0.0.1"])
    return made


def paths(folder: Path, name: str) -> tuple[str, str]:
    path, key = certs.certificate(folder, name)
    return str(path), str(key)


def served(context: ssl.SSLContext, client: ssl.SSLContext, host: str = "127.0.0.1") -> tuple[Any, Any]:
    """One handshake on real sockets: what the server and the client saw of each other's certificate."""
    found: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            raw, _ = listener.accept()
            try:
                with context.wrap_socket(raw, server_side=True) as secured:
                    found.append(secured.getpeercert())
                    secured.sendall(b"x")
            except (ssl.SSLError, OSError) as problem:
                raw.close()
                found.append(problem)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname(), 10) as raw,
                client.wrap_socket(raw, server_hostname=host) as secured,
            ):
                assert secured.recv(1) == b"x"  # a server refuses a client's certificate after its handshake
                mine = secured.getpeercert()
        finally:
            thread.join(10)
    return found[0], mine


def server(folder: Path, name: str = "broker-1", **more: Any) -> ssl.SSLContext:
    ca = str(certs.certificate(folder, certs.CA)[0])
    return server_context(*paths(folder, name), ca, min_version="tls1.2", **{"client_certificates": False, **more})


def client(folder: Path, name: str | None = None) -> ssl.SSLContext:
    ca = str(certs.certificate(folder, certs.CA)[0])
    return client_context(ca, *(paths(folder, name) if name else (None, None)))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "broker-1"])
def test_certificates_serve_both_ways(folder: Path, host: str) -> None:
    theirs, mine = served(server(folder, client_certificates=True), client(folder, "broker-1"), host)
    assert names_in(theirs) == names_in(mine) == {"broker-1"}


def test_without_a_common_name_the_hosts_count() -> None:
    hosts = (("DNS", "a.example"), ("IP Address", "127.0.0.1"), ("DNS", "b.example"))
    assert names_in({"subjectAltName": hosts}) == {"a.example", "b.example"}
    assert names_in(None) == names_in({}) == frozenset()


def test_a_certificate_may_be_offered(folder: Path) -> None:
    context = server(folder, offered=True)
    assert names_in(served(context, client(folder))[0]) == frozenset()
    assert "broker-1" in names_in(served(context, client(folder, "broker-1"))[0])


def test_a_client_without_a_certificate_is_refused(folder: Path) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        served(server(folder, client_certificates=True), client(folder))


def test_strangers_and_other_hosts_are_refused(folder: Path, tmp_path: Path) -> None:
    certs.make_authority(tmp_path)
    certs.issue(tmp_path, "broker-1", ["127.0.0.1"])
    with pytest.raises(ssl.SSLError):
        served(server(folder), client(tmp_path))
    with pytest.raises(ssl.SSLError):
        served(server(folder), client(folder), "elsewhere.example")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        served(server(folder, client_certificates=True), _mixed(folder, tmp_path))


def _mixed(folder: Path, other: Path, name: str = "broker-1") -> ssl.SSLContext:
    """Trusts the first authority, and shows a certificate of the other."""
    return client_context(str(certs.certificate(folder, certs.CA)[0]), *paths(other, name))


def test_old_versions_of_tls_are_refused(folder: Path) -> None:
    old = client(folder)
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        served(server(folder), old)


def test_keys_are_private_and_nothing_is_overwritten(folder: Path) -> None:
    for name in (certs.CA, "broker-1"):
        assert stat.S_IMODE(certs.certificate(folder, name)[1].stat().st_mode) == 0o600
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InputError, match=r"ca\.pem exists"):
        certs.make_authority(folder)
    with pytest.raises(InputError, match=r"broker-1\.pem exists"):
        certs.issue(folder, "broker-1", [])
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["", "ca", "../x", "a b", "-a", "x" * 70])
def test_names_that_no_certificate_has(folder: Path, name: str) -> None:
    with pytest.raises(InputError, match="invalid name"):
        certs.issue(folder, name, [])


def test_without_an_authority_the_remedy_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="srtm certs init"):
        certs.issue(tmp_path, "a", [])
    certs.make_authority(tmp_path)
    with pytest.raises(InputError, match="invalid host 'a b'"):
        certs.issue(tmp_path, "a", ["a b"])


def replaced(folder: Path, name: str, hosts: list[str]) -> None:
    """A new certificate in place of the old one, as an operator renews it."""
    for path in certs.certificate(folder, name):
        path.unlink()
    certs.issue(folder, name, hosts)


def test_a_server_takes_up_renewed_certificates(tmp_path: Path) -> None:
    certs.make_authority(tmp_path)
    certs.issue(tmp_path, "s", ["127.0.0.1"])
    context = server(tmp_path, "s")
    first = served(context, client(tmp_path))[1]["serialNumber"]
    assert served(context, client(tmp_path))[1]["serialNumber"] == first
    replaced(tmp_path, "s", ["127.0.0.1", "more.example"])
    second = served(context, client(tmp_path))[1]
    assert second["serialNumber"] != first
    assert ("DNS", "more.example") in second["subjectAltName"]


def test_a_server_takes_up_another_authority(tmp_path: Path) -> None:
    """Also for verifying clients: those of the old authority are refused from then on."""
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        certs.make_authority(folder)
        certs.issue(folder, "s", ["127.0.0.1"])
    live = tmp_path / "live"
    live.mkdir()

    def install(folder: Path) -> None:
        for path in folder.iterdir():
            (live / path.name).write_bytes(path.read_bytes())

    install(old)
    context = server(live, "s", client_certificates=True)
    served(context, client(old, "s"))
    install(new)
    served(context, client(new, "s"))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        served(context, _mixed(new, old, "s"))


def test_unusable_files_leave_the_old_certificate_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    certs.make_authority(tmp_path)
    certs.issue(tmp_path, "s", ["127.0.0.1"])
    context = server(tmp_path, "s")
    first = served(context, client(tmp_path))[1]["serialNumber"]
    path, key = certs.certificate(tmp_path, "s")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    for _ in range(3):
        assert served(context, client(tmp_path))[1]["serialNumber"] == first
    assert sum("the old certificates stay in use" in record.getMessage() for record in caplog.records) == 1
    key.unlink()
    assert served(context, client(tmp_path))[1]["serialNumber"] == first
    path.unlink()
    certs.issue(tmp_path, "s", ["127.0.0.1"])
    assert served(context, client(tmp_path))[1]["serialNumber"] != first
