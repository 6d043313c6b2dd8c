"""`srtm broker`: one broker."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from srtm.cli.common import check_logs

_TLS = "TLS and AUTH"
_LIMITS = "Limits"


def broker(
    host: Annotated[str, typer.Option(help="Address to listen on; this machine alone unless given.")] = "127.0.0.1",
    tcp_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of NSQ's protocol; 0 takes a free one.")] = 4150,
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of HTTP; 0 takes a free one.")] = 4151,
    name: Annotated[
        str | None, typer.Option(help="What to call it (the host's name, and the port if it is not 4150).")
    ] = None,
    broadcast_address: Annotated[str | None, typer.Option(help="Where clients reach it (the host's name).")] = None,
    data_path: Annotated[
        Path | None,
        typer.Option(help="A folder for disk topics, and for queues of memory topics over a stop (neither, without)."),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            envvar="SRTM_ENGINE",
            metavar="ENGINE",
            help="Who delivers: local (channels of this broker), nsqd://SECRET@HOST:PORT, nsqd:///SOCKET, or"
            " nats://USER:PASSWORD@HOST:PORT,…?replicas=3; with TLS nsqd+tls:// or nats+tls://, and ?ca=FILE,"
            " cert=FILE, key=FILE. What is secret is for SRTM_ENGINE: everybody sees flags.",
        ),
    ] = "local",
    retain_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="Disk topics keep no more than this, finished or not (all that is not finished)."),
    ] = None,
    retain_age: Annotated[
        str | None, typer.Option(help="And nothing older than this, as in 36h.", metavar="DURATION")
    ] = None,
    retain_acknowledged: Annotated[
        bool, typer.Option("--retain-acknowledged", help="Keep also what all channels have finished, to be replayed.")
    ] = False,
    trace_folder: Annotated[Path | None, typer.Option(help="A folder that runs may be recorded into.")] = None,
    kernel_time: Annotated[
        bool,
        typer.Option(help="Arrival times are the kernel's; without, those of reading, to see the difference."),
    ] = True,
    lookupd: Annotated[
        list[str] | None,
        typer.Option("--lookupd-tcp-address", metavar="HOST:PORT", help="An nsqlookupd to register with; repeatable."),
    ] = None,
    controller: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="The controller that it is under: topics under contract wait for its grants."
        ),
    ] = None,
    control_token: Annotated[
        str | None, typer.Option(envvar="SRTM_CONTROL_TOKEN", help="What the controller has to show.")
    ] = None,
    log_format: Annotated[str, typer.Option(help="How it writes its log: text or json.")] = "text",
    log_level: Annotated[str, typer.Option(help="From what on: debug, info, warning or error.")] = "info",
    max_msg_size: Annotated[
        int, typer.Option(min=1, max=1 << 30, help="Bytes of one message.", rich_help_panel=_LIMITS)
    ] = 1024 * 1024,
    max_body_size: Annotated[
        int, typer.Option(min=1, max=1 << 30, help="Bytes of messages published together.", rich_help_panel=_LIMITS)
    ] = 5 * 1024 * 1024,
    msg_timeout: Annotated[
        str,
        typer.Option(
            help="How long a consumer may have a message, unless it asks for another time.",
            metavar="DURATION",
            rich_help_panel=_LIMITS,
        ),
    ] = "60s",
    max_held_messages: Annotated[
        int,
        typer.Option(min=1, help="Messages that a topic holds before its publishers wait.", rich_help_panel=_LIMITS),
    ] = 100_000,
    max_held_bytes: Annotated[
        int, typer.Option(min=1, help="And bytes of them.", rich_help_panel=_LIMITS)
    ] = 268_435_456,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate (PEM).", rich_help_panel=_TLS)] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key (PEM).", rich_help_panel=_TLS)] = None,
    tls_required: Annotated[
        bool, typer.Option("--tls-required", help="Clients must use it, for HTTP, too.", rich_help_panel=_TLS)
    ] = False,
    plain_http: Annotated[
        bool, typer.Option("--plain-http", help="HTTP needs none though it is required.", rich_help_panel=_TLS)
    ] = False,
    https_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of HTTPS; 0 takes a free one (no HTTPS).", rich_help_panel=_TLS),
    ] = None,
    tls_client_auth_policy: Annotated[
        str, typer.Option(help="Clients' certificates: require or require-verify.", rich_help_panel=_TLS)
    ] = "",
    tls_root_ca_file: Annotated[
        Path | None, typer.Option(help="Who vouches for clients and authorities (PEM).", rich_help_panel=_TLS)
    ] = None,
    tls_min_version: Annotated[str, typer.Option(help="The oldest TLS spoken.", rich_help_panel=_TLS)] = "tls1.2",
    auth: Annotated[
        list[str] | None,
        typer.Option(
            "--auth-http-address", metavar="HOST:PORT", help="Who decides on AUTH; repeatable.", rich_help_panel=_TLS
        ),
    ] = None,
) -> None:
    """Run one broker, until it is told to stop (Ctrl-C or SIGTERM).

    It speaks NSQ's protocol: any NSQ client publishes and subscribes. A topic may be held to a token bucket. Example:

        srtm broker --data-path data

        curl -X POST 'localhost:4151/topic/limit?topic=traffic&r=11000&b=6001'
    """
    from srtm import program
    from srtm.broker.options import MAX_IDENTIFY_SIZE, BrokerOptions, retained_ns
    from srtm.broker.run import run
    from srtm.errors import InputError
    from srtm.protocol.names import Settings
    from srtm.units import NS_PER_MS, parse_duration_ns

    settings = Settings(
        max_msg_size=max_msg_size,
        max_body_size=max_body_size,
        max_identify_size=MAX_IDENTIFY_SIZE,
        msg_timeout_ms=parse_duration_ns(msg_timeout) // NS_PER_MS,
    )
    if not 1 <= settings.msg_timeout_ms <= settings.max_msg_timeout_ms:
        raise InputError(f"--msg-timeout is between 1ms and 15m, not {msg_timeout!r}", value=msg_timeout)

    check_logs(log_format, log_level)
    program.log_to_stderr(log_format, log_level)
    options = BrokerOptions(
        host,
        tcp_port,
        http_port,
        name or (socket.gethostname() if tcp_port == 4150 else f"{socket.gethostname()}-{tcp_port}"),
        broadcast_address,
        engine=engine,
        data_path=_text(data_path),
        retain_bytes=retain_bytes,
        retain_age_ns=None if retain_age is None else retained_ns(retain_age),
        retain_acknowledged=retain_acknowledged,
        lookupd=tuple(lookupd or ()),
        controller=controller,
        control_token=control_token,
        settings=settings,
        max_held_messages=max_held_messages,
        max_held_bytes=max_held_bytes,
        tls_cert=_text(tls_cert),
        tls_key=_text(tls_key),
        tls_client_auth_policy=tls_client_auth_policy,
        tls_root_ca_file=_text(tls_root_ca_file),
        tls_required=tls_required,
        plain_http=plain_http,
        https_port=https_port,
        tls_min_version=tls_min_version,
        auth_http_addresses=tuple(auth or ()),
        kernel_time=kernel_time,
        trace_folder=_text(trace_folder),
    )
    program.run(run(options))


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
