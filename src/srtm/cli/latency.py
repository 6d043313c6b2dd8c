"""`srtm latency`: the latency that this host adds by itself."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from srtm.cli.common import AsJson, print_json
from srtm.errors import InputError
from srtm.units import NS_PER_S, format_ns, parse_duration_ns

_NOTICED_NS = 50_000  # gaps that a broker would notice


def latency(
    intrinsic: Annotated[bool, typer.Option("--intrinsic", help="Measure the host alone, without messages")] = False,
    duration: Annotated[str, typer.Option(metavar="DURATION", help="Length of the measurement")] = "5s",
    as_json: AsJson = False,
) -> None:
    """Measure how long this host pauses a program that only reads the clock.

    No broker on this host can have a shorter tail.

    Example:
        srtm latency --intrinsic --duration 10s
    """
    if not intrinsic:
        raise InputError("give --intrinsic; it is the only measurement that needs no broker")
    longest_ns, lost = jitter(parse_duration_ns(duration))
    if as_json:
        print_json({"longest_ns": longest_ns, "lost": lost})
    else:
        print(f"longest gap {format_ns(longest_ns)}; {lost:.2%} of the time lost in gaps over {format_ns(_NOTICED_NS)}")


def jitter(duration_ns: int = NS_PER_S) -> tuple[int, float]:
    """Read the clock in a tight loop: the longest gap in ns, and the fraction of time lost in gaps a broker notices."""
    clock = time.perf_counter_ns
    began = last = clock()
    longest = lost = 0
    while last - began < duration_ns:
        now = clock()
        gap = now - last
        last = now
        if gap > longest:
            longest = gap
        if gap > _NOTICED_NS:
            lost += gap
    return longest, lost / (last - began)
