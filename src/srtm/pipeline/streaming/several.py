"""The logs of several topics as one: a list of topics, or all whose names match a pattern.

Offsets are named `topic/broker`, and everything else is asked of the logs of that topic. Topics of a pattern may come
while a query runs; they join as brokers do. Topics of a pattern that Spark cannot read again are left out.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from srtm.errors import InputError
from srtm.pipeline.streaming.locating import located
from srtm.pipeline.streaming.logs import Contract, Logs, Refused, ask

if TYPE_CHECKING:
    from srtm.pipeline.streaming.positions import Extent, Position
    from srtm.pipeline.streaming.settings import Settings

logger = logging.getLogger(__name__)


def find(settings: Settings) -> Logs | None:
    """The logs of the settings' topics; None if no broker has the one topic yet."""
    return Several(settings) if settings.several else located(settings)


class Several(Logs):
    """Logs by topic."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._of: dict[str, Logs] = {}
        self._left_out: set[str] = set()

    def part(self, name: str) -> tuple[str, str]:
        """The topic and the broker of an offset's name."""
        topic, slash, broker = name.partition("/")
        if not slash:
            raise InputError(
                f"{name!r} is an offset of a query of one topic: name it topic/broker, or use another checkpoint"
            )
        return topic, broker

    def look(self, *, strict: bool = False) -> dict[str, str]:
        """URLs of the current brokers, by topic and name."""
        return {
            f"{topic}/{broker}": url
            for topic in self._topics()
            for broker, url in self._logs(topic).look(strict=strict).items()
        }

    def url(self, broker: str, timeout_s: float) -> str:
        """The URL of a broker."""
        topic, name = self.part(broker)
        return self._logs(topic).url(name, timeout_s)

    def unknown(self, brokers: dict[str, str]) -> list[str]:
        """The listed topics that exist neither at a broker nor under contract; a pattern may match none yet."""
        here = {self.part(name)[0] for name in brokers}
        return [
            each
            for topic in self._settings.topics
            for each in self._logs(topic).unknown({topic: ""} if topic in here else {})
        ]

    def contract(self) -> Contract | None:
        """The sum of the topics' buckets; None if one of them has none."""
        found = [self._logs(topic).contract() for topic in self._topics()]
        buckets = [each for each in found if each is not None]
        if not buckets or len(buckets) < len(found):
            return None
        return Contract(sum(each.r for each in buckets), sum(each.b for each in buckets))

    def extent(self, broker: str) -> Extent | None:
        """The extent of a log; None if its broker does not have the topic, or if a pattern leaves it out."""
        topic, name = self.part(broker)
        try:
            return self._logs(topic).extent(name)
        except InputError as problem:
            if self._settings.pattern is None:
                raise
            if topic not in self._left_out:
                logger.warning("%s; leaving it out", problem)
            self._left_out.add(topic)
            return None

    def trim(self, broker: str, before: Position) -> None:
        """Delete older messages of a topic at a broker."""
        topic, name = self.part(broker)
        self._logs(topic).trim(name, before)

    def _logs(self, topic: str) -> Logs:
        """The logs of a topic; looked up until a broker has it."""
        if topic not in self._of:
            settings = replace(self._settings, topic=topic, topics=(), pattern=None)
            found = located(settings)
            if found is None:
                return Logs(settings)
            self._of[topic] = found
        return self._of[topic]

    def _topics(self) -> list[str]:
        """The topics of the list, or those that match now and those that matched before."""
        settings = self._settings
        if settings.pattern is None:
            return list(settings.topics)
        if settings.brokers:
            answers = [
                json.loads(ask(f"{url}/stats", format="json", include_clients="false")) for url in settings.brokers
            ]
            names = {str(topic["topic_name"]) for answer in answers for topic in answer["topics"]}
        else:
            try:
                names = set(json.loads(ask(f"{settings.controller}/topics"))["topics"])
            except (Refused, ValueError, KeyError, TypeError):
                raise InputError(f"{settings.controller} does not list topics: is it a controller?") from None
        return sorted({name for name in names if re.fullmatch(settings.pattern, name)} | self._of.keys())
