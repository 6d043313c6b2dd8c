"""`python -m bench.controllers [--rounds 10]`: what it costs to lose the controller that leads.

Three controllers on three NATS servers, two brokers, publishers that send all the while to a topic on disk, and an
operator who creates contracts all the while, at one controller after the other. In each round, the controller that
leads, or a NATS server, is killed (kill -9) or paused (SIGSTOP) at a random moment, and comes back.

Printed for each round: how long until another controller leads and has heard all brokers, the longest pause between two
acknowledged messages, and how many changes were refused. In the end: whether what was acknowledged is in the logs,
whether answered contracts are kept, and how far the busiest window was from (r, b).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from tests.control.controllers import Controllers, controllers
from tests.control.processes import Sender, started, stopped
from tests.control.test_controllers import B, Operator, R

from bench import host
from bench.measure import show
from srtm.model.bucket import TokenBucket
from srtm.model.timeline import Timeline, largest_excess

VICTIMS = ("kill the leader", "pause the leader", "kill the leader", "pause the leader", "kill the NATS leader")
SENDERS, RATE = 6, 30.0


async def one_round(world: Controllers, kind: str, rng: random.Random) -> float:
    """One fault; returns how long no controller answered for the cluster."""
    await asyncio.sleep(rng.uniform(0.5, 2.0))
    victim = await asyncio.to_thread(world.some_leader)
    began = time.monotonic()
    if kind == "kill the NATS leader":
        name = await world.stream_leader()
        server = next(each for each in world.cluster.servers if each.name == name)
        server.kill()
        took_s = await asyncio.to_thread(world.answers_s, began)
        server.start(wait=False)
        await asyncio.sleep(3)
        return took_s
    (world.kill if kind.startswith("kill") else world.pause)(victim)
    took_s = await asyncio.to_thread(world.replaced_s, victim, began)
    await asyncio.sleep(rng.uniform(0, 3))
    if kind.startswith("kill"):
        await asyncio.to_thread(world.start_again, victim)
    else:
        world.resume(victim)
    return took_s


async def measured(world: Controllers, rounds: int, rng: random.Random) -> None:
    """All rounds under load, and the checks after them."""
    senders = [Sender("t", world.url, f"p{number}", RATE) for number in range(SENDERS)]
    await started(senders)
    world.record(*world.brokers)
    rows, took = [], []
    async with Operator(world) as operator:
        await operator.creates()
        for number in range(rounds):
            kind, began, refused = VICTIMS[number % len(VICTIMS)], time.monotonic(), len(operator.refused)
            took_s = await one_round(world, kind, rng)
            times = sorted(at for sender in senders for at in sender.acknowledged.values() if at > began)
            gap_s = max(after - at for at, after in pairwise(times))
            rows.append([kind, f"{took_s:.2f} s", f"{1e3 * gap_s:.0f} ms", f"{len(operator.refused) - refused}"])
            took.append((kind, took_s))
        await operator.creates(len(operator.kept) + 3)
    world.recorded(*world.brokers)
    await stopped(senders)
    show("rounds", ["fault", "until another leads", "longest pause of messages", "changes refused"], rows)
    leaders = [took_s for kind, took_s in took if "NATS" not in kind]
    print(f"another leads after {statistics.median(leaders):.2f} s (median), {max(leaders):.2f} s (longest)")
    listed = {each["topic"] for each in world.client.get("/v1/topics").json()["topics"]}
    lost = [name for name in operator.kept if name not in listed]
    print(f"contracts answered: {len(operator.kept)}, of them lost: {len(lost)}; refused: {len(operator.refused)}")
    sent, logged = {body for sender in senders for body in sender.acknowledged}, set(world.logged("t"))
    print(f"messages acknowledged: {len(sent):,}, of them lost: {len(sent - logged):,}")
    excess = largest_excess(world.releases("t"), Timeline(TokenBucket.of(str(R), str(B))))
    print(f"busiest window against (r, b) of the contract: {float(excess.tokens):+.2f} tokens")


def main() -> None:
    """Run all rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(host.describe(options.seed))
    with tempfile.TemporaryDirectory() as folder, controllers(Path(folder)) as world:
        world.all_brokers(2)
        world.create("t", r=R, b=B, durability="disk")
        asyncio.run(measured(world, options.rounds, random.Random(options.seed)))


if __name__ == "__main__":
    main()
