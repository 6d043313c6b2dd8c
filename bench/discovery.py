"""Discovery beside nsqlookupd: 1,000 brokers with 100 of 1,000 topics each come, are asked for, and go."""

from __future__ import annotations

import http.client
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import unpack

from bench.measure import show
from srtm.protocol import lookup
from srtm.protocol.names import MAGIC_V1

BROKERS, TOPICS, EACH = 1_000, 1_000, 100
ASKED = 300
_PARTS = Path(__file__).parent.parent / ".parts/bin"


def registrations(seed: int) -> None:
    """Times of one run; `seed` changes nothing."""
    del seed
    rows = []
    nsqlookupd = shutil.which("nsqlookupd", path=str(_PARTS)) or shutil.which("nsqlookupd")
    with _started([sys.executable, "-m", "srtm", "controller", "--tcp-port", "0", "--http-port", "0"]) as ours:
        rows.append(["srtm controller", *_measured(*ours)])
    if nsqlookupd:
        flags = ["--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0"]
        with _started([nsqlookupd, *flags]) as theirs:
            rows.append(["nsqlookupd", *_measured(*theirs)])
    columns = ["", "to come, s", "REGISTER, µs", "/lookup, ms", "/nodes, ms", "to go, s", "memory, MB"]
    show(f"{BROKERS:,} brokers with {EACH} of {TOPICS:,} topics each", columns, rows)


@contextmanager
def _started(command: list[str]) -> Iterator[tuple[int, int, int]]:
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            ports: dict[str, str] = {}
            while len(ports) < 2:
                assert process.poll() is None, Path(log.name).read_text()
                time.sleep(0.01)
                ports = dict(re.findall(r"(TCP|HTTP)(?:: listening on)? [\d.]+:(\d+)", Path(log.name).read_text()))
            yield process.pid, int(ports["TCP"]), int(ports["HTTP"])
        finally:
            process.terminate()
            process.wait(20)


def _measured(pid: int, tcp: int, port: int) -> list[str]:
    began = time.perf_counter()
    connections = []
    for number in range(BROKERS):
        connection = socket.create_connection(("127.0.0.1", tcp))
        peer = lookup.PeerInfo("127.0.0.1", f"broker-{number}", 4150, 4151, "1.3.0")
        topics = ((number + i) % TOPICS for i in range(EACH))
        connection.sendall(MAGIC_V1 + lookup.identify(peer) + b"".join(lookup.register(f"t{each}") for each in topics))
        _answers(connection, EACH + 1)
        connections.append(connection)
    came_s = time.perf_counter() - began
    page = http.client.HTTPConnection("127.0.0.1", port)
    lookups = statistics.median(_asked(page, f"/lookup?topic=t{i}")[0] for i in range(ASKED))
    nodes = statistics.median(_asked(page, "/nodes")[0] for _ in range(5))
    memory = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    began = time.perf_counter()
    for connection in connections:
        connection.close()
    while len(_asked(page, "/nodes")[1]) > 100:
        pass
    went_s = time.perf_counter() - began
    page.close()
    return [
        f"{came_s:.2f}",
        f"{came_s / BROKERS / EACH * 1e6:.0f}",
        f"{lookups * 1e3:.2f}",
        f"{nodes * 1e3:.0f}",
        f"{went_s:.2f}",
        f"{int(memory[1]) / 1024:.0f}" if memory else "?",
    ]


def _answers(connection: socket.socket, count: int) -> None:
    with connection.makefile("rb") as reader:
        for _ in range(count):
            reader.read(unpack(">i", reader.read(4))[0])


def _asked(page: http.client.HTTPConnection, path: str) -> tuple[float, bytes]:
    began = time.perf_counter()
    page.request("GET", path)
    body = page.getresponse().read()
    return time.perf_counter() - began, body
