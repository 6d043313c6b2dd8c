"""`srtm latency`: what this host takes away by itself."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from srtm.cli.common import print_json
from srtm.errors import InputError
from srtm.units import NS_PER_S, format_ns, parse_duration_ns

_NOTICED_NS = 50_000  # gaps that a broker would notice


def latency(
    intrinsic: Annotated[bool, typer.Option("--intrinsic", help="Of the host alone, without any messages.")] = False,
    duration: Annotated[str, typer.Option(help="How long to look.")] = "5s",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Measure how long this host takes the processor away from a program that does nothing but look at the clock.

    No broker here can have a shorter tail. Example:

        srtm latency --intrinsic --duration 10s
    """
    if not intrinsic:
        raise InputError("say of what: --intrinsic is all that can be measured without a broker")
    longest_ns, lost = jitter(parse_duration_ns(duration))
    if as_json:
        print_json({"longest_ns": longest_ns, "lost": lost})
    else:
        print(f"longest gap {format_ns(longest_ns)}; {lost:.2%} of the time lost in gaps over {format_ns(_NOTICED_NS)}")


def jitter(duration_ns: int = NS_PER_S) -> tuple[int, float]:
    """Reads of the clock in a tight loop: the longest gap, and the share of time that was lost in noticeable ones."""
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
