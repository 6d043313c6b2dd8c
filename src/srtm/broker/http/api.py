"""The HTTP application of a broker: its table of endpoints, and those that show how it is doing.

Errors are nsqd's: `{"message": "INVALID_TOPIC"}` with its status.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import srtm
from srtm.broker.http import stats
from srtm.broker.http.administration import Administration
from srtm.broker.http.control import Control
from srtm.broker.http.logs import Logs
from srtm.broker.http.publishing import Publishing
from srtm.broker.http.request import Pages, Refused
from srtm.protocol.names import VERSION
from srtm.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from srtm.broker.broker import Broker


def app(broker: Broker, *, tls: bool = False) -> ASGIApp:
    """The HTTP application of a broker; `tls` says whether this one is reached with TLS."""
    options = broker.options
    if options.settings.tls_required and not options.plain_http and not tls:
        return _tls_required(broker)
    publishing, administration = Publishing(broker), Administration(broker)
    logs, control, condition = Logs(broker), Control(broker), Condition(broker)
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
    }
    routes = [Route(path, _answered(page), methods=["POST"]) for path, page in posts.items()]
    routes += [Route(path, _answered(page), methods=["GET"]) for path, page in gets.items()]
    return Starlette(routes=routes, exception_handlers={404: _not_found, 405: _not_found})


async def _not_found(_: Request, problem: Exception) -> Response:
    status = problem.status_code if isinstance(problem, HTTPException) else 404
    return JSONResponse({"message": HTTPStatus(status).name}, status)


def _tls_required(broker: Broker) -> ASGIApp:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        document = {"message": "TLS_REQUIRED", "https_port": broker.https_port}
        await JSONResponse(document, 403, {"X-NSQ-Content-Type": "nsq; version=1.0"})(scope, receive, send)

    return refuse


def _answered(page: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return await page(request)
        except ClientDisconnect:  # before the end of its body: no one reads the answer
            return Response(status_code=400)
        except Refused as problem:
            document = {"message": str(problem)} | ({"code": problem.code} if problem.code else {})
            return JSONResponse(document, status_code=problem.status)

    return answer


class Condition(Pages):
    """Endpoints that show how a broker is doing."""

    async def ping(self, _: Request) -> Response:
        """OK if the broker is healthy."""
        return PlainTextResponse("OK")

    async def info(self, _: Request) -> Response:
        """The broker's name, addresses, version and limits."""
        options = self.broker.options
        settings = options.settings
        return JSONResponse(
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
                "topology_zone": "",
                "topology_region": "",
                "srtm": srtm.__version__,
            }
        )

    async def stats(self, request: Request) -> Response:
        """Statistics as text or, with ?format=json, in nsqd's shape: ?topic=…&channel=…&include_clients=…."""
        query = request.query_params
        clients = query.get("include_clients", "true").lower() not in ("false", "0")
        topic, channel = query.get("topic") or None, query.get("channel") or None
        document = stats.as_json(self.broker.statistics(topic, clients=clients), topic, channel)
        if query.get("format") == "json":
            return JSONResponse(document)
        return PlainTextResponse(stats.as_text(document))

    async def metrics(self, _: Request) -> Response:
        """The same statistics for Prometheus."""
        from srtm.broker.http import metrics

        return Response(metrics.page(self.broker.statistics()), media_type=metrics.MEDIA_TYPE)
