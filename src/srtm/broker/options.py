"""All settings of a broker with their defaults; flags derive from them."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from srtm.errors import BrokerError, InputError
from srtm.files import not_readable, not_writable
from srtm.net.compression import HAS_SNAPPY
from srtm.net.tls import VERSIONS, server_context
from srtm.protocol.names import Settings
from srtm.units import parse_duration_ns

if TYPE_CHECKING:
    import ssl

MAX_IDENTIFY_SIZE = 64 * 1024  # of the JSON that a client may send before anybody knows it; nsqd takes 5 MiB

CLIENT_AUTH_POLICIES = ("", "require", "require-verify")
_FOREVER_NS = 2**62  # what the log can count: 146 years


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """What a broker is told at its start."""

    host: str = "127.0.0.1"
    tcp_port: int = 4150
    http_port: int = 4151
    name: str = field(default_factory=socket.gethostname)
    broadcast_address: str | None = None  # the host's name
    # Who delivers released messages: local (this broker's channels), or the address of an nsqd or of NATS servers.
    engine: str = "local"
    # Where disk topics are, and where queues of memory topics are kept over a stop; none without.
    data_path: str | None = None
    # What disk topics keep, unless they are told otherwise: with a size or an age, no more than that, finished or not;
    # what all channels have finished goes in any case, unless it is to be retained.
    retain_bytes: int | None = None
    retain_age_ns: int | None = None
    retain_acknowledged: bool = False
    lookupd: tuple[str, ...] = ()
    # The controller that this broker is under (host:port, as of nsqlookupd); topics under contract wait for its grants.
    controller: str | None = None
    control_token: str | None = None  # that the controller has to show
    settings: Settings = field(default_factory=lambda: Settings(max_identify_size=MAX_IDENTIFY_SIZE))
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_auth_policy: str = ""  # or require, or require-verify: clients must show a certificate
    tls_root_ca_file: str | None = None  # who vouches for clients, and for authorities
    tls_required: bool = False
    plain_http: bool = False  # where TLS is required, HTTP is answered without it all the same
    https_port: int | None = None  # HTTPS, with the same certificate; none unless given
    tls_min_version: str = "tls1.2"
    auth_http_addresses: tuple[str, ...] = ()
    kernel_time: bool = True  # arrival times are the kernel's; without, those of reading, for comparisons
    trace_folder: str | None = None  # where traces may be recorded; nowhere unless given
    # A topic that holds more than this, waiting for tokens or for subscribers, stops reading its publishers.
    max_held_messages: int = 100_000
    max_held_bytes: int = 256 * 1024 * 1024
    # What may be written to a subscriber that does not read; beyond it, it gets no more messages.
    max_unsent_bytes: int = 1024 * 1024
    read_size: int = 256 * 1024
    backlog: int = 1024

    @property
    def address(self) -> str:
        """Where others are told to reach it. Its name need not be one that can be resolved."""
        return self.broadcast_address or socket.gethostname()


def retained_ns(text: str) -> int:
    """How long messages are kept, as in 36h; InputError where that is no time, or beyond all clocks."""
    age_ns = parse_duration_ns(text) if text.isascii() else 0
    if not 0 < age_ns < _FOREVER_NS:
        raise InputError(f"messages are kept for a time such as 36h, not {text!r}", value=text)
    return age_ns


def settled(options: BrokerOptions) -> BrokerOptions:
    """The options with what follows from them: a server offers what it can do."""
    problems = []
    if bool(options.tls_cert) != bool(options.tls_key):
        problems.append("give --tls-cert and --tls-key together")
    if options.tls_client_auth_policy not in CLIENT_AUTH_POLICIES:
        problems.append(f"--tls-client-auth-policy is require or require-verify, not {options.tls_client_auth_policy}")
    if options.tls_client_auth_policy and not options.tls_root_ca_file:
        problems.append("clients' certificates are always verified: give --tls-root-ca-file")
    if options.tls_min_version not in VERSIONS:
        problems.append(f"--tls-min-version is one of {', '.join(VERSIONS)}, not {options.tls_min_version}")
    required = options.tls_required or bool(options.tls_client_auth_policy)
    if required and not options.tls_cert:
        problems.append("TLS can only be required with --tls-cert and --tls-key")
    if options.https_port is not None and not options.tls_cert:
        problems.append("HTTPS needs a certificate: give --tls-cert and --tls-key with --https-port")
    if options.plain_http and not required:
        problems.append("--plain-http takes HTTP from what --tls-required requires: give both, or neither")
    retained = options.retain_bytes is not None or options.retain_age_ns is not None or options.retain_acknowledged
    if retained and not options.data_path:
        problems.append("--retain-… is about topics on disk: give --data-path, too")
    problems += [
        f"--auth-http-address is HOST:PORT or a URL, not {address!r}"
        for address in options.auth_http_addresses
        if "://" not in address and not _is_place(address)
    ]
    for flag, path in (
        ("--tls-cert", options.tls_cert),
        ("--tls-key", options.tls_key),
        ("--tls-root-ca-file", options.tls_root_ca_file),
    ):
        if path and (why := not_readable(path)):
            problems.append(f"{flag} {path}: {why}")
    if options.trace_folder and (why := not_writable(options.trace_folder)):
        problems.append(f"--trace-folder {options.trace_folder}: {why}; make it, or let this user write to it")
    if problems:
        raise BrokerError("; ".join(problems), problems=problems)
    settings = replace(
        options.settings,
        tls_v1=bool(options.tls_cert),
        tls_required=required,
        snappy=options.settings.snappy and HAS_SNAPPY,
        auth_required=bool(options.auth_http_addresses),
    )
    return replace(options, settings=settings)


def _is_place(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and int(port) < 1 << 16


def tls_of(options: BrokerOptions) -> ssl.SSLContext | None:
    """The server's side of TLS, or None without a certificate."""
    if not options.tls_cert or not options.tls_key:
        return None
    return server_context(
        options.tls_cert,
        options.tls_key,
        options.tls_root_ca_file,
        min_version=options.tls_min_version,
        client_certificates=bool(options.tls_client_auth_policy),
    )
