"""`srtm broker`: one broker."""

from __future__ import annotations

import socket
from typing import Annotated

import typer


def broker(
    host: Annotated[str, typer.Option(help="Address to listen on; this machine alone unless given.")] = "127.0.0.1",
    tcp_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of NSQ's protocol; 0 takes a free one.")] = 4150,
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of HTTP; 0 takes a free one.")] = 4151,
    name: Annotated[str | None, typer.Option(help="What to call it (the name of the host).")] = None,
) -> None:
    """Run one broker, until it is told to stop (Ctrl-C or SIGTERM).

    It speaks NSQ's protocol: any NSQ client publishes and subscribes. A topic may be held to a token bucket. Example:

        srtm broker --tcp-port 4150 --http-port 4151
    """
    import asyncio

    from srtm.broker.options import BrokerOptions
    from srtm.broker.run import run

    options = BrokerOptions(host, tcp_port, http_port, name or socket.gethostname())
    try:
        import uvloop
    except ImportError:  # slower, and everything works
        asyncio.run(run(options))
    else:
        uvloop.run(run(options))
