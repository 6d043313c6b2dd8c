"""NSQ's protocol, interpreted: what one message costs to read and to write, beside the least that Python can do."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

from bench.measure import interleaved, show
from srtm.broker.message import Message
from srtm.protocol import client, frames
from srtm.protocol.client import ClientProtocol
from srtm.protocol.names import MAGIC_V2, Settings
from srtm.protocol.server import ServerProtocol

COUNT = 500
ROUNDS = 20
BODY = b"x" * 100
ID = b"0123456789abcdef"


def parsing(seed: int) -> None:
    """Messages of 100 bytes; `seed` changes nothing."""
    del seed
    server, consumer = ServerProtocol(Settings()), ServerProtocol(Settings())
    server.feed(MAGIC_V2)
    consumer.feed(MAGIC_V2 + client.sub("sensors", "c"))
    reader = ClientProtocol()
    batch = [Message(ID, 1, BODY, "p")] * COUNT
    pub = client.pub("sensors", BODY)
    pubs = pub * COUNT
    reads = [pubs[i : i + 4096] for i in range(0, len(pubs), 4096)]
    mpub = client.mpub("sensors", [BODY] * COUNT)
    fins, rdys, sent = client.fin(ID) * COUNT, client.rdy(100) * COUNT, frames.messages(batch)
    size_at = Struct(">i").unpack_from

    def one_by_one() -> None:
        for _ in range(COUNT):
            server.feed(pub)

    def in_reads() -> None:
        for data in reads:
            server.feed(data)

    def least() -> None:
        """Cut frames at their sizes and keep the bodies: no verb, no name, no check."""
        pos, found = 0, []
        while pos < len(mpub) - 21:
            (size,) = size_at(mpub, pos + 21)
            found.append(mpub[pos + 25 : pos + 25 + size])
            pos += 4 + size

    cases = {
        "PUB, many in a read": lambda: server.feed(pubs),
        "PUB, reads of 4 KiB": in_reads,
        "PUB, one in a read": one_by_one,
        "MPUB, per message": lambda: server.feed(mpub),
        "FIN": lambda: consumer.feed(fins),
        "RDY": lambda: consumer.feed(rdys),
        "message frame": lambda: frames.messages(batch),
        "message frame, read by a client": lambda: reader.feed(sent),
        "cutting at sizes alone": least,
    }
    taken = interleaved({name: _repeat(run) for name, run in cases.items()})
    base = taken["cutting at sizes alone"]
    show(
        "One message of 100 bytes through the protocol, interpreted",
        ["", "ns per message", "against cutting alone"],
        [[name, f"{s / COUNT / ROUNDS * 1e9:,.0f}", f"{s / base:.1f} ×"] for name, s in taken.items()],
    )


def _repeat(run: Callable[[], object]) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(ROUNDS):
            run()

    return repeated
