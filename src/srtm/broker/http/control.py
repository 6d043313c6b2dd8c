"""`/srtm/exchange`, `/srtm/probe`, `/srtm/trace/*`: the controller's orders, probes of an engine, and recordings."""

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import Response

from srtm.broker.arrivals import record, recording_of
from srtm.broker.http.request import Pages, Refused, bears, flag, query, read_body
from srtm.broker.http.router import Json
from srtm.broker.lookup import by_tls
from srtm.errors import ExchangeRefused, ProtocolError, SRTMError
from srtm.net.site import CERTIFIED
from srtm.protocol import exchange
from srtm.protocol.exchange import RefusalCode

if TYPE_CHECKING:
    from starlette.requests import Request

    from srtm.broker.broker import Broker
    from srtm.broker.lookup import Registration


class Control(Pages):
    """Endpoints for the controller and for measurements."""

    def __init__(self, broker: Broker, registration: Registration) -> None:
        super().__init__(broker)
        self._registration = registration

    async def exchange(self, request: Request) -> Response:
        """Carry out the controller's exchange, and answer with a report (`srtm.protocol.exchange`)."""
        if self.broker.options.controller is None:
            message = "NOT_MANAGED: this broker has no controller; start it with --controller"
            raise Refused(409, message, RefusalCode.NOT_MANAGED)
        if problem := self._unauthorized(request):
            raise Refused(401, f"UNAUTHORIZED: {problem}", RefusalCode.UNAUTHORIZED)
        try:
            body = await read_body(request, exchange.MAX_BODY, f"INVALID_EXCHANGE: more than {exchange.MAX_BODY} bytes")
            said = exchange.read(body, exchange.Exchange)
            clock = self.broker.clock
            answer = self.broker.control.exchange(said, clock.time_ns(), clock.monotonic_ns())
        except ProtocolError as problem:
            raise Refused(400, f"INVALID_EXCHANGE: {problem}", RefusalCode.INVALID_EXCHANGE) from None
        except ExchangeRefused as problem:
            raise Refused(409, f"{problem.code}: {problem}", problem.code) from None
        return Response(exchange.write(answer), media_type="application/json")

    def _unauthorized(self, request: Request) -> str | None:
        """Why a request is not the controller's; None if it is, or if this broker cannot know."""
        options = self.broker.options
        if options.control_token is not None:
            known = bears(request, options.control_token)
            return None if known else "the controller must send this broker's control token (SRTM_CONTROL_TOKEN)"
        if not by_tls(options.controller or ""):
            return None
        shown: frozenset[str] = request.scope.get(CERTIFIED, frozenset())
        if shown & self._registration.controllers:
            return None
        return (
            "the exchange must come by HTTPS, with the certificate of the controller that this broker registered with"
        )

    async def probe(self, request: Request) -> Response:
        """Time a topic's messages to a consumer of its engine: ?topic=…; &on=false stops that."""
        topic, on = self.named_topic(request), flag(request, "on", default=True)
        engine = self.broker.topics.engine
        if engine is None:
            raise Refused(409, "NO_ENGINE: this broker delivers messages itself, and always measures their latency")
        engine.lane(topic).watch(on=on)
        return Response()

    async def trace_start(self, request: Request) -> Response:
        """Start to record every message: ?file=NAME.parquet, in the configured folder."""
        await asyncio.to_thread(import_module, "srtm.broker.recorder")  # pyarrow; messages do not wait for it
        from srtm.broker.recorder import Recorder

        broker = self.broker
        folder, name = broker.options.trace_folder, query(request).get("file", "")
        if folder is None:
            raise Refused(403, "TRACE_DISABLED: start the broker with --trace-folder")
        if Path(name).name != name or name.startswith(".") or not name.endswith(".parquet"):
            raise Refused(400, f"INVALID_ARG_FILE: must be a file name that ends with .parquet, not {name!r}")
        if recording_of(broker.turn) is not None:
            raise Refused(409, "TRACE_RUNNING")
        path = Path(folder) / name
        if path.exists():
            raise Refused(409, "TRACE_EXISTS")
        recorder = Recorder(path, broker.options.name, broker.control.groups, broker.turn.loop, broker.control.birth)
        recorder.start()
        record(broker.turn, recorder)
        broker.control.lenders.on_shift = recorder.shifted
        return Json({"file": str(path)})

    async def trace_stop(self, _: Request) -> Response:
        """Stop to record; the file is complete when this is answered."""
        turn = self.broker.turn
        recorder = recording_of(turn)
        record(turn, None)
        self.broker.control.lenders.on_shift = None
        if recorder is None:
            raise Refused(409, "TRACE_NOT_RUNNING")
        try:
            await recorder.stop()
        except SRTMError as problem:
            raise Refused(500, f"TRACE_FAILED: {problem}") from None
        return Json({"file": str(recorder.path), "messages": recorder.rows})
