"""`python -m bench.disk [--folder FOLDER]`: disk topics beside nsqd and JetStream that sync, in one run.

1, 10 and 1,000 publishers each send a message of 100 bytes when their last is acknowledged (bench/acked.c); nobody
subscribes. Each program has one core, the load another, and all write to the same disk. They take turns and sleep
while others are measured; before each turn, a bare file shows what a sync of the disk takes at that moment.

What an acknowledgement promises differs. Ours comes after the sync of the commit that holds the message, and one
commit holds all messages that came during the last. nsqd runs with --mem-queue-size=0 --sync-every=1: it answers once
the message is written to a file, and syncs that file and its metadata after the answer, before the next message.
JetStream runs with sync_interval: always, and answers after it has synced the message.
`--order` shows this with strace: system calls of each program between two messages of one publisher.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench import host, peers
from bench.log import both, flushes
from bench.measure import show

if TYPE_CHECKING:
    from bench.peers import Acked, Peer, Running

PUBLISHERS = (1, 10, 1_000)
_SYNCS = 100


def made(folder: Path) -> list[Peer]:
    """The programs that can be had, each with a part of the folder; the others are said to be missing."""
    found = []
    for make in (_ours, _nsqd, _jetstream):
        try:
            found.append(make(folder))
        except peers.Missing as reason:
            print(f"left out: {reason}")
    return found


def _ours(folder: Path) -> Peer:
    peer = peers.srtm(bucket=False, flags=("--data-path", str(folder / "srtm")))
    return dataclasses.replace(peer, disk=True)


def _nsqd(folder: Path) -> Peer:
    data = folder / "nsqd"
    data.mkdir()
    kept = [flag for flag in peers.nsqd().command if not flag.startswith(("-data-path", "-mem-queue-size"))]
    return dataclasses.replace(
        peers.nsqd(), command=(*kept, f"-data-path={data}", "-mem-queue-size=0", "-sync-every=1"), load=()
    )


def _jetstream(folder: Path) -> Peer:
    settings = folder / "jetstream.conf"
    settings.write_text(f'jetstream {{ store_dir: "{folder / "jetstream"}", sync_interval: always }}\n')
    peer = peers.nats()
    return dataclasses.replace(peer, name="JetStream", command=(*peer.command, "-c", str(settings)))


def create_stream(peer: Running) -> None:
    """Make the stream that keeps the subject `bench` in files."""
    wanted = json.dumps({"name": "bench", "subjects": ["bench"], "storage": "file", "num_replicas": 1}).encode()
    with peer.awake(), socket.create_connection(("127.0.0.1", peer.port), 10) as sock:
        sock.sendall(b'CONNECT {"verbose":false}\r\nSUB made 1\r\n')
        sock.sendall(b"PUB $JS.API.STREAM.CREATE.bench made %d\r\n%b\r\n" % (len(wanted), wanted))
        said = b""
        while b"MSG made" not in said or not said.endswith(b"}\r\n"):
            said += sock.recv(65536)
    if b'"error"' in said:
        raise RuntimeError(f"JetStream: {said.decode()}")


def sync_ms(folder: Path) -> tuple[float, float]:
    """Median and p99 of appending 200 bytes to a file and syncing it, in ms."""
    descriptor = os.open(folder / "bare", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    times = []
    for _ in range(_SYNCS):
        began = time.perf_counter()
        os.write(descriptor, bytes(200))
        os.fdatasync(descriptor)
        times.append(1e3 * (time.perf_counter() - began))
    os.close(descriptor)
    return both(times)


def compare(found: list[Running], folder: Path, turns: int, seconds: float) -> None:
    rows = []
    for publishers in PUBLISHERS:
        runs: dict[str, list[tuple[Acked, float]]] = {peer.peer.name: [] for peer in found}
        syncs = []
        for _ in range(turns):
            syncs.append(sync_ms(folder))
            for peer in found:
                before = flushes()
                run = peer.acked(publishers, seconds)
                # Half a second of warm-up is flushed, too: by rate, so much more than the measured time.
                flushed = (flushes() - before) * seconds / (seconds + 0.5)
                runs[peer.peer.name].append((run, flushed / max(1, run.messages)))
        rows += rows_of(publishers, runs, syncs)
    show(
        "Messages a second that disk topics acknowledge",
        ["publishers", "msg/s", "least to most", "× nsqd", "p50 ms", "p99 ms", "CPU µs/msg", "flushes/msg"],
        rows,
    )


def rows_of(
    publishers: int, runs: dict[str, list[tuple[Acked, float]]], syncs: list[tuple[float, float]]
) -> list[list[str]]:
    rows = []
    theirs = statistics.median(run.rate for run, _ in runs["nsqd"]) if "nsqd" in runs else None
    for name, mine in runs.items():
        rates = [run.rate for run, _ in mine]
        rate = statistics.median(rates)
        rows.append(
            [
                f"{publishers:,}: {name}",
                f"{rate:,.0f}",
                f"{min(rates):,.0f} to {max(rates):,.0f}",
                f"{rate / theirs:.2f}" if theirs else "–",
                f"{statistics.median(run.p50_ms for run, _ in mine):.2f}",
                f"{statistics.median(run.p99_ms for run, _ in mine):.2f}",
                f"{statistics.median(run.cpu_us for run, _ in mine):.1f}",
                f"{statistics.median(each for _, each in mine):.3f}",
            ]
        )
    p50, p99 = (statistics.median(values) for values in zip(*syncs, strict=True))
    return [*rows, [f"{publishers:,}: a sync of the disk", "", "", "", f"{p50:.2f}", f"{p99:.2f}", "", ""]]


def order(found: list[Running], folder: Path) -> None:
    """Print which system calls of each program surround an acknowledgement to a single publisher."""
    if shutil.which("strace") is None:
        print("left out: the order of syncs and answers needs strace")
        return
    calls = "trace=write,writev,pwrite64,pwritev,sendto,sendmsg,fsync,fdatasync,sync_file_range"
    for peer in found:
        trace = folder / "trace"
        with peer.awake():
            tracer = subprocess.Popen(
                ["strace", "-f", "-q", "-y", "-s", "12", "-e", calls, "-o", str(trace), "-p", str(peer.pid)]
            )
            time.sleep(1)
        peer.acked(1, 0.3)
        tracer.terminate()
        tracer.wait()
        print(f"{peer.peer.name}: {' '.join(steps(trace))}")


def steps(trace: Path, shown: int = 12) -> list[str]:
    """The last calls of a trace, by what they are for: files written, files synced, answers sent."""
    found = []
    for line in trace.read_text(errors="replace").splitlines():
        call = re.search(r"\b(\w+)\((\d+)<(.*?)>", line)
        if call is None or "unfinished" in line:
            call = re.search(r"\b(\w+)\((\d+)<(.*?)>", line)
        if call is None:
            continue
        verb, _, place = call.groups()
        if place.startswith(("TCP", "socket")):
            found.append("ANSWER")
        elif place.startswith("/"):
            found.append(f"{'sync' if 'sync' in verb else 'write'}:{Path(place).name.split()[0]}")
    return found[-shown:]


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.disk", description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--turns", type=int, default=3, help="runs of each program with each number of publishers")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a run")
    parser.add_argument("--order", action="store_true", help="show when each program syncs, instead of its speed")
    parser.add_argument("--no-realtime", action="store_true", help="do not put programs ahead of other processes")
    options = parser.parse_args()
    realtime = not options.no_realtime and peers.can_be_realtime()
    print(host.describe(0))
    print(f"{'SCHED_FIFO' if realtime else 'ordinary priority'}; load average {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="srtm-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        found = [stack.enter_context(peers.running(peer, realtime=realtime)) for peer in made(folder)]
        for peer in found:
            if peer.peer.name == "JetStream":
                create_stream(peer)
        if options.order:
            order(found, folder)
        else:
            compare(found, folder, options.turns, options.seconds)
    print(host.jitter_line())


if __name__ == "__main__":
    main()
