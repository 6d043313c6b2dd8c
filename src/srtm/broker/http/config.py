"""`/config/…`: the broker's options under nsqd's names; two of them can be changed while it runs.

Times are nanoseconds, as Go writes a duration. An option that nsqd has and SRTM has not is `INVALID_OPTION`.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from starlette.responses import PlainTextResponse, Response

from srtm.broker.http.request import Pages, Refused, read_body
from srtm.broker.http.router import Json
from srtm.errors import BrokerError
from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

    from srtm.broker.broker import Broker
    from srtm.broker.lookup import Registration

# nsqd's numbers.
_LEVELS = {"debug": 1, "info": 2, "warn": 3, "warning": 3, "error": 4, "fatal": 5}
_OURS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR, 5: logging.CRITICAL}

_SIZES = ("max_msg_size", "max_body_size", "max_rdy_count", "max_output_buffer_size", "max_deflate_level")
_SWITCHES = ("deflate", "snappy")
_TIMES = {
    "msg_timeout": "msg_timeout_ms",
    "max_msg_timeout": "max_msg_timeout_ms",
    "max_req_timeout": "max_req_timeout_ms",
    "max_heartbeat_interval": "max_heartbeat_ms",
    "max_output_buffer_timeout": "max_output_buffer_timeout_ms",
    "min_output_buffer_timeout": "min_output_buffer_timeout_ms",
    "output_buffer_timeout": "output_buffer_timeout_ms",
}
_TEXTS = ("data_path", "tls_cert", "tls_key", "tls_client_auth_policy", "tls_root_ca_file")


class Config(Pages):
    """Endpoints that read and change options."""

    def __init__(self, broker: Broker, registration: Registration) -> None:
        super().__init__(broker)
        self._registration = registration

    async def get(self, request: Request) -> Response:
        """The value of an option."""
        return _shown(self._value(request.path_params["part"]))

    async def put(self, request: Request) -> Response:
        """Change an option: `log_level`, or `nsqlookupd_tcp_addresses` as a JSON list."""
        name = request.path_params["part"]
        body = await read_body(request, self.broker.options.settings.max_msg_size, "INVALID_VALUE")
        if not body:
            raise Refused(413, "INVALID_VALUE")
        if name == "log_level":
            _set_level(body)
        elif name == "nsqlookupd_tcp_addresses":
            self._point_at(body)
        else:
            raise Refused(400, "INVALID_OPTION")
        return _shown(self._value(name))

    def _point_at(self, body: bytes) -> None:
        try:
            addresses = json.loads(body)
            if addresses is not None and not _is_list_of_text(addresses):
                raise Refused(400, "INVALID_VALUE")
            self._registration.register_with(addresses)
        except (ValueError, BrokerError):
            raise Refused(400, "INVALID_VALUE") from None

    def _value(self, name: str) -> Any:
        options = self.broker.options
        settings = options.settings
        if name in _SIZES or name in _SWITCHES:
            return getattr(settings, name)
        if name in _TIMES:
            return getattr(settings, _TIMES[name]) * NS_PER_MS
        if name in _TEXTS:
            return getattr(options, name) or ""
        others: dict[str, Callable[[], Any]] = {
            "log_level": _level,
            "nsqlookupd_tcp_addresses": lambda: self._registration.addresses,
            "auth_http_addresses": lambda: list(options.auth_http_addresses),
            "broadcast_address": lambda: options.address,
            "tcp_address": lambda: f"{options.host}:{self.broker.tcp_port}",
            "http_address": lambda: f"{options.host}:{self.broker.http_port}",
            "max_channel_consumers": lambda: options.max_channel_consumers,
        }
        if name not in others:
            raise Refused(400, "INVALID_OPTION")
        return others[name]()


def _shown(value: Any) -> Response:
    """Text as it is, everything else as JSON, as nsqd writes them."""
    if isinstance(value, str):
        return PlainTextResponse(value) if value else Response()
    return Json(value)


def _is_list_of_text(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(each, str) for each in found)


def _level() -> int:
    now = logging.getLogger().getEffectiveLevel()
    return max(number for number, ours in _OURS.items() if ours <= max(now, logging.DEBUG))


def _set_level(body: bytes) -> None:
    number = _LEVELS.get(body.decode("utf-8", "replace").lower())
    if number is None:
        raise Refused(400, "INVALID_VALUE")
    logging.getLogger().setLevel(_OURS[number])
