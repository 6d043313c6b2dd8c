"""Placement in the simulator: the paper's Table 1, rounds on many brokers, and what whole tokens would change."""

from __future__ import annotations

from bench.measure import show
from srtm.model import scan
from srtm.model.apportion import apportion
from srtm.model.bucket import TokenBucket
from srtm.model.latency import SLO
from srtm.model.profile import profile
from srtm.sim import SimulatedBroker, SimulatedTopic, Simulation, assess, simulate
from srtm.units import NANO_PER_TOKEN, NS_PER_MS, NS_PER_S, percentile
from srtm.workload.publishers import Population, Workload

PAPER_ROUNDS = {5: "1", 10: "2 1", 15: "5 3 1", 20: "5 4 2 1", 25: "3 4 4 2 1", 30: "3 5 3 2 3 1"}


def table_1(seed: int) -> None:
    """1,000 Poisson publishers in batches of 10; the model predicts from traffic of another seed."""
    six = [SimulatedBroker.like("paper-testbed", f"b{i}") for i in range(6)]
    for quantile in ("0.99", "0.995", "0.999"):
        rows = []
        for group_size, paper in PAPER_ROUNDS.items():
            population = Population(1_000, 10.0, 10, "poisson", group_size)
            now, earlier = (Workload((population,), 60 * NS_PER_S, s) for s in (seed, seed + 1_000))
            bucket = profile(now.arrivals().times_ns, quantile=quantile).bucket
            topic = SimulatedTopic.of(now, bucket)
            runs = (
                simulate(topic, six, "max_min", as_paper=True),
                simulate(topic, six, "srtm", as_paper=True),
                simulate(topic, six, "srtm"),
                simulate(topic, six, "srtm", fit="model", history=SimulatedTopic.of(earlier, bucket)),
            )
            rows.append([str(group_size), paper, f"{bucket.b:g}", *(text for run in runs for text in _row(run))])
        show(
            f"k, worst p99 (ms) and rounds of each iteration; b at the {float(quantile):.1%} quantile of the backlog",
            ["group", "paper", "b", "max_min", "", "srtm", "", "srtm, growing", "", "srtm, model first", ""],
            rows,
        )


def many_brokers(seed: int) -> None:
    """A topic of 10,000 msg/s in batches of 10 on up to 100 brokers: bursts of larger groups need more of them."""
    rows = []
    for brokers in (6, 12, 25, 50, 100):
        for group_size in (30, 100, 200):
            workload = Workload((Population(1_000, 10.0, 10, "poisson", group_size),), 15 * NS_PER_S, seed)
            topic = SimulatedTopic.of(workload, profile(workload.arrivals().times_ns, quantile="0.999").bucket)
            idle = [SimulatedBroker.like("paper-testbed", f"b{i}") for i in range(brokers)]
            cells = []
            for as_paper in (True, False):
                run = simulate(topic, idle, "srtm", seed=seed, as_paper=as_paper)
                cells += [f"{run.k}{'' if run.meets_slo else ' !'}", str(run.rounds)]
            least = (k for k in range(1, brokers + 1) if assess(topic, idle, "srtm", k, seed=seed).meets_slo)
            rows.append([str(brokers), str(group_size), *cells, str(next(least, "none"))])
    show(
        "k and rounds of a measured fit; ! if the SLO of 1 ms was not met",
        ["brokers", "group", "one by one: k", "rounds", "growing: k", "rounds", "exhaustive: k"],
        rows,
    )


def whole_tokens(seed: int) -> None:
    """1,000 Poisson publishers spread over k brokers, b split into fractions of tokens and into whole ones."""
    rows = []
    for number in range(seed, seed + 3):
        workload = Workload((Population(1_000),), 60 * NS_PER_S, number)
        topic = SimulatedTopic.of(workload, profile(workload.arrivals().times_ns, quantile="0.99").bucket)
        for k in (3, 4, 6):
            run = simulate(
                topic, [SimulatedBroker.like("paper-testbed", f"b{i}") for i in range(k)], "lb", SLO(NS_PER_S)
            )
            bucket_of = run.broker_of[topic.arrivals.publisher_of]
            whole = apportion(topic.bucket.b_ntok // NANO_PER_TOKEN, [1] * k)
            buckets = [
                TokenBucket(share.r_mtps, tokens * NANO_PER_TOKEN)
                for share, tokens in zip(run.shares.values(), whole, strict=True)
            ]
            delays = scan.split_access_delays(topic.arrivals.times_ns, bucket_of, buckets)
            worst = max(percentile(delays[bucket_of == number], "0.99") for number in range(k))
            rows.append(
                [
                    f"seed {number}, b = {topic.bucket.b:g}, k = {k}",
                    f"{run.latency.access.p99 / NS_PER_MS:.2f}",
                    f"{percentile(delays, '0.99') / NS_PER_MS:.2f}",
                    f"{max(latency.access.p99 for latency in run.by_broker.values()) / NS_PER_MS:.2f}",
                    f"{worst / NS_PER_MS:.2f}",
                ]
            )
    show(
        "p99 access delay (ms): shares of b in fractions of tokens, and in whole tokens",
        ["", "fractions", "whole", "worst broker, fractions", "worst broker, whole"],
        rows,
    )


def _row(run: Simulation) -> tuple[str, str]:
    worst = max(latency.total.p99 for latency in run.by_broker.values()) / NS_PER_MS
    rounds = [str(iteration.rounds) for iteration in run.iterations if iteration.rounds]
    shown = " ".join(rounds) if len(rounds) <= 8 else f"{run.rounds} in all"
    return f"{run.k}  {worst:.2f}{'' if run.meets_slo else ' !'}", shown
