"""Stretches that are followed twice: from the state before them, and from none. No Spark in here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.pipeline.traces.batches import by_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from srtm.model import scan
    from srtm.pipeline.traces.batches import Batches, Ints

    Both = tuple[scan.State, scan.State]  # behind a stretch: after what came before it, and alone


def until_rejoined(
    batches: Batches,
    key: str,
    entering: Mapping[tuple[str, int], scan.State],
    proceed: Callable[[str, Ints, scan.State, scan.State | None], Both | None],
) -> None:
    """Follow stretches both from the state before them and from none, as long as that makes a difference.

    `proceed` takes a topic's next times and both states, and returns the states behind them, or None to give up.
    """
    awaited = {topic for topic, _ in entering}
    states: dict[str, tuple[scan.State, scan.State | None] | None] = {}
    for batch in batches:
        for topic, rows in by_topic(batch):
            times = rows.column(key).to_numpy()
            if topic not in states:
                start = entering.get((topic, int(times[0])))
                states[topic] = (start, None) if start else None
            before = states[topic]
            if before is not None:
                both = proceed(topic, times, *before)
                states[topic] = None if both is None or both[0] == both[1] else both
        if awaited <= states.keys() and not any(states.values()):
            break  # nothing after this can differ
