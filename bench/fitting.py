"""Online-fitting in the simulator: the paper's Table 1, by measuring and by the model first."""

from __future__ import annotations

from bench.measure import show
from srtm.model.profile import profile
from srtm.sim import SimulatedBroker, Simulation, Topic, simulate
from srtm.units import NS_PER_MS, NS_PER_S
from srtm.workload.publishers import Population, Workload

PAPER_ROUNDS = {5: "1", 10: "2 1", 15: "5 3 1", 20: "5 4 2 1", 25: "3 4 4 2 1", 30: "3 5 3 2 3 1"}


def table_1(seed: int) -> None:
    """1,000 Poisson publishers in batches of 10; the model predicts from traffic of another seed."""
    six = [SimulatedBroker(f"b{i}") for i in range(6)]
    for quantile in ("0.99", "0.995", "0.999"):
        rows = []
        for group_size, paper in PAPER_ROUNDS.items():
            population = Population(1_000, 10.0, 10, "poisson", group_size)
            now, earlier = (Workload((population,), 60 * NS_PER_S, s) for s in (seed, seed + 1_000))
            bucket = profile(now.arrivals().times_ns, quantile=quantile).bucket
            topic = Topic.of(now, bucket)
            runs = (
                simulate(topic, six, "max_min"),
                simulate(topic, six, "srtm"),
                simulate(topic, six, "srtm", fit="model", history=Topic.of(earlier, bucket)),
            )
            rows.append([str(group_size), paper, f"{bucket.b:g}", *(text for run in runs for text in _row(run))])
        show(
            f"k, worst p99 (ms) and rounds of each iteration; b at the {float(quantile):.1%} quantile of the backlog",
            ["group", "paper", "b", "max_min", "", "srtm", "", "srtm, model first", ""],
            rows,
        )


def _row(run: Simulation) -> tuple[str, str]:
    worst = max(latency.total.p99 for latency in run.by_broker.values()) / NS_PER_MS
    rounds = [str(iteration.rounds) for iteration in run.iterations if iteration.rounds]
    shown = " ".join(rounds) if len(rounds) <= 8 else f"{run.rounds} in all"
    return f"{run.k}  {worst:.2f}{'' if run.meets_slo else ' !'}", shown
