"""`srtm broker`: one broker."""

from __future__ import annotations

from srtm.broker.options import BrokerOptions
from srtm.cli.flags import flags_of
from srtm.cli.servers.alone import serve


@flags_of(BrokerOptions)
def broker(options: BrokerOptions) -> None:
    """Run one broker until Ctrl-C or SIGTERM.

    The broker speaks the NSQ protocol, so any NSQ client can publish and subscribe.
    A topic can be limited by a token bucket, by the controller or over HTTP.

    --engine chooses what delivers messages after they leave the token bucket. The default, local, uses this broker's
    own channels. Otherwise give nsqd://SECRET@HOST:PORT, nsqd:///SOCKET, or
    nats://USER:PASSWORD@HOST:PORT,…?replicas=3. For TLS use nsqd+tls:// or nats+tls://, and add ?ca=FILE, cert=FILE
    and key=FILE as needed. Pass secrets in SRTM_ENGINE; other users can see command lines.

    Examples:
        srtm broker --data-path data
        curl -X POST 'localhost:4151/topic/limit?topic=traffic&r=11000&b=6001'
    """
    serve(options)
