"""Engines that want TLS and logins: real servers with certificates of the test's own authority."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from srtm.client.nats import Listener, NatsConnection
from srtm.errors import ClientError, InputError
from srtm.protocol import client as say
from srtm.protocol.engine import parse
from tests.broker.authority import ALL, Authority, answer
from tests.broker.conftest import Start
from tests.broker.running import Client, Running
from tests.broker.test_transport import Certificates
from tests.engines import Load, NatsCluster, NatsServer, Nsqd, bodies, engine_of, free_port, probed, stored, until

trustme = pytest.importorskip("trustme", reason="pip install trustme makes certificates for tests")
needs_nsqd, needs_nats = pytest.mark.needs("nsqd"), pytest.mark.needs("nats-server")
both = pytest.mark.parametrize("kind", [pytest.param("nsqd", marks=needs_nsqd), pytest.param("nats", marks=needs_nats)])


class Files(Certificates):
    """Certificates that can be named in an address."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self.stranger_ca = str(folder / "stranger-ca.pem")
        trustme.CA().cert_pem.write_to_path(self.stranger_ca)
        self.client_cert = self.file("client.pem", self.client.private_key_and_cert_chain_pem.bytes())
        self.stranger_cert = self.file("stranger.pem", self.stranger.private_key_and_cert_chain_pem.bytes())

    def file(self, name: str, content: bytes) -> str:
        path = self.folder / name
        path.write_bytes(content)
        return str(path)

    def issue(self, *names: str) -> tuple[str, str]:
        """A certificate for these names, and its key."""
        made = self._ca.issue_cert(*names)
        return (
            self.file(f"{names[0]}.pem", made.cert_chain_pems[0].bytes()),
            self.file(f"{names[0]}.key", made.private_key_pem.bytes()),
        )


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def secured(kind: str, files: Files, *more: str, cert: str = "", key: str = "", verify: bool = False) -> Any:
    """A server that wants TLS, not started yet."""
    cert, key = cert or files.cert, key or files.key
    if kind == "nats":
        flags = ["--tls", f"--tlscert={cert}", f"--tlskey={key}", f"--tlscacert={files.ca}"]
        return NatsServer(files.folder, "n0", *flags, *(["--tlsverify"] if verify else []), *more)
    flags = [f"--tls-cert={cert}", f"--tls-key={key}", "--tls-required=tcp-https"]
    flags.append(f"--https-address=127.0.0.1:{free_port()}")
    flags += [f"--tls-root-ca-file={files.ca}", "--tls-client-auth-policy=require-verify"] if verify else []
    return Nsqd(files.folder, *flags, *more)


def address(server: Any, options: str = "", login: str = "", host: str = "127.0.0.1") -> str:
    kind = "nats" if isinstance(server, NatsServer) else "nsqd"
    return f"{kind}+tls://{login}{host}:{server.port}{options}"


def problem_of(broker: Running) -> str:
    found = broker.get("/stats?format=json")["srtm"]["engine"]
    return str(found["last_error"] or "") if found["state"] == "away" else ""


def says(broker: Running, *words: str) -> str:
    """The problem of an engine, once it has these words."""

    def found() -> str:
        told = problem_of(broker)
        return told if all(word in told for word in words) else ""

    try:
        return str(until(found))
    except AssertionError:
        raise AssertionError(f"{problem_of(broker)!r} does not say {words}") from None


@both
def test_messages_are_with_the_engine_when_they_are_answered(kind: str, files: Files, start: Start) -> None:
    with secured(kind, files) as server:
        broker = start(engine=address(server, f"?ca={files.ca}"))
        sent = [b"%d" % number for number in range(20)] + [bytes([number]) * 200_000 for number in range(40)]
        with Client(broker.address) as client:
            client.publish("a.b", *sent)
        assert engine_of(broker, "a.b")["state"] == "open"
        assert bodies(server, "a.b", len(sent), files.context()) == sent
        assert broker.get("/stats?format=json")["srtm"]["engine"]["address"] == address(server)


@needs_nats
def test_a_server_that_wants_tls_before_anything_is_said(files: Files, start: Start) -> None:
    configuration = files.folder / "first.conf"
    pair = f'cert_file: "{files.cert}", key_file: "{files.key}"'
    configuration.write_text(f"tls {{ {pair}, handshake_first: true }}")
    with NatsServer(files.folder, "n0", "-c", str(configuration)) as server:
        place = address(server, f"?ca={files.ca}&handshake_first=true")
        broker = start(engine=place)
        with Client(broker.address) as client:
            client.publish("t", b"x")
            assert engine_of(broker, "t")["state"] == "open"
            assert probed(broker, client)["problem"] is None
        told = broker.get("/stats?format=json")["srtm"]["engine"]["address"]
        assert told == address(server, "?handshake_first=true")  # subscribers must know, too

        async def greeted(place: str) -> str:
            engine = parse(place)
            assert engine is not None
            connection = await NatsConnection.open(engine, cast("Listener", None))
            connection.close()
            return connection.place

        assert asyncio.run(greeted(place)) == f"127.0.0.1:{server.port}"
        late = start(engine=address(server, f"?ca={files.ca}"))
        says(
            late, "it closed the connection; if its tls {} has handshake_first, add handshake_first=true to the address"
        )
        with pytest.raises(ClientError, match="add handshake_first=true to the address"):
            asyncio.run(greeted(address(server, f"?ca={files.ca}")))


@needs_nats
def test_tls_before_anything_is_said_to_a_server_that_speaks_first(files: Files, start: Start) -> None:
    with secured("nats", files) as server:
        place = address(server, f"?ca={files.ca}&handshake_first=true")
        says(start(engine=place), "the server answers in plain text: leave out handshake_first")


@both
def test_a_server_is_killed_under_load(kind: str, files: Files, start: Start) -> None:
    with secured(kind, files) as server:
        broker = start(engine=address(server, f"?ca={files.ca}"))
        with Load(broker.address, "t") as load:
            for _ in range(2):
                load.flows()
                server.kill()
                time.sleep(0.3)
                server.start()
            load.flows()
        got = Counter(bodies(server, "t", len(load.acknowledged), files.context()))
        assert load.acknowledged.keys() <= got.keys()
        assert kind == "nsqd" or max(got.values()) == 1


@both
def test_a_server_that_nobody_vouches_for_gets_nothing_until_somebody_does(
    kind: str, files: Files, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    ca = files.file("trusted.pem", Path(files.stranger_ca).read_bytes())
    with secured(kind, files) as server:
        broker = start(engine=address(server, f"?ca={ca}", "secret@"))
        with Client(broker.address) as client:
            client.send(say.pub("t", b"1"))
            told = says(broker, "invalid server certificate: unable to get local issuer certificate; name the CA")
            assert engine_of(broker, "t")["reason"] == f"the engine is unavailable: {told}"
            assert broker.do(lambda: broker.broker.engine.absence) == f"the engine is unavailable: {told}"  # type: ignore[union-attr]
            assert client.silent(0.5)
            said = [record.getMessage() for record in caplog.records if "ENGINE" in record.getMessage()]
            assert said == [f"ENGINE({address(server)}): lost 127.0.0.1:{server.port}: {told}"]
            files.file("trusted.pem", Path(files.ca).read_bytes())  # files are read for every connection
            assert client.response() == b"OK"
        assert bodies(server, "t", 1, files.context()) == [b"1"]
    assert "secret" not in caplog.text


@both
def test_a_certificate_of_another_server(kind: str, files: Files, start: Start) -> None:
    cert, key = files.issue("example.org")
    with secured(kind, files, cert=cert, key=key) as server:
        broker = start(engine=address(server, f"?ca={files.ca}"))
        says(broker, "invalid server certificate: IP address mismatch", "use a host name that the certificate contains")


@both
def test_the_systems_authorities_are_asked_unless_others_are_named(kind: str, files: Files, start: Start) -> None:
    with secured(kind, files) as server:
        says(start(engine=address(server)), "invalid server certificate")


@both
def test_both_sides_show_certificates(kind: str, files: Files, start: Start) -> None:
    with secured(kind, files, verify=True) as server:
        says(start(engine=address(server, f"?ca={files.ca}")), "certificate", "options cert and key of the address")
        refused = start(engine=address(server, f"?ca={files.ca}&cert={files.stranger_cert}"))
        says(refused, "the server rejects or requires a client certificate: set options cert and key of the address")
        broker = start(engine=address(server, f"?ca={files.ca}&cert={files.client_cert}"))
        with Client(broker.address) as client:
            client.publish("t", b"1")
        assert bodies(server, "t", 1, files.context(files.client)) == [b"1"]


@both
def test_a_server_that_wants_tls_and_is_asked_for_none(kind: str, files: Files, start: Start) -> None:
    with secured(kind, files) as server:
        broker = start(engine=f"{kind}://127.0.0.1:{server.port}")
        with Client(broker.address) as client:
            client.send(say.pub("t", b"1"))
            assert says(broker, "the server requires TLS") == f"the server requires TLS: write {kind}+tls://"
            assert not broker.do(lambda: broker.broker.engine.acknowledged)  # type: ignore[union-attr]
            assert client.silent(0.2)


@both
def test_a_server_without_tls_is_not_spoken_to_in_the_clear(kind: str, files: Files, start: Start) -> None:
    server = NatsServer(files.folder) if kind == "nats" else Nsqd(files.folder)
    with server:
        broker = start(engine=address(server, f"?ca={files.ca}"))
        says(broker, "the server offers no TLS", f"or write {kind}://")


@both
def test_a_probe_through_tls(kind: str, files: Files, start: Start, authority: Authority) -> None:
    more = ["--user", "me", "--pass", "pass"] if kind == "nats" else [f"--auth-http-address={authority.address}"]
    with secured(kind, files, *more) as server:
        broker = start(engine=address(server, f"?ca={files.ca}", "me:pass@"))
        with Client(broker.address) as client:
            client.publish("t", b"before")
            assert probed(broker, client)["problem"] is None
        assert broker.post("/srtm/probe?topic=t&on=false")[0] == 200


@contextmanager
def pretender(first: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Somebody who says the first words of a server and nothing more; with what is said to him on each connection."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                with sock:
                    sock.settimeout(5)
                    at = len(heard)
                    heard.append(b"")
                    sock.sendall(first)
                    try:
                        while data := sock.recv(65536):
                            heard[at] += data
                    except OSError:
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1], heard
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_nothing_is_said_or_understood_in_the_clear(files: Files, start: Start) -> None:
    """Who sits in between says that all is well, and never begins TLS: the loop goes on, and he learns nothing."""
    info = b'INFO {"tls_required":true,"max_payload":1000000,"connect_urls":["evil.example:1"]}\r\nPONG\r\n'
    with pretender(info) as (port, heard):
        broker = start(engine=f"nats+tls://me:password@127.0.0.1:{port}?ca={files.ca}")
        until(lambda: heard and heard[0])
        with Client(broker.address) as client:
            client.send(say.pub("t", b"body"))
            says(broker, "the engine is silent")
            assert client.silent(0.1)
        assert all(each.startswith(b"\x16\x03") for each in heard if each)
        assert not any(word in each for each in heard for word in (b"password", b"CONNECT", b"body", b"PING"))
        assert broker.do(lambda: list(broker.broker.engine.link.servers)) == [("127.0.0.1", port)]  # type: ignore[union-attr]


@needs_nats
def test_servers_that_are_learned_bear_the_name_of_the_one_that_was_given(files: Files, start: Start) -> None:
    cert, key = files.issue("localhost")
    flags = ("--tls", f"--tlscert={cert}", f"--tlskey={key}")
    with NatsCluster(files.folder, *flags) as cluster:
        broker = start(engine=f"tls://localhost:{cluster.servers[0].port}?ca={files.ca}&replicas=3")
        with Load(broker.address, "t") as load:
            load.flows()
            broker.wait_until(lambda each: len(each.engine.link.servers) >= 3)  # type: ignore[union-attr]
            cluster.servers[0].kill()
            load.flows()
        rows = asyncio.run(stored(f"tls://localhost:{cluster.servers[1].port}", "t", tls=files.context()))
    got = Counter(body for _, body in rows)
    assert load.acknowledged.keys() <= got.keys()
    assert max(got.values()) == 1


@needs_nsqd
def test_nsqd_is_shown_a_secret(tmp_path: Path, start: Start, authority: Authority) -> None:
    authority.judge = lambda asked: answer(ALL) if asked["secret"] == "s@e:cret" else None
    with Nsqd(tmp_path, f"--auth-http-address={authority.address}") as server:
        missing = start(engine=server.url)
        assert (
            says(missing, "AUTH")
            == "the server requires AUTH: put its secret into the address, as in nsqd://secret@host"
        )
        wrong = says(
            start(engine=f"nsqd://wrong@127.0.0.1:{server.port}"), "the server refuses the secret of the address"
        )
        assert "wrong" not in wrong
        broker = start(engine=f"nsqd://s%40e:cret@127.0.0.1:{server.port}")
        with Client(broker.address) as client:
            client.publish("t", b"1", b"2")
        assert bodies(server, "t", 2, secret=b"s@e:cret") == [b"1", b"2"]


@needs_nsqd
def test_a_secret_is_for_those_who_want_one(tmp_path: Path, start: Start) -> None:
    with Nsqd(tmp_path) as server:
        broker = start(engine=f"nsqd://secret@127.0.0.1:{server.port}")
        with Client(broker.address) as client:
            client.publish("t", b"1")


@needs_nsqd
def test_a_topic_that_is_forbidden_does_not_stop_others(tmp_path: Path, start: Start, authority: Authority) -> None:
    authority.judge = lambda _: answer({**ALL, "topic": "^free$"}, ttl=1)
    with Nsqd(tmp_path, f"--auth-http-address={authority.address}") as server:
        broker = start(engine=f"nsqd://secret@127.0.0.1:{server.port}")
        with Client(broker.address) as client, Client(broker.address) as other:
            client.send(say.pub("barred", b"1"))
            until(lambda: "E_UNAUTHORIZED" in str(engine_of(broker, "barred")["reason"]))
            other.publish("free", *(b"%d" % number for number in range(50)))
            authority.judge = lambda _: answer(ALL, ttl=1)
            assert client.response() == b"OK"


@both
def test_files_that_cannot_be_used(kind: str, files: Files, start: Start) -> None:
    for options, problem in (
        ("ca=/nowhere.pem", "option ca of the engine, /nowhere.pem: No such file"),
        (f"ca={files.key}", f"cannot use the certificates in {files.key}"),
        (f"cert={files.ca}", f"cannot use the certificates in {files.ca}"),
        (f"key={files.key}", "give cert, too"),
        (f"cert={files.cert}&key={files.folder}", f"option key of the engine, {files.folder}: Is a directory"),
    ):
        with pytest.raises(InputError, match=problem):
            start(engine=f"{kind}+tls://127.0.0.1:1?{options}")


class Keys:
    """Operator, account and user of NATS, with what they sign."""

    def __init__(self, kind: int) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key = Ed25519PrivateKey.generate()
        self.name = _coded(bytes([kind]) + self._key.public_key().public_bytes_raw())
        self.seed = _coded(bytes([18 << 3 | kind >> 5, (kind & 31) << 3]) + self._key.private_bytes_raw())

    def signed(self, subject: str, name: str, told: dict[str, Any]) -> str:
        """A JWT as NATS has them."""
        claims = {"jti": name, "iat": int(time.time()), "iss": self.name, "name": name, "sub": subject, "nats": told}
        text = ".".join(_url(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, claims))
        return f"{text}.{_url(self._key.sign(text.encode()))}"


def _coded(raw: bytes) -> str:
    return base64.b32encode(raw + binascii.crc_hqx(raw, 0).to_bytes(2, "little")).decode().rstrip("=")


def _url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def credentials(folder: Path) -> tuple[str, Callable[[], str]]:
    """A server's configuration whose users show JWTs, and what writes a file of credentials."""
    operator, system, account, user = Keys(14 << 3), Keys(0), Keys(0), Keys(20 << 3)
    unlimited = {"subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "conn": -1, "leaf": -1}
    disk = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1, "wildcards": True}
    told = {"type": "account", "version": 2, "limits": unlimited, "default_permissions": {}}
    vouched = {
        account.name: operator.signed(account.name, "a", {**told, "limits": {**unlimited, **disk}}),
        system.name: operator.signed(system.name, "s", told),
    }
    of_itself = operator.signed(operator.name, "o", {"type": "operator", "version": 2})
    config = folder / "operator.conf"
    preload = "\n".join(f'{name}: "{jwt}"' for name, jwt in vouched.items())
    config.write_text(
        f'operator: "{of_itself}"\nsystem_account: {system.name}\nresolver: MEMORY\nresolver_preload {{ {preload} }}\n'
    )

    def write() -> str:
        told = {"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1, "pub": {}, "sub": {}}
        parts = {"NATS USER JWT": account.signed(user.name, "u", told), "USER NKEY SEED": user.seed}
        path = folder / "user.creds"
        path.write_text(
            "".join(f"-----BEGIN {name}-----\n{text}\n------END {name}------\n\n" for name, text in parts.items())
        )
        return str(path)

    return str(config), write


@needs_nats
def test_credentials_of_nats(files: Files, start: Start) -> None:
    config, write = credentials(files.folder)
    creds = write()
    with secured("nats", files, "-c", config) as server:
        says(start(engine=address(server, f"?ca={files.ca}")), "Authorization Violation")
        broker = start(engine=address(server, f"?ca={files.ca}&creds={creds}"))
        with Client(broker.address) as client:
            client.publish("t", b"1")
            assert broker.post("/srtm/probe?topic=t")[0] == 200

            def timed() -> bool:
                client.publish("t", b"2")
                return bool(engine_of(broker, "t")["probe"]["messages"])

            until(timed)
            server.kill()
            server.start()
            client.publish("t", b"3")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file"),
        ("", "not a NATS credentials file"),
        ("-----BEGIN NATS USER JWT-----\nx\n------END", "not a NATS credentials file"),
        (
            "-----BEGIN NATS USER JWT-----\nx\n------END\n-----BEGIN USER NKEY SEED-----\nSUAA\n------END",
            "the seed is damaged",
        ),
    ],
)
def test_credentials_that_are_none(content: str | None, problem: str, tmp_path: Path, start: Start) -> None:
    path = tmp_path / "user.creds"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=f"option creds of the engine, {path}: {problem}"):
        start(engine=f"nats://127.0.0.1:1?creds={path}")
