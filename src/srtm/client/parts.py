"""The commands of a publisher that may be split: over as many connections as the controller says.

In: commands, as for a `Stream`. Out: their answers. Each part is a stream that finds its broker, follows orders and
repeats unanswered commands by itself. A command goes to the part with the fewest unanswered ones, in turn if several
have as few.

Always holds: the order of the commands of one part; no command leaves its part, so what a part that is no longer needed
still has is sent before that part is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from srtm.client.cluster import Assigned, Cluster, Place, PublisherSpec
from srtm.client.connection import ConnectionOptions
from srtm.client.stream import Moves, Stream
from srtm.errors import ClientError, SRTMError

_ADDING_S, _AGAIN_S = 10.0, 1.0  # for one attempt to open a part that came later, and until the next


class Parts:
    """One publisher's commands and connections."""

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        spec: PublisherSpec,
        options: ConnectionOptions,
        answered: Callable[[Any], None],
        refused: Callable[[Any, SRTMError], None],
    ) -> None:
        self._cluster = cluster
        self._topic = topic
        self._spec = spec
        self._stream_options = options, answered, refused
        self._places = [Place(spec.id, "")]  # as the controller last said
        self._open: dict[str, Stream] = {}  # parts in use
        self._streams: list[Stream] = []  # all that were ever in use
        self._tasks: dict[str, asyncio.Task[None]] = {}  # parts that are being opened
        self._leaving: set[asyncio.Task[None]] = set()
        self._ready = False  # between `open` and `abort`
        self._turn = 0

    @property
    def addresses(self) -> list[str]:
        """The addresses of its brokers, of parts that are connected."""
        streams = [self._open[place.id] for place in self._places if place.id in self._open]
        return [address for stream in streams for address in stream.addresses]

    @property
    def waiting(self) -> int:
        """Commands without an answer."""
        return sum(stream.waiting for stream in self._streams)

    @property
    def moves(self) -> Moves:
        """How often brokers moved or throttled its parts, or lost them."""
        found = [stream.moves for stream in self._streams]
        return Moves(
            sum(each.migrations for each in found),
            sum(each.reconnections for each in found),
            sum(each.throttles for each in found),
        )

    @property
    def problem(self) -> Exception | None:
        """The most recent problem of one of its parts."""
        return next((stream.problem for stream in self._streams if stream.problem), None)

    async def open(self, timeout_s: float) -> None:
        """Wait until all parts are connected; ClientError if one is not in time, or is refused."""
        try:
            async with asyncio.timeout(timeout_s + 1):  # a stream that is too late says more
                await self._add(self._places[0], timeout_s)
                others = {place.id: asyncio.create_task(self._add(place, timeout_s)) for place in self._places[1:]}
                self._tasks |= others  # a failure aborts the others, too
                await asyncio.gather(*others.values())
            self._tasks.clear()
            self._ready = True
            self._adjust()
        except BaseException as problem:
            await self.abort()
            if isinstance(problem, TimeoutError):
                raise ClientError(f"not all parts of {self._spec.id!r} found a broker in time") from None
            raise

    def put(self, data: bytes, token: Any) -> None:
        """Write a command as soon as possible, together with others of this turn."""
        self._next().put(data, token)

    def put_now(self, data: bytes, token: Any) -> bool:
        """Write a command at once if possible; return whether it was."""
        return self._next().put_now(data, token)

    async def drain(self) -> None:
        """Wait until every command has its answer."""
        await asyncio.gather(*(stream.drain() for stream in self._streams))

    async def abort(self) -> None:
        """Close at once; unanswered commands fail."""
        self._ready = False
        tasks = [*self._tasks.values(), *self._leaving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(stream.abort() for stream in self._streams))

    def _next(self) -> Stream:
        streams = list(self._open.values())
        self._turn = (self._turn + 1) % len(streams)
        return min(streams[self._turn :] + streams[: self._turn], key=_waiting)

    async def _add(self, place: Place, timeout_s: float) -> None:
        spec = self._spec
        home = Assigned(self._cluster, self._topic, spec, place.address or None, place.id, self._told)
        stream = Stream(self._topic, place.id, spec.group, home, *self._stream_options)
        await stream.open(timeout_s)
        self._open[place.id] = stream
        self._streams.append(stream)

    def _told(self, places: list[Place]) -> None:
        """The controller has said which parts there are."""
        self._places = places
        if self._ready:
            self._adjust()

    def _adjust(self) -> None:
        """Have the parts that there should be; the first is always among them."""
        wanted = {place.id: place for place in self._places}
        for part in self._open.keys() - wanted.keys():
            task = asyncio.create_task(self._leave(self._open.pop(part)))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        for part in wanted.keys() - self._open.keys() - self._tasks.keys():
            self._tasks[part] = asyncio.create_task(self._add_later(wanted[part]))

    async def _add_later(self, place: Place) -> None:
        """Add a part that came later, however long it takes, while it is wanted."""
        try:
            while place.id in (each.id for each in self._places):
                try:
                    await self._add(place, _ADDING_S)
                except SRTMError:
                    await asyncio.sleep(_AGAIN_S)
                else:
                    break
        finally:
            del self._tasks[place.id]
        self._adjust()

    async def _leave(self, stream: Stream) -> None:
        """Close a part that is not needed any more, after its last answer."""
        await stream.drain()
        await stream.abort()


def _waiting(stream: Stream) -> int:
    return stream.waiting
