"""The contracts that the topics of a recorded run are judged by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from srtm.model.timeline import Timeline

Contracts = Mapping[str, Timeline] | Timeline  # by topic, or one for all topics


def held_by(contracts: Contracts, topics: Iterable[str]) -> tuple[dict[str, Timeline], dict[str, str]]:
    """The contract of each topic, and an error for each that has none."""
    if isinstance(contracts, Timeline):
        return dict.fromkeys(topics, contracts), {}
    held, errors = {}, {}
    for topic in topics:
        if topic in contracts:
            held[topic] = contracts[topic]
        else:
            errors[topic] = "this topic has no contract (r, b)"
    return held, errors
