"""`python -m bench.testbed`: fit the paper's broker on seven of the paper's statements, and judge all others by it.

The fit searches the costs with which the seven hold by the largest factor. Then the lab runs with
these costs, with its own seeds, and every claim that the fit did not use is judged.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from bench import host
from bench.measure import show
from srtm.lab.claims import judge
from srtm.lab.result import SLO_MS, Rows
from srtm.lab.results import RESULTS
from srtm.lab.sweep import Settings, cells_of
from srtm.lab.world import INITIAL_KMPS, Simulated, brokers
from srtm.model.broker_models import BROKER_MODELS, ServiceModel, broker_model
from srtm.model.latency import SLO
from srtm.sim.simulate import assess
from srtm.units import NS_PER_MS
from srtm.workload.publishers import Population

if TYPE_CHECKING:
    from collections.abc import Sequence

    from srtm.lab.claims import Verdict
    from srtm.sim.simulate import SimulatedTopic

PRESET = "paper-testbed"
CORES = 2  # of the paper's brokers
BASE_NS = 150_000  # no statement is about it: an idle broker is far inside 1 ms
READS_NS = range(20_000, 52_000, 2_000)
MESSAGES_NS = (500, 1_000, *range(2_000, 16_000, 2_000))
SERIALS_NS = range(3_000, 10_000, 1_000)
SEEDS = (1_000,)  # the lab's first repetition


@dataclass(frozen=True, slots=True)
class Statement:
    """A topic split over k brokers, the p99 of the worst of them, and on which side of a limit it is.

    With `but`, that broker does not count.
    """

    source: str
    says: str
    population: Population
    k: int
    within: bool
    limit_ms: float = SLO_MS
    loaded: bool = False
    policy: str = "max_min"
    but: str | None = None

    def factor(self, p99_ms: float) -> float:
        """By which factor it holds; below 1 it does not."""
        return self.limit_ms / p99_ms if self.within else p99_ms / self.limit_ms


STATEMENTS = (
    Statement("Fig. 6b", "60 kmsg/s of single messages overload a broker", Population(6_000), 1, False, 100.0),
    Statement("Fig. 8a", "40 kmsg/s of them fit on broker 1", Population(4_000), 1, True, loaded=True),
    Statement("Fig. 8a", "80 kmsg/s of them need more than brokers 1 and 2", Population(8_000), 2, False, loaded=True),
    Statement(
        "Fig. 8a",
        "if loads are equal on brokers 1 to 3, only broker 3 is slow",
        Population(8_000),
        3,
        True,
        loaded=True,
        policy="conc",
        but="broker-3",
    ),
    Statement("Fig. 7b", "100 kmsg/s in batches of 10 fit on one", Population(10_000, batch=10), 1, True),
    Statement("Table 1", "groups of 5 fit on one", Population(1_000, batch=10, group_size=5), 1, True),
    Statement("Table 1", "groups of 10 do not", Population(1_000, batch=10, group_size=10), 1, False),
)


class Trial:
    """The statements' traffic, made once."""

    def __init__(self, world: Simulated, seeds: Sequence[int]) -> None:
        self._topics: dict[tuple[int, int], SimulatedTopic] = {
            (number, seed): world.topic(statement.population, seed)
            for number, statement in enumerate(STATEMENTS)
            for seed in seeds
        }

    def p99_ms(self, number: int, costs: ServiceModel) -> float:
        """The worst broker's p99 under these costs, the mean over the seeds."""
        statement, found = STATEMENTS[number], []
        fleet = [replace(each, model=costs) for each in brokers(INITIAL_KMPS if statement.loaded else ())]
        for (of, seed), topic in self._topics.items():
            if of == number:
                run = assess(topic, fleet, statement.policy, statement.k, SLO(NS_PER_MS), seed=seed)
                tails = [seen.total.p99 for name, seen in run.by_broker.items() if name != statement.but]
                found.append(max(tails) / NS_PER_MS)
        return sum(found) / len(found)

    def weakest(self, costs: ServiceModel) -> float:
        """The smallest factor by which a statement holds; the first that is below 1, if one is."""
        least = math.inf
        for number, statement in enumerate(STATEMENTS):
            least = min(least, statement.factor(self.p99_ms(number, costs)))
            if least < 1:
                break
        return least


def fit(trial: Trial) -> list[tuple[float, ServiceModel]]:
    """Every combination of costs, the best first."""
    tried = []
    for read_ns, message_ns, serial_ns in product(READS_NS, MESSAGES_NS, SERIALS_NS):
        costs = ServiceModel(read_ns, message_ns, BASE_NS, serial_ns, CORES)
        tried.append((trial.weakest(costs), costs))
    return sorted(tried, key=lambda each: -each[0])


def held_out(settings: Settings) -> list[Verdict]:
    """The lab's verdicts on every claim that the fit did not use."""
    found = {
        name: Rows(row for cell in cells_of(result, settings) for row in result.run(cell.world, cell.point, cell.seed))
        for name, result in RESULTS.items()
    }
    return [each for each in judge(RESULTS.values(), found) if each.kind != "calibration"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.testbed", description=__doc__)
    parser.add_argument("--costs", help="judge these instead of fitting: a model as in --broker-model")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--full", action="store_true", help="all points of the lab instead of the tiny ones")
    parser.add_argument("--only-fit", action="store_true", help="do not run the lab")
    options = parser.parse_args()
    print(host.describe(1))
    trial = Trial(Simulated(most_messages=600_000), SEEDS)
    if options.costs:
        costs = broker_model(options.costs).service
    else:
        ranked = fit(trial)
        hold = [each for each in ranked if each[0] > 1]
        print(f"{len(ranked)} combinations of costs tried; all statements hold with {len(hold)} of them")
        show(
            "The best ten",
            ["read (µs)", "message (µs)", "serial (µs)", "holds by a factor of"],
            [
                [f"{each.read_ns / 1e3:g}", f"{each.message_ns / 1e3:g}", f"{each.serial_ns / 1e3:g}", f"{by:.3f}"]
                for by, each in ranked[:10]
            ],
        )
        costs = ranked[0][1]
    print(f"costs: {costs}; the preset: {BROKER_MODELS[PRESET].service}")
    rows = []
    for number, statement in enumerate(STATEMENTS):
        p99_ms = trial.p99_ms(number, costs)
        wanted = f"{'≤' if statement.within else '>'} {statement.limit_ms:g}"
        verdict = "holds" if statement.factor(p99_ms) > 1 else "does not hold"
        rows.append([f"{statement.source}: {statement.says}", wanted, f"{p99_ms:.2f}", verdict])
    show("The statements of the fit: p99 of the worst broker (ms)", ["", "wanted", "ours", ""], rows)
    if options.only_fit:
        return
    BROKER_MODELS[PRESET] = replace(BROKER_MODELS[PRESET], service=costs)
    verdicts = held_out(Settings(seed=1, repetitions=options.repetitions, tiny=not options.full))
    holding = sum(bool(each.holds) for each in verdicts)
    show(
        f"Held out: {holding} of {len(verdicts)} claims hold",
        ["result", "b at", "kind", "claim", "paper", "ours", ""],
        [[each.result, each.b_at, each.kind, each.claim, each.paper, each.ours, each.word] for each in verdicts],
    )


if __name__ == "__main__":
    main()
