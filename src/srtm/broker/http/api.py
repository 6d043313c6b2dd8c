"""The HTTP application of a broker: its table of endpoints, and those that show how it is doing.

Errors are nsqd's: `{"message": "INVALID_TOPIC"}` with its status.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import PlainTextResponse, Response

import srtm
from srtm.broker import memory
from srtm.broker.http import stats, text
from srtm.broker.http.administration import Administration
from srtm.broker.http.arrivals import Arrivals
from srtm.broker.http.config import Config
from srtm.broker.http.control import Control
from srtm.broker.http.logs import Logs
from srtm.broker.http.publishing import Publishing
from srtm.broker.http.request import TRUTHS, Pages, query
from srtm.broker.http.router import Json, Router, tls_required
from srtm.protocol.names import VERSION
from srtm.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp

    from srtm.broker.broker import Broker
    from srtm.broker.http.router import Methods
    from srtm.broker.lookup import Registration


def app(broker: Broker, registration: Registration, *, tls: bool = False) -> ASGIApp:
    """The HTTP application of a broker; `tls` says whether this one is reached with TLS."""
    options = broker.options
    if options.settings.tls_required and not options.plain_http and not tls:
        return tls_required(lambda: broker.https_port)
    publishing, administration = Publishing(broker), Administration(broker)
    logs, control, condition = Logs(broker), Control(broker, registration), Condition(broker)
    arrivals = Arrivals(broker)
    config = Config(broker, registration)
    posts = {
        "/pub": publishing.pub,
        "/mpub": publishing.mpub,
        "/topic/create": administration.topic_create,
        "/topic/delete": administration.topic_delete,
        "/topic/empty": administration.topic_empty,
        "/topic/pause": administration.topic_pause,
        "/topic/unpause": administration.topic_unpause,
        "/topic/limit": administration.topic_limit,
        "/channel/create": administration.channel_create,
        "/channel/delete": administration.channel_delete,
        "/channel/empty": administration.channel_empty,
        "/channel/pause": administration.channel_pause,
        "/channel/unpause": administration.channel_unpause,
        "/srtm/log/trim": logs.trim,
        "/srtm/exchange": control.exchange,
        "/srtm/probe": control.probe,
        "/srtm/trace/start": control.trace_start,
        "/srtm/trace/stop": control.trace_stop,
    }
    gets = {
        "/ping": condition.ping,
        "/info": condition.info,
        "/stats": condition.stats,
        "/metrics": condition.metrics,
        "/srtm/log": logs.extent,
        "/srtm/log/read": logs.read,
        "/srtm/arrivals": arrivals.extent,
        "/srtm/arrivals/read": arrivals.read,
    }
    pages: dict[str, Methods] = {path: {"POST": page} for path, page in posts.items()}
    pages |= {path: {"GET": page} for path, page in gets.items()}
    pages["/config/"] = {"GET": config.get, "PUT": config.put}
    return Router(pages, plain=frozenset({"/ping", "/metrics"}))


class Condition(Pages):
    """Endpoints that show how a broker is doing."""

    async def ping(self, _: Request) -> Response:
        """OK if the broker is healthy; status 500, with the reason, if it cannot write to its disk."""
        health = self.broker.statistics("").health
        return PlainTextResponse(health, 200 if health == "OK" else 500)

    async def info(self, _: Request) -> Response:
        """The broker's name, addresses, version and limits."""
        options = self.broker.options
        settings = options.settings
        return Json(
            {
                "version": VERSION,
                "broadcast_address": options.address,
                "hostname": options.name,
                "http_port": self.broker.http_port,
                "tcp_port": self.broker.tcp_port,
                "start_time": self.broker.started_ns // NS_PER_S,
                "max_heartbeat_interval": settings.max_heartbeat_ms * NS_PER_MS,
                "max_output_buffer_size": settings.max_output_buffer_size,
                "max_output_buffer_timeout": settings.max_output_buffer_timeout_ms * NS_PER_MS,
                "max_deflate_level": settings.max_deflate_level,
                "srtm": srtm.__version__,
            }
        )

    async def stats(self, request: Request) -> Response:
        """Statistics as text or, with ?format=json, in nsqd's shape: ?topic=…&channel=…&include_clients=….

        &include_mem=false leaves out the memory of the process.
        """
        asked = query(request)
        clients = TRUTHS.get(asked.get("include_clients", ""), True)
        process = memory.statistics() if TRUTHS.get(asked.get("include_mem", ""), True) else None
        topic, channel = asked.get("topic") or None, asked.get("channel") or None
        document = stats.as_json(self.broker.statistics(topic, clients=clients), topic, channel, process)
        if asked.get("format") == "json":
            return Json(document)
        return PlainTextResponse(text.page(document, self.broker.clock.time_ns()))

    async def metrics(self, _: Request) -> Response:
        """The same statistics for Prometheus."""
        from srtm.broker.http import metrics

        return Response(metrics.page(self.broker.statistics()), media_type=metrics.MEDIA_TYPE)
