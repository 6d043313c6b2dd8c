"""`python -m bench.variant WITHOUT…`: our broker without some of its parts, to see what they cost.

Without `stamps`, reads carry no kernel time; without `statistics`, no latencies are kept; without `freeze`, Python's
collector runs as it does by default. (A bucket is set over HTTP, or not.)
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import uvloop

from srtm.broker import listener, recent, run
from srtm.broker.options import BrokerOptions


async def _never(_broker: object) -> None:
    await asyncio.Event().wait()


def main() -> None:
    without = set(sys.argv[1:])
    parts: dict[str, list[tuple[Any, str, Any]]] = {
        "stamps": [(listener, "SO_TIMESTAMPNS", -1)],  # an option that no system knows
        "statistics": [(recent, "_MOST", 0)],
        "freeze": [(run, "_no_collector", contextlib.nullcontext), (run, "_tidy", _never)],
    }
    for part in without:
        for module, name, value in parts[part]:
            assert hasattr(module, name)
            setattr(module, name, value)
    uvloop.run(run.run(BrokerOptions(tcp_port=0, http_port=0, name="variant")))


if __name__ == "__main__":
    main()
