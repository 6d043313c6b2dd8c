"""Section 5.3: garbage collection, which a simulation does not have and Python does in another way than Go."""

from __future__ import annotations

from srtm.lab.result import Claim, Panel, Result

_WHY = (
    "The claim is about Go's concurrent collector, which marks memory while messages pass. CPython frees a message as"
    " soon as nobody refers to it; only cycles need a collector. A broker freezes what it has when it starts, switches"
    " the collector off, and collects when it is idle: a full collection takes 9 to 18 ms before that (busy host), and"
    " less than 0.01 ms after (python -m bench.collector). No buffer need be allocated in advance."
)

RESULTS = [
    Result(
        "gc",
        "Garbage collection",
        "Go's collector lengthened the tail of the paper's brokers; ours run without one.",
        [],
        [],
        lambda _world, _point, _seed: [],
        [
            Claim(
                "garbage collection lengthens the 99th percentile significantly",
                "significant",
                None,
                where="5.3, ¶ 1",
                why=_WHY,
            ),
            Claim("buffers that are allocated in advance mitigate that", "mitigated", None, where="5.3, ¶ 2", why=_WHY),
        ],
        lambda _rows: Panel("", "", "", []),
    )
]
