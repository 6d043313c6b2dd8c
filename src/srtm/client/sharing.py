"""How a subscriber shares `max_in_flight` out among its links.

A link that delivered nothing lately keeps room for one message; the others share the rest equally. If there are more
links than messages allowed in flight, links take turns.
"""

from __future__ import annotations

from collections.abc import Iterable

from srtm.client.links import Link


class Sharing:
    """Gives each subscribed link its RDY count."""

    def __init__(self, max_in_flight: int) -> None:
        self._most = max_in_flight
        self._turn = 0

    def share(self, subscribed: Iterable[Link]) -> None:
        """Tell every link how many messages it may have in flight."""
        links = list(subscribed)
        if not links:
            return
        if len(links) > self._most:
            self._take_turns(links)
            return
        busy = [link for link in links if not link.idle] or links
        each, more = divmod(self._most - (len(links) - len(busy)), len(busy))
        for link in links:
            if link not in busy:
                link.set_ready(1)
        for number, link in enumerate(busy):
            link.set_ready(each + (number < more))

    def _take_turns(self, links: list[Link]) -> None:
        self._turn = (self._turn + self._most) % len(links)
        chosen = (links[self._turn :] + links[: self._turn])[: self._most]
        for link in links:
            if link not in chosen:
                link.set_ready(0)
        for link in chosen:
            link.set_ready(1)
