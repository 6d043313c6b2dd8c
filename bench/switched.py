"""`python -m bench.switched` with the flags of `srtm broker`: a broker whose stream of arrivals ends at SIGUSR1.

Streams end by themselves after five minutes; `bench.advise cost` compares seconds with and without one at one broker.
"""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any

from srtm import program
from srtm.broker.arrivals import stream_of
from srtm.broker.options import BrokerOptions
from srtm.broker.run import run
from srtm.broker.turn import Turn
from srtm.cli.plain import plain_options

if TYPE_CHECKING:
    import asyncio


class Switched(Turn):
    """A turn that ends the stream when it is told to."""

    __slots__ = ()

    def __init__(self, loop: asyncio.AbstractEventLoop, *arguments: Any, **named: Any) -> None:
        super().__init__(loop, *arguments, **named)
        loop.add_signal_handler(signal.SIGUSR1, self._off)

    def _off(self) -> None:
        stream = stream_of(self)
        if stream is not None:
            stream.close()


def main() -> None:
    """Serve until told to stop."""
    options = plain_options(BrokerOptions, sys.argv[1:])
    assert options is not None
    program.run(run(options, Switched))


if __name__ == "__main__":
    main()
