"""TLS, deflate and snappy, alone and together: both directions, cut anywhere, broken, too slow, too big."""

from __future__ import annotations

import json
import socket
import ssl
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from srtm.errors import BrokerError
from srtm.net import compression
from srtm.protocol import client as say
from srtm.protocol.names import MAGIC_V2
from tests.broker.conftest import Start
from tests.broker.running import Client, Running

trustme = pytest.importorskip("trustme", reason="pip install trustme makes certificates for tests")
pytestmark = pytest.mark.memory
needs_snappy = pytest.mark.skipif(not compression.HAS_SNAPPY, reason="pip install cramjam")


class Certificates:
    """An authority, the broker's certificate, a client's, and one that nobody vouches for."""

    def __init__(self, folder: Path) -> None:
        self._ca, stranger = trustme.CA(), trustme.CA()
        self.ca = str(folder / "ca.pem")
        self._ca.cert_pem.write_to_path(self.ca)
        self.options: dict[str, Any] = self.issued("localhost", folder, "127.0.0.1")
        self.cert, self.key = self.options["tls_cert"], self.options["tls_key"]
        self.client = self._ca.issue_cert("sensor@example.org", common_name="sensor-1")
        self.stranger = stranger.issue_cert("stranger@example.org")

    def issued(self, host: str, folder: Path, *more: str) -> dict[str, Any]:
        """Options of a broker with a certificate for these hosts."""
        cert, key = folder / "cert.pem", folder / "key.pem"
        server = self._ca.issue_cert(host, *more)
        server.cert_chain_pems[0].write_to_path(str(cert))
        server.private_key_pem.write_to_path(str(key))
        return {"tls_cert": str(cert), "tls_key": str(key)}

    def context(self, certificate: Any = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca)
        if certificate:
            certificate.configure_cert(context)
        return context


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def upgraded(broker: Running, certificates: Certificates, layers: str, **identity: Any) -> Client:
    tls, deflate, snappy = "tls" in layers, "deflate" in layers, "snappy" in layers
    client = Client(broker.address, tls_v1=tls, deflate=deflate, snappy=snappy, **identity)
    assert (client.settled["tls_v1"], client.settled["deflate"], client.settled["snappy"]) == (tls, deflate, snappy)
    if tls:
        client.begin_tls(certificates.context())
    if deflate:
        client.begin_deflate()
    if snappy:
        client.begin_snappy()
    return client


@pytest.mark.parametrize(
    "layers",
    [
        "tls",
        "deflate",
        "tls deflate",
        pytest.param("snappy", marks=needs_snappy),
        pytest.param("tls snappy", marks=needs_snappy),
    ],
)
def test_messages_go_both_ways(layers: str, start_on_sockets: Start, certificates: Certificates) -> None:
    broker = start_on_sockets(**certificates.options)
    broker.wait_for_stamps()
    bodies = [b"x", b"y" * 100_000, bytes(range(256)) * 4000, *(b"%d" % i for i in range(500))]
    with upgraded(broker, certificates, layers) as publisher, upgraded(broker, certificates, layers) as subscriber:
        subscriber.subscribe("t", "c", ready=2500)
        publisher.publish("t", *bodies)
        for body in bodies:
            message = subscriber.message()
            assert message.body == body
            subscriber.send(say.fin(message.id))
    broker.wait_until(lambda b: b.topics["t"].channels["c"].finished == len(bodies))
    assert broker.do(lambda: broker.broker.clients.buffers.unstamped) == 0, (
        "arrival times are the kernel's under TLS, too"
    )


@pytest.mark.parametrize(
    "layers",
    [
        "tls",
        "deflate",
        "tls deflate",
        pytest.param("snappy", marks=needs_snappy),
        pytest.param("tls snappy", marks=needs_snappy),
    ],
)
def test_stamps_of_single_messages_pass_through_the_layers(
    layers: str, start: Start, certificates: Certificates
) -> None:
    """Forty messages come while the loop stands still, one a millisecond, as the bucket allows."""
    broker = start(**certificates.options)
    broker.post("/topic/limit?topic=t&r=1000&b=5")
    with upgraded(broker, certificates, layers) as client:
        for _ in range(100):
            broker.sleep(0.001)
            client.send(say.pub("t", b"x"))
        with broker.stalled():
            for _ in range(40):
                broker.sleep(0.001)
                client.send(say.pub("t", b"x"))
        for _ in range(140):
            assert client.response() == b"OK"
    broker.wait_until(lambda b: sum(second.messages for second in b.statistics().topics[0].seconds) == 140)
    seconds = broker.do(lambda: broker.broker.statistics().topics[0].seconds)
    assert max(second.access.p99 for second in seconds if second.access) == 0


@pytest.mark.parametrize("layers", ["tls", "deflate", "tls deflate"])
def test_what_comes_with_identify_is_read_through_the_layers(
    layers: str, start_on_sockets: Start, certificates: Certificates
) -> None:
    """A client need not wait for answers: the first encoded bytes may come in the read that holds IDENTIFY."""
    broker = start_on_sockets(**certificates.options)
    deflate = zlib.compressobj(wbits=-15)
    sent = say.pub("t", b"early")
    if "deflate" in layers:
        sent = deflate.compress(sent) + deflate.flush(zlib.Z_SYNC_FLUSH)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = certificates.context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    if "tls" in layers:
        with pytest.raises(ssl.SSLWantReadError):
            session.do_handshake()
        sent = outgoing.read()
    asked = {"feature_negotiation": True, "tls_v1": "tls" in layers, "deflate": "deflate" in layers}
    with socket.create_connection(broker.address, timeout=10) as sock:
        sock.sendall(MAGIC_V2 + say.identify(asked) + sent)
        if "tls" not in layers:
            broker.wait_until(lambda b: b.topics["t"].messages == 1)
            return
        with sock.makefile("rb") as reader:  # the answer is in the clear, and all that follows is TLS
            settled = json.loads(reader.read(int.from_bytes(reader.read(4), "big"))[4:])
            assert settled["tls_v1"]
            incoming.write(reader.read1(65536))
        session.do_handshake()


def test_a_slow_byte_at_a_time(start: Start, certificates: Certificates) -> None:
    broker = start(**certificates.options)
    with upgraded(broker, certificates, "deflate") as client:
        for byte in client.encoded(say.pub("t", b"body") + say.pub("t", b"body2")):
            client.sock.sendall(bytes([byte]))
        assert [client.response(), client.response()] == [b"OK", b"OK"]


def test_a_subscriber_under_tls_that_does_not_read_is_sent_no_more(start: Start, certificates: Certificates) -> None:
    broker = start(**certificates.options, max_unsent_bytes=100_000)
    with Client(broker.address) as publisher, upgraded(broker, certificates, "tls") as subscriber:
        subscriber.subscribe("t", "c", ready=2500)
        bodies = [b"%04d" % i + b"x" * 10_000 for i in range(1500)]
        publisher.publish("t", *bodies)
        broker.wait_until(lambda b: b.topics["t"].messages == len(bodies))
        client = broker.do(lambda: next(c for c in broker.broker.clients.connections.values() if c.subscription))
        assert client.subscription is not None
        assert len(client.subscription.flights) < len(bodies)
        assert len(client.connection.out) < 200_000
        for body in bodies:  # and gets all when it reads
            message = subscriber.message()
            assert message.body == body
            subscriber.send(say.fin(message.id))


def test_a_small_read_may_not_become_too_much_at_once(start: Start) -> None:
    """100 MB of zeros in 100 kB: taken in pieces, until the topic is full; then the publisher waits."""
    broker = start(max_held_messages=20)
    with Client(broker.address, deflate=True) as client:
        client.begin_deflate()
        client.send(*(say.pub("t", b"\0" * 1_000_000) for _ in range(100)))
        broker.wait_until(lambda b: b.topics["t"].messages >= 20)
        time.sleep(0.3)
        assert broker.do(lambda: broker.broker.topics["t"].messages) < 25
        with Client(broker.address) as subscriber:
            subscriber.subscribe("t", "c", ready=10)
            for _ in range(100):
                subscriber.send(say.fin(subscriber.message().id))
        for _ in range(100):
            assert client.response() == b"OK"


@pytest.mark.parametrize("layers", ["tls", "deflate", pytest.param("snappy", marks=needs_snappy)])
def test_nonsense_ends_one_connection_alone(layers: str, start: Start, certificates: Certificates) -> None:
    broker = start(**certificates.options)
    with (
        Client(broker.address) as other,
        Client(broker.address, **{f"{layers}_v1" if layers == "tls" else layers: True}) as client,
    ):
        client.sock.sendall(b"\xff" * 200)
        broker.wait_until(lambda b: len(b.clients.connections) == 1)
        other.publish("t", b"x")


def test_a_handshake_that_does_not_come_ends_its_connection(
    start: Start, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("srtm.broker.clients.connection.HANDSHAKE_S", 0.2)
    broker = start(**certificates.options)
    with Client(broker.address) as other, Client(broker.address, tls_v1=True) as client:
        assert client.ended()
        other.publish("t", b"x")
        with upgraded(broker, certificates, "tls") as prompt:
            time.sleep(0.3)
            prompt.publish("t", b"x")


def test_tls_can_be_required(start: Start, certificates: Certificates) -> None:
    broker = start(**certificates.options, tls_required=True)
    with Client(broker.address) as client:
        client.send(say.pub("t", b"x"))
        assert client.error() == b"E_INVALID cannot PUB in current state (TLS required)"
        assert client.ended()
    with upgraded(broker, certificates, "tls") as client:
        client.publish("t", b"x")


@pytest.mark.parametrize("policy", ["require", "require-verify"])
@pytest.mark.parametrize(("who", "welcome"), [("client", True), ("stranger", False), (None, False)])
def test_client_certificates(
    policy: str, who: str | None, welcome: bool, start: Start, certificates: Certificates
) -> None:
    broker = start(**certificates.options, tls_client_auth_policy=policy, tls_root_ca_file=certificates.ca)
    with Client(broker.address, tls_v1=True) as client:
        context = certificates.context(getattr(certificates, who) if who else None)
        if welcome:
            client.begin_tls(context)
            client.publish("t", b"x")
            assert broker.do(
                lambda: [
                    c.transport and c.transport.tls and c.transport.tls.common_name
                    for c in broker.broker.clients.connections
                ]
            ) == ["sensor-1"]
        else:
            with pytest.raises((ssl.SSLError, ConnectionResetError, AssertionError)):
                client.begin_tls(context)
            broker.wait_until(lambda b: not b.clients.connections)


def test_old_versions_are_refused(start: Start, certificates: Certificates) -> None:
    broker = start(**certificates.options, tls_min_version="tls1.3")
    context = certificates.context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with Client(broker.address, tls_v1=True) as client, pytest.raises((ssl.SSLError, ConnectionResetError)):
        client.begin_tls(context)


def test_a_second_upgrade_is_refused(start: Start) -> None:
    with Client(start().address, deflate=True) as client:
        client.begin_deflate()
        client.send(say.identify({"feature_negotiation": True, "deflate": True}))
        client.response()
        assert client.error().startswith(b"E_IDENTIFY_FAILED")
        assert client.ended()


def test_heartbeats_come_once_an_interval_and_through_the_layers(start: Start, certificates: Certificates) -> None:
    broker = start(**certificates.options)
    with upgraded(broker, certificates, "tls deflate", heartbeat_interval=1000) as client:
        assert client.silent(2.5)
        assert client.heartbeats == 2


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"tls_cert": "x"}, "--tls-key"),
        ({"tls_required": True}, "--tls-cert"),
        ({"tls_cert": "x", "tls_key": "y", "tls_client_auth_policy": "maybe"}, "require-verify"),
        ({"tls_cert": "x", "tls_key": "y", "tls_client_auth_policy": "require"}, "--tls-root-ca-file"),
        ({"tls_min_version": "ssl3.0"}, "tls1.2"),
        ({"tls_cert": "/nowhere/c", "tls_key": "/nowhere/k"}, "--tls-cert: cannot read /nowhere/c: No such file"),
        ({"tls_cert": __file__, "tls_key": __file__}, "test_transport.py"),
        ({"plain_http": True}, "--tls-required"),
        ({"retain_bytes": 1}, "--data-path"),
        ({"retain_acknowledged": True}, "--data-path"),
        ({"auth_http_addresses": ("foo",)}, "HOST:PORT or a URL, not 'foo'"),
        ({"host": "no.such.host.invalid"}, "give an address of this machine with --host"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], remedy: str, start_on_sockets: Start) -> None:
    with pytest.raises(BrokerError, match=remedy):
        start_on_sockets(**options)


@needs_snappy
def test_snappy_in_any_cut() -> None:
    encoder, data = compression.Snappy(), [b"a", b"b" * 200_000, b"", bytes(range(256)) * 999]
    stream = b"".join(encoder.encode(each) for each in data) + b"\xfe\x02\x00\x00zz"
    for size in (1, 3, 1000, len(stream)):
        decoder, found = compression.Snappy(), bytearray()
        for at in range(0, len(stream), size):
            found += decoder.decode(stream[at : at + size])
            while decoder.more:
                found += decoder.decode(b"")
        assert found == b"".join(data)


@needs_snappy
def test_snappy_checks_its_checksums() -> None:
    stream = bytearray(compression.Snappy().encode(b"hello, hello, hello"))
    stream[14] ^= 1
    with pytest.raises(compression.BadStream):
        compression.Snappy().decode(bytes(stream))


def test_an_encrypted_key_is_refused_and_nobody_asked(start: Start, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    locked = tmp_path / "key.pem"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    certificate = tmp_path / "cert.pem"
    trustme.CA().issue_cert("localhost").cert_chain_pems[0].write_to_path(certificate)
    with pytest.raises(BrokerError, match="the key is encrypted"):
        start(tls_cert=str(certificate), tls_key=str(locked))
