"""The page's feed: the cluster as one document each second, the same for all viewers, and ten minutes of each topic.

In: the cluster's statistics. Out: server-sent events, a `snapshot` of the document first, then a `patch` each second (a
JSON merge patch, RFC 7396: null means that a member is gone). The feed computes the document once for all viewers, one
topic per turn of the loop, and without viewers only as often as the history needs it. A viewer that falls behind loses
patches and gets a snapshot instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from srtm.control import statistics
from srtm.control.api.explain import one_bucket_ns
from srtm.control.api.schema import member_out, topic_out
from srtm.control.clock import now_ns
from srtm.errors import SRTMError
from srtm.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from srtm.control.controller import Controller
    from srtm.control.topic import ManagedTopic

PERIOD_S = 1.0
STEP_S = 5  # between two points of the history
HISTORY_S = 600
_UNREAD = 4  # events a viewer may be behind

log = logging.getLogger(__name__)

Document = dict[str, Any]


class Feed:
    """The stream of events that all viewers share."""

    def __init__(self, controller: Controller, refused: Callable[[], list[Document]] = list) -> None:
        self._controller = controller
        self._refused = refused  # brokers that may not register
        self._viewers: dict[asyncio.Queue[bytes | None], bool] = {}  # and whether it has a snapshot
        self._woken = asyncio.Event()
        self._told: Document = {}
        self._points: dict[str, deque[Document]] = {}
        self._noted_ns = 0
        self._rosters: dict[str, int] = {}
        self._closed = False

    async def run(self) -> None:
        """Compute and send the document once a second, forever."""
        while True:
            began_ns = now_ns()
            try:
                await self._once(began_ns)
            except Exception:  # a fault of one topic must not end the feed
                log.exception("FEED: update failed; continuing")
            spent_s = (now_ns() - began_ns) / NS_PER_S
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.05, PERIOD_S - spent_s)):
                    await self._woken.wait()
            self._woken.clear()

    async def predict(self) -> None:
        """Compute one-bucket predictions for topics whose publishers changed and then stayed the same, forever."""
        while True:
            await asyncio.sleep(PERIOD_S)
            for topic in self._to_predict():
                roster = topic.layout.roster
                try:
                    found = await asyncio.to_thread(one_bucket_ns, topic)
                except SRTMError as problem:
                    log.info("TOPIC(%s): no prediction for a single bucket: %s", topic.name, problem)
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
        """Disconnect all viewers."""
        self._closed = True
        for queue in self._viewers:
            _put(queue, None)

    async def events(self, still: Callable[[], bool] = lambda: True) -> AsyncIterator[bytes]:
        """The events of one viewer, while it is `still` allowed."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_UNREAD)
        self._viewers[queue] = False
        self._woken.set()
        try:
            while not self._closed and (event := await queue.get()) is not None and still():
                yield event
        finally:
            del self._viewers[queue]

    def history(self, topic: str) -> list[Document]:
        """The last ten minutes of a topic, a point every five seconds."""
        return list(self._points.get(topic, ()))

    async def _document(self, at_ns: int) -> Document:
        controller = self._controller
        topics = {}
        for topic in list(controller.topics.values()):
            found = topic_out(statistics.of_topic(controller.state, topic, at_ns))
            found["brokers"] = {each.pop("broker"): each for each in found["brokers"]}
            topics[topic.name] = found
            await asyncio.sleep(0)
        return {
            "at_ms": at_ns // NS_PER_MS,
            "brokers": {each.name: member_out(each) for each in statistics.of_brokers(controller.state)},
            "refused": {f"{each['name']} {each['from']}": each for each in self._refused()},
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
        """Topics whose publishers differ from those of the last prediction, and have not changed for a second."""
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
    """The merge patch that turns one document into another."""
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
    """Replace everything a viewer has not read by one event."""
    while not queue.empty():
        queue.get_nowait()
    queue.put_nowait(event)


def _event(kind: str, data: Document) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(data))
