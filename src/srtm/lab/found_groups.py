"""Beyond the paper: SRTM with groups found from arrival times, against groups declared by users, and none.

Groups are found in another minute of traffic, by the function that the pipeline runs. `found_noise` has groups whose
publishers send within an interval, as in Fig. 11.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from srtm.lab.fast_fit import EARLIER
from srtm.lab.fig9 import GROUP_SIZES, TINY, population
from srtm.lab.fig11 import SPREADS_MS
from srtm.lab.fig11 import TINY as TINY_SPREADS_MS
from srtm.lab.result import SLO_MS, Claim, Panel, Point, Result, Row, Rows, Series, listed, points
from srtm.lab.world import WITH_MARGIN, facts
from srtm.model.correlation import Options, find_groups
from srtm.model.onsets import onsets_of

if TYPE_CHECKING:
    from srtm.lab.world import World
    from srtm.sim.simulate import SimulatedTopic

KNOWN = {"declared": "groups declared", "found": "groups found", "none": "no groups"}


def run(world: World, point: Point, seed: int) -> list[Row]:
    """Run the same traffic and policy with declared, found and no groups."""
    topic = world.topic(population(point), seed, WITH_MARGIN)
    earlier = world.topic(population(point), seed + EARLIER)
    ids = [publisher.id for publisher in earlier.publishers]
    onsets = onsets_of(*earlier.arrivals, ids, Options().silence_ns)
    found = {member: group.name for group in find_groups(onsets) for member in group.publishers}
    topics = {"declared": topic, "found": _grouped(topic, found), "none": _grouped(topic, {})}
    return [{**point, "groups": kind, **facts(world.fit(known, "srtm", seed))} for kind, known in topics.items()]


def _grouped(topic: SimulatedTopic, groups: dict[str, str]) -> SimulatedTopic:
    return replace(topic, publishers=[replace(p, group=groups.get(p.id)) for p in topic.publishers])


def draw(rows: Rows) -> Panel:
    """Mean and standard deviation of p99, k beside each point."""
    return _drawn(rows, "group_size", "publishers in a correlation group")


def _draw_noise(rows: Rows) -> Panel:
    return _drawn(rows, "spread_ms", "spread of a group of 25 (ms)")


def _drawn(rows: Rows, along: str, axis: str) -> Panel:
    shown = [Series.of(name, rows.where(groups=kind), along, "p99_ms", label="k") for kind, name in KNOWN.items()]
    return Panel("SRTM, Poisson topic", axis, "p99 latency (ms)", shown, True, SLO_MS)


def _tails(rows: Rows, kind: str) -> list[float]:
    along = "spread_ms" if "spread_ms" in rows[0] else "group_size"
    return rows.where(groups=kind).means("p99_ms", along)


def _as_good_as_declared(rows: Rows) -> tuple[bool, str]:
    declared, found = _tails(rows, "declared"), _tails(rows, "found")
    near = all(f <= SLO_MS or f <= d for d, f in zip(declared, found, strict=True))
    return near, f"{listed(found)} against {listed(declared)} ms"


def _better_than_none(rows: Rows) -> tuple[bool, str]:
    none, found = _tails(rows, "none"), _tails(rows, "found")
    return all(f <= n for n, f in zip(none, found, strict=True)), f"{listed(found)} against {listed(none)} ms"


_CLAIMS = [
    Claim(
        "found groups serve as well as declared ones (within the SLO, or no slower)",
        "—",
        _as_good_as_declared,
        kind="ours",
    ),
    Claim("and no worse than none", "—", _better_than_none, kind="ours"),
]
RESULTS = [
    Result(
        "found_groups",
        "Groups found against groups declared",
        "The paper calls measuring correlation challenging and asks users for it.",
        points(group_size=GROUP_SIZES),
        points(group_size=TINY),
        run,
        _CLAIMS,
        draw,
        weight=6,
    ),
    Result(
        "found_noise",
        "Groups found in noisy traffic",
        "The wider a group is spread, the harder it is to find, and the less there is to gain.",
        points(group_size=[25], spread_ms=SPREADS_MS),
        points(group_size=[25], spread_ms=TINY_SPREADS_MS),
        run,
        _CLAIMS,
        _draw_noise,
        weight=6,
    ),
]
