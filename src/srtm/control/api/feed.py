"""What people watch: the cluster as one document, each second, for all viewers alike, and ten minutes of every topic.

In: the controller. Out: server-sent events, `snapshot` (all of it) first and then `patch` (a JSON merge patch, RFC
7396, where a member that is null or left out is not there). It is computed once for all viewers, a topic at a time, so
that nothing else waits for it long; without viewers only as often as the history needs it. A viewer that does not read
loses patches and gets a snapshot instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from srtm.control.api.explain import one_bucket_ns
from srtm.control.api.schema import members_out, topic_out
from srtm.control.clock import now_ns
from srtm.errors import SRTMError
from srtm.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from srtm.control.controller import Controller
    from srtm.control.topic import ManagedTopic

PERIOD_S = 1.0
STEP_S = 5  # between two points of a history
HISTORY_S = 600
_UNREAD = 4  # events that a viewer may leave unread

log = logging.getLogger(__name__)

Document = dict[str, Any]


class Feed:
    """One stream for whoever looks."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._viewers: dict[asyncio.Queue[bytes | None], bool] = {}  # and whether it has had a snapshot
        self._woken = asyncio.Event()
        self._told: Document = {}
        self._points: dict[str, deque[Document]] = {}
        self._noted_ns = 0
        self._rosters: dict[str, int] = {}
        self._closed = False

    async def run(self) -> None:
        """Compute and tell; for ever."""
        while True:
            began_ns = now_ns()
            try:
                await self._once(began_ns)
            except Exception:  # what one topic brings must not leave viewers in the dark about the others for ever
                log.exception("FEED: goes on after")
            spent_s = (now_ns() - began_ns) / NS_PER_S
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.05, PERIOD_S - spent_s)):
                    await self._woken.wait()
            self._woken.clear()

    async def predict(self) -> None:
        """Ask the model about topics whose publishers have changed, and are done with it; for ever."""
        while True:
            await asyncio.sleep(PERIOD_S)
            for topic in self._to_predict():
                roster = topic.layout.roster
                try:
                    found = await asyncio.to_thread(one_bucket_ns, topic)
                except SRTMError as problem:
                    log.info("TOPIC(%s): nothing is known of one bucket: %s", topic.name, problem)
                    found = None
                topic.one_bucket = (roster, found)

    async def _once(self, now: int) -> None:
        due = now - self._noted_ns >= STEP_S * NS_PER_S
        if self._viewers or due:
            document = await self._document(now)
            if due:
                self._note(document, now)
            self._tell(document)

    def close(self) -> None:
        """Send all viewers away."""
        self._closed = True
        for queue in self._viewers:
            _put(queue, None)

    async def events(self) -> AsyncIterator[bytes]:
        """What one viewer gets."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_UNREAD)
        self._viewers[queue] = False
        self._woken.set()
        try:
            while not self._closed and (event := await queue.get()) is not None:
                yield event
        finally:
            del self._viewers[queue]

    def history(self, topic: str) -> list[Document]:
        """The last ten minutes of a topic."""
        return list(self._points.get(topic, ()))

    async def _document(self, at_ns: int) -> Document:
        controller = self._controller
        topics = {}
        for topic in list(controller.topics.values()):
            found = topic_out(topic, controller, at_ns, events=False)
            found["brokers"] = {each.pop("broker"): each for each in found["brokers"]}
            topics[topic.name] = found
            await asyncio.sleep(0)
        return {
            "at_ms": at_ns // NS_PER_MS,
            "token": controller.options.token is not None,
            "brokers": {each["name"]: each for each in members_out(controller)},
            "topics": topics,
        }

    def _tell(self, document: Document) -> None:
        snapshot = patch = None
        for queue, begun in self._viewers.items():
            if begun and not queue.full():
                patch = patch or _event("patch", difference(self._told, document))
                queue.put_nowait(patch)
            else:
                snapshot = snapshot or _event("snapshot", document)
                _put(queue, snapshot)
                self._viewers[queue] = True
        self._told = document

    def _note(self, document: Document, at_ns: int) -> None:
        self._noted_ns = at_ns
        self._points = {name: self._points.get(name, _new_points()) for name in document["topics"]}
        for name, topic in document["topics"].items():
            kept = ("access_ms", "processing_ms", "total_ms", "penalty_ms", "rate", "waiting", "k")
            self._points[name].append({"at_ms": document["at_ms"], **{key: topic[key] for key in kept}})

    def _to_predict(self) -> list[ManagedTopic]:
        """Topics whose publishers are others than the model was asked about, and the same as a second ago."""
        topics = self._controller.topics
        before, self._rosters = self._rosters, {topic.name: topic.layout.roster for topic in topics.values()}
        return [
            topic
            for topic in topics.values()
            if topic.layout.publishers
            and topic.layout.roster == before.get(topic.name)
            and (topic.one_bucket is None or topic.one_bucket[0] != topic.layout.roster)
        ]


def difference(before: Document, after: Document) -> Document:
    """The merge patch that makes one document of another."""
    patch: Document = {}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            if inner := difference(old, value):
                patch[key] = inner
        elif value != old or key not in before:
            patch[key] = value
    return patch | dict.fromkeys(before.keys() - after.keys())


def _new_points() -> deque[Document]:
    return deque(maxlen=HISTORY_S // STEP_S)


def _put(queue: asyncio.Queue[bytes | None], event: bytes | None) -> None:
    """The only thing that is left to be read."""
    while not queue.empty():
        queue.get_nowait()
    queue.put_nowait(event)


def _event(kind: str, data: Document) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(data))
