"""Whether a run is a fair test of its placement: how much of r was in force, and how long the machine stalled.

In: the controller's report on the topic each second, and the probe's. Out: figures of the seconds before recording and
of the recorded ones, and sentences about what made a run invalid.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from srtm.units import NS_PER_S, format_ns

WHOLE = 0.99  # of r; less is a bug of the control plane, and messages wait under any placement
TOLERATED = 0.01  # of the time: a p99 ignores that much


@dataclass(frozen=True)
class Sample:
    """The controller's report at one moment: the fraction of r in force, and the recent p99 access delay."""

    at_s: float
    in_force: float
    access_ms: float | None
    waits_for: tuple[str, ...] = ()

    @classmethod
    def of(cls, at_s: float, topic: dict[str, Any]) -> Sample:
        """From the controller's document of a topic."""
        shares = topic.get("shares") or {}
        held = sum(broker["r"] for broker in topic["brokers"]) / topic["r"]
        access = topic["access_ms"]
        waits_for = shares.get("waits_for") or ()
        return cls(
            at_s,
            shares.get("in_force_ratio", held),
            access["p99"] if access else None,
            tuple([waits_for] if isinstance(waits_for, str) else map(str, waits_for)),
        )


@dataclass(frozen=True)
class Second:
    """The probe's report on about one second of the machine."""

    at_s: float
    longest_s: float
    lost_s: float


@dataclass(frozen=True)
class Stretch:
    """A part of a run: the minimum of r in force, the worst p99 access delay, and the machine's stalls."""

    seconds: float
    in_force: float | None
    access_ms: float | None
    waits_for: tuple[str, ...]
    longest_stall_s: float
    stalled: float

    @classmethod
    def between(cls, begin_s: float, end_s: float, samples: Iterable[Sample], host: Iterable[Second]) -> Stretch:
        """From the reports of this time."""
        here = [sample for sample in samples if begin_s <= sample.at_s < end_s]
        least = min(here, key=lambda sample: sample.in_force, default=None)
        stalls = [second for second in host if begin_s < second.at_s <= end_s]
        return cls(
            end_s - begin_s,
            least and least.in_force,
            max((sample.access_ms for sample in here if sample.access_ms is not None), default=None),
            least.waits_for if least else (),
            max((second.longest_s for second in stalls), default=0.0),
            sum(second.lost_s for second in stalls) / (end_s - begin_s),
        )

    @property
    def short(self) -> bool:
        """Whether part of r was in force at no broker."""
        return self.in_force is not None and self.in_force < WHOLE

    @property
    def stalls(self) -> bool:
        """Whether the machine's stalls alone could raise a p99."""
        return self.stalled > TOLERATED


def causes(policy: str, seen: dict[str, Any], recorded: Stretch) -> list[str]:
    """What made a run invalid, in sentences; empty if its figures show its placement."""
    found = []
    if recorded.short:
        waits = f" (the controller was waiting for {', '.join(recorded.waits_for)})" if recorded.waits_for else ""
        found.append(
            f"The run under {policy} is not valid: at times only {recorded.in_force:.0%} of r was in force{waits}."
            " This is a bug in the control plane; please report it."
        )
    waited = seen["access_ms"] is not None and seen["access_ms"]["p99"] >= seen["slo_ms"]
    split = seen["k"] > 1
    if recorded.stalls and seen["slo_met"] is False and not (split and waited):  # else the split alone explains it
        found.append(
            f"The run under {policy} is not valid: the host stalled ready programs for {recorded.stalled:.1%} of the"
            f" time, up to {stall(recorded)}\nat once; a p99 tolerates {TOLERATED:.0%}. Stop other programs and run the"
            " demo again."
        )
    return found


def stall(stretch: Stretch) -> str:
    """The longest stall, formatted."""
    return format_ns(round(stretch.longest_stall_s * NS_PER_S))
