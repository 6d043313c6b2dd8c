"""All options of a broker with their defaults; flags and variables derive from those with a help text."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from srtm.errors import BrokerError, InputError
from srtm.files import not_readable, not_writable
from srtm.net.compression import HAS_SNAPPY
from srtm.net.tls import AUTH_POLICIES, VERSIONS, client_context, server_context
from srtm.options import LOG_FORMAT, LOG_LEVEL, PORT, option, secret
from srtm.protocol.names import Settings
from srtm.units import NS_PER_MS, parse_duration_ns

if TYPE_CHECKING:
    import ssl

MAX_IDENTIFY_SIZE = 64 * 1024  # JSON that an unknown client may send; nsqd takes 5 MiB

_NSQD = Settings()  # nsqd's defaults are ours
_DAY_MS = 24 * 60 * 60 * 1000
_FOREVER_NS = 2**62  # the longest time the log can count: 146 years
_STORAGE, _CONTROL, _LIMITS, _TLS, _LOGS = "Storage", "Discovery and control", "Limits", "TLS and AUTH", "Logging"
_BYTES: dict[str, Any] = {"metavar": "BYTES", "min": 1, "panel": _LIMITS}
_FILE: dict[str, Any] = {"metavar": "FILE", "panel": _TLS}


def retained_ns(text: str) -> int:
    """The retention time in `text`, as in 36h; InputError if it is not a duration above zero that the log can count."""
    age_ns = parse_duration_ns(text) if text.isascii() else 0
    if not 0 < age_ns < _FOREVER_NS:
        raise InputError(f"retention time must be a duration such as 36h, not {text!r}", value=text)
    return age_ns


def _time(default_ms: int, text: str, flag: str, **more: Any) -> Any:
    """A field of milliseconds with a flag that takes a duration of 1 ms to a day."""

    def parse(given: str) -> int:
        time_ms = parse_duration_ns(given) // NS_PER_MS
        if not 1 <= time_ms <= _DAY_MS:
            raise InputError(f"{flag} must be between 1ms and 24h, not {given!r}", value=given)
        return time_ms

    return option(default_ms, text, "DURATION", flag=flag, panel=_LIMITS, parse=parse, **more)


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """Options of one broker."""

    host: str = option("127.0.0.1", "Listen address", "ADDRESS")
    tcp_port: int = option(4150, "Port of the NSQ protocol; 0 picks a free one", **PORT)
    http_port: int = option(4151, "Port of the HTTP API; 0 picks a free one", **PORT)
    tcp_socket: str | None = option(None, "Unix socket of the NSQ protocol, beside the port", "PATH", shown="none")
    http_socket: str | None = option(None, "Unix socket of the HTTP API, beside the port", "PATH", shown="none")
    name: str = option("", "Name of this broker", "NAME", shown="host name and port")
    broadcast_address: str | None = option(None, "Host that clients connect to", "HOST", shown="host name")
    engine: str = option("local", "Delivery engine: local, nsqd://… or nats://…", "URL", envvar="SRTM_ENGINE")
    kernel_time: bool = option(True, "Take arrival times from the kernel instead of from the read")
    data_path: str | None = option(None, "Folder for disk topics and saved queues", "FOLDER", panel=_STORAGE)
    retain_bytes: int | None = option(
        None, "Maximum bytes that a disk topic keeps", "BYTES", panel=_STORAGE, shown="until all channels finish", min=1
    )
    retain_age_ns: int | None = option(
        None,
        "Delete disk-topic messages older than this, as in 36h",
        "DURATION",
        flag="--retain-age",
        panel=_STORAGE,
        parse=retained_ns,
        shown="never",
    )
    retain_acknowledged: bool = option(False, "Keep messages that all channels finished, for replay", panel=_STORAGE)
    trace_folder: str | None = option(None, "Folder that traces may be recorded in", "FOLDER", panel=_STORAGE)
    lookupd: tuple[str, ...] = option(
        (), "nsqlookupd to register with; repeatable", "HOST:PORT", flag="--lookupd-tcp-address", panel=_CONTROL
    )
    controller: str | None = option(
        None,
        "Controllers that grant this broker its shares, separated by commas; tls://HOST:PORT for TLS",
        "HOST:PORT",
        panel=_CONTROL,
    )
    broker_token: str | None = secret(
        "File with the token to register with at the controller", "SRTM_BROKER_TOKEN", _CONTROL
    )
    control_token: str | None = secret(
        "File with the token that the controller must present", "SRTM_CONTROL_TOKEN", _CONTROL
    )
    max_msg_size: int = option(_NSQD.max_msg_size, "Maximum size of a message", max=1 << 30, **_BYTES)
    max_body_size: int = option(_NSQD.max_body_size, "Maximum size of a batch (MPUB)", max=1 << 30, **_BYTES)
    msg_timeout_ms: int = _time(
        _NSQD.msg_timeout_ms, "Time after which an unfinished message is requeued", "--msg-timeout", shown="60s"
    )
    max_msg_timeout_ms: int = _time(
        _NSQD.max_msg_timeout_ms, "Longest time that a client may ask for a message", "--max-msg-timeout", shown="15m"
    )
    max_req_timeout_ms: int = _time(
        _NSQD.max_req_timeout_ms, "Longest delay of a requeued or deferred message", "--max-req-timeout", shown="1h"
    )
    client_timeout_ms: int = _time(
        2 * _NSQD.heartbeat_ms,
        "Silence after which a client is disconnected; heartbeats come twice as often",
        "--client-timeout",
        shown="60s",
    )
    max_heartbeat_interval_ms: int = _time(
        _NSQD.max_heartbeat_ms, "Longest heartbeat interval of a client", "--max-heartbeat-interval", shown="60s"
    )
    max_rdy_count: int = option(
        _NSQD.max_rdy_count, "Maximum messages in flight to one consumer (RDY)", "N", panel=_LIMITS, min=1, max=1 << 30
    )
    max_channel_consumers: int = option(
        0, "Maximum consumers of a channel", "N", panel=_LIMITS, shown="unlimited", min=0
    )
    max_output_buffer_size: int = option(
        _NSQD.max_output_buffer_size, "Largest output buffer of a client", max=1 << 30, **_BYTES | {"min": 64}
    )
    output_buffer_timeout_ms: int = _time(
        _NSQD.output_buffer_timeout_ms,
        "Output buffer timeout up to which messages are sent at once",
        "--output-buffer-timeout",
        shown="250ms",
    )
    min_output_buffer_timeout_ms: int = _time(
        _NSQD.min_output_buffer_timeout_ms,
        "Shortest output buffer timeout of a client",
        "--min-output-buffer-timeout",
        shown="25ms",
    )
    max_output_buffer_timeout_ms: int = _time(
        _NSQD.max_output_buffer_timeout_ms,
        "Longest output buffer timeout of a client",
        "--max-output-buffer-timeout",
        shown="30s",
    )
    deflate: bool = option(True, "Offer deflate compression to clients", panel=_LIMITS)
    max_deflate_level: int = option(
        _NSQD.max_deflate_level, "Highest deflate level of a client", "LEVEL", panel=_LIMITS, min=1, max=9
    )
    snappy: bool = option(True, "Offer snappy compression to clients", panel=_LIMITS)
    max_held_messages: int = option(
        100_000, "Maximum messages a topic holds before its publishers wait", "N", panel=_LIMITS, min=1
    )
    max_held_bytes: int = option(256 * 1024 * 1024, "Maximum bytes a topic holds before its publishers wait", **_BYTES)
    tls_cert: str | None = option(None, "Certificate (PEM)", **_FILE)
    tls_key: str | None = option(None, "Private key of the certificate (PEM)", **_FILE)
    tls_required: bool = option(False, "Require TLS of all clients, including HTTP", panel=_TLS)
    plain_http: bool = option(False, "Allow plain HTTP even with --tls-required", panel=_TLS)
    https_port: int | None = option(
        None, "Port of the HTTPS API; 0 picks a free one", **PORT, panel=_TLS, shown="no HTTPS"
    )
    tls_client_auth_policy: str = option(
        "", f"Client certificates: {' or '.join(AUTH_POLICIES)}", "POLICY", panel=_TLS, shown="not required"
    )
    tls_root_ca_file: str | None = option(
        None, "CA file that verifies client certificates, auth servers and other brokers", **_FILE
    )
    tls_min_version: str = option("tls1.2", "Oldest TLS version to accept", "VERSION", panel=_TLS)
    auth_http_addresses: tuple[str, ...] = option(
        (), "Auth server that authorizes clients; repeatable", "HOST:PORT", flag="--auth-http-address", panel=_TLS
    )
    log_format: str = option(*LOG_FORMAT, panel=_LOGS)
    log_level: str = option("info", *LOG_LEVEL, panel=_LOGS)
    # No flags: tuning for tests and measurements.
    max_unsent_bytes: int = 1024 * 1024  # written to a subscriber that does not read before it gets no more messages
    read_size: int = 256 * 1024
    backlog: int = 1024
    # Of the protocol, as far as the options above do not say.
    settings: Settings = field(default_factory=lambda: Settings(max_identify_size=MAX_IDENTIFY_SIZE))

    def __post_init__(self) -> None:
        """Derive the broker's name and the settings that it offers to clients."""
        if not self.name:
            suffix = "" if self.tcp_port == 4150 else f"-{self.tcp_port}"
            object.__setattr__(self, "name", socket.gethostname() + suffix)
        settings = replace(
            self.settings,
            max_msg_size=self.max_msg_size,
            max_body_size=self.max_body_size,
            msg_timeout_ms=self.msg_timeout_ms,
            max_msg_timeout_ms=self.max_msg_timeout_ms,
            max_req_timeout_ms=self.max_req_timeout_ms,
            heartbeat_ms=self.client_timeout_ms // 2,
            max_heartbeat_ms=self.max_heartbeat_interval_ms,
            max_rdy_count=self.max_rdy_count,
            max_output_buffer_size=self.max_output_buffer_size,
            output_buffer_timeout_ms=self.output_buffer_timeout_ms,
            min_output_buffer_timeout_ms=self.min_output_buffer_timeout_ms,
            max_output_buffer_timeout_ms=self.max_output_buffer_timeout_ms,
            deflate=self.deflate,
            max_deflate_level=self.max_deflate_level,
            tls_v1=bool(self.tls_cert),
            tls_required=self.tls_required or bool(self.tls_client_auth_policy),
            snappy=self.snappy and HAS_SNAPPY,
            auth_required=bool(self.auth_http_addresses),
        )
        object.__setattr__(self, "settings", settings)

    @property
    def address(self) -> str:
        """The host that other machines connect to; the broker's name need not resolve."""
        return self.broadcast_address or socket.gethostname()


def settled(options: BrokerOptions) -> BrokerOptions:
    """The same options, checked against one another and the disk; BrokerError lists all problems."""
    problems = []
    if bool(options.tls_cert) != bool(options.tls_key):
        problems.append("--tls-cert and --tls-key must be given together")
    if options.tls_client_auth_policy not in ("", *AUTH_POLICIES):
        known = " or ".join(AUTH_POLICIES)
        problems.append(f"--tls-client-auth-policy must be {known}, not {options.tls_client_auth_policy!r}")
    if options.tls_client_auth_policy and not options.tls_root_ca_file:
        problems.append("--tls-client-auth-policy needs --tls-root-ca-file to verify client certificates")
    if options.msg_timeout_ms > options.max_msg_timeout_ms:
        given_s, most_s = options.msg_timeout_ms / 1000, options.max_msg_timeout_ms / 1000
        problems.append(f"--msg-timeout must not exceed --max-msg-timeout, but {given_s:g}s is more than {most_s:g}s")
    if options.min_output_buffer_timeout_ms > options.max_output_buffer_timeout_ms:
        problems.append("--min-output-buffer-timeout must not exceed --max-output-buffer-timeout")
    if options.tls_min_version not in VERSIONS:
        problems.append(f"--tls-min-version must be one of {', '.join(VERSIONS)}, not {options.tls_min_version!r}")
    required = options.settings.tls_required
    if required and not options.tls_cert:
        problems.append("requiring TLS needs --tls-cert and --tls-key")
    if options.https_port is not None and not options.tls_cert:
        problems.append("--https-port needs --tls-cert and --tls-key")
    if options.plain_http and not required:
        problems.append("--plain-http has no effect without --tls-required; give both or neither")
    retained = options.retain_bytes is not None or options.retain_age_ns is not None or options.retain_acknowledged
    if retained and not options.data_path:
        problems.append("--retain-bytes, --retain-age and --retain-acknowledged need --data-path")
    problems += [
        f"--auth-http-address must be HOST:PORT or a URL, not {address!r}"
        for address in options.auth_http_addresses
        if "://" not in address and not _is_place(address)
    ]
    for flag, path in (
        ("--tls-cert", options.tls_cert),
        ("--tls-key", options.tls_key),
        ("--tls-root-ca-file", options.tls_root_ca_file),
    ):
        if path and (why := not_readable(path)):
            problems.append(f"{flag}: cannot read {path}: {why}")
    if options.trace_folder and (why := not_writable(options.trace_folder)):
        problems.append(f"--trace-folder: cannot write to {options.trace_folder}: {why}; create it or make it writable")
    if problems:
        raise BrokerError("; ".join(problems), problems=problems)
    return options


def _is_place(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and int(port) < 1 << 16


def tls_to_peers(options: BrokerOptions) -> ssl.SSLContext | None:
    """The TLS context of connections to other brokers; None without a certificate: then they are plain."""
    return _client_context(options) if options.tls_cert else None


def tls_to_controller(options: BrokerOptions) -> ssl.SSLContext:
    """The TLS context of a connection to the controller, of the files as they are now."""
    return _client_context(options)


def _client_context(options: BrokerOptions) -> ssl.SSLContext:
    flags = ("--tls-root-ca-file", "--tls-cert", "--tls-key")
    return client_context(options.tls_root_ca_file, options.tls_cert, options.tls_key, flags)


def tls_of(options: BrokerOptions, *, offered: bool = False) -> ssl.SSLContext | None:
    """The TLS context of the server, or None without a certificate; `offered`: clients may show a certificate."""
    if not options.tls_cert or not options.tls_key:
        return None
    return server_context(
        options.tls_cert,
        options.tls_key,
        options.tls_root_ca_file,
        min_version=options.tls_min_version,
        client_certificates=bool(options.tls_client_auth_policy),
        offered=offered,
    )
