"""The places that a subscriber follows: those its sources name, each with a link.

In: places, by source. Out: links, to the subscriber that follows them. A place that no source names any more keeps its
link, no longer listed, until the link ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from srtm.client.links import Hub, Link
from srtm.client.places import Places


class Followed:
    """Links to every place that a source names; iterating over it gives the links."""

    def __init__(self, hub: Hub, places: Places, timeout_ms: int | None) -> None:
        self._hub = hub
        self._places = places
        self._timeout_ms = timeout_ms
        self._found: dict[object, set[str]] = {}  # places by source: a number, or a broker that delivers elsewhere
        self._links: dict[str, Link] = {}

    def __iter__(self) -> Iterator[Link]:
        return iter(list(self._links.values()))

    def follow(self, source: object, found: set[str], brokers: Iterable[str]) -> None:
        """Have a link to every place that this source and the others name; `brokers` are known to be brokers."""
        self._found[source] = found
        for address in brokers:
            self._places.is_broker(address)
        wanted = self._places.keys(set().union(*self._found.values()))
        for key in wanted.keys() - self._links.keys():
            self._links[key] = self._places.link(self._hub, key, wanted[key], self._timeout_ms)
        for key, link in self._links.items():
            link.listed = key in wanted

    def forget(self, link: Link) -> None:
        """A link ended, and so did what its broker told."""
        for key, found in list(self._links.items()):
            if found is link:
                del self._links[key]
        self._found.pop(link.address, None)

    @property
    def subscribed(self) -> list[Link]:
        """Links over which messages may come."""
        return [link for link in self if link.subscribed]

    @property
    def subscribed_everywhere(self) -> bool:
        """Whether there is a listed place that delivers, and every such place is subscribed to."""
        links = [link for link in self if link.listed and link.standing != "elsewhere"]
        return bool(links) and all(link.subscribed for link in links)

    @property
    def held(self) -> int:
        """Messages delivered and not answered."""
        return sum(len(link.held) for link in self)

    def look(self, linger: int) -> None:
        """Count idle looks of each link; end unlisted links that are not subscribed, or idle for longer than this."""
        for link in self:
            link.idle = 0 if link.lately or link.held else link.idle + 1
            link.lately = 0
            if not link.listed and (link.idle > linger or not link.subscribed):
                link.task.cancel()
