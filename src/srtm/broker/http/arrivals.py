"""`/srtm/arrivals`: the live arrivals of topics under contract, for `srtm advise`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from srtm.broker import arrivals
from srtm.broker.http.request import Pages, Refused, bears, number, query
from srtm.broker.http.router import Json
from srtm.errors import LogError

if TYPE_CHECKING:
    from starlette.requests import Request

_ROWS, _MOST_ROWS = 50_000, 200_000


class Arrivals(Pages):
    """Endpoints of the stream of arrivals."""

    async def extent(self, request: Request) -> Response:
        """What the stream holds: offsets, its id, and the number of rows lost; starts the stream if it is off."""
        return Json(self._stream(request).extent()._asdict())

    async def read(self, request: Request) -> Response:
        """Rows of the stream as Arrow: ?begin=…&limit=…&log=ID; 410 if they fell out, or if the stream began anew."""
        begin, limit, broker = number(request, "begin"), number(request, "limit", _ROWS), self.broker
        try:
            parts = self._stream(request).read(begin, min(limit, _MOST_ROWS), query(request).get("log"))
        except LogError as problem:
            raise Refused(410, f"ARRIVALS_GONE: {problem}") from None
        # Off the loop: the columns of these rows no longer change.
        name, groups = broker.options.name, broker.control.groups
        rows = await broker.turn.loop.run_in_executor(None, arrivals.packed, parts, name, groups)
        return Response(rows, media_type="application/vnd.apache.arrow.stream")

    def _stream(self, request: Request) -> arrivals.Arrivals:
        broker = self.broker
        if broker.options.control_token is not None and not bears(request, broker.options.control_token):
            raise Refused(401, "UNAUTHORIZED: send this broker's control token as Authorization: Bearer …")
        running = arrivals.stream_of(broker.turn)
        return running or arrivals.Arrivals(broker.turn, broker.started_ns, broker.control.birth)
