"""All settings of a broker with their defaults; flags derive from them."""

from __future__ import annotations

import socket
import tempfile
from dataclasses import dataclass, field

from srtm.errors import InputError
from srtm.protocol.names import Settings
from srtm.units import parse_duration_ns

MAX_IDENTIFY_SIZE = 64 * 1024  # of the JSON that a client may send before anybody knows it; nsqd takes 5 MiB

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


def not_writable(folder: str) -> str | None:
    """Why no file can be made in a folder; None where one can."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)
