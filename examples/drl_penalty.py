"""The DRL penalty in one table: the same traffic, the same contract, split over more and more brokers.

Run it with: .venv/bin/python examples/drl_penalty.py
"""

from srtm.model.latency import SLO
from srtm.model.profile import profile
from srtm.sim import SimulatedBroker, SimulatedTopic, simulate
from srtm.units import NS_PER_MS, NS_PER_S
from srtm.workload.publishers import Population, Workload

brokers = [SimulatedBroker.like("paper-testbed", f"broker-{number}") for number in range(1, 7)]
sensors = Workload((Population(publishers=1_000, rate_mps=10.0),), duration_ns=60 * NS_PER_S, seed=1)
# The paper's rule: r is 10 % above the mean rate, b is the smallest bucket with a p99 access delay of zero.
bucket = profile(sensors.arrivals().times_ns, quantile="0.99").bucket
topic = SimulatedTopic.of(sensors, bucket)

print(f"1,000 Poisson publishers, token bucket {bucket}")
print("brokers   p99 access delay   p99 end to end")
for k in range(1, 7):
    latency = simulate(topic, brokers[:k], policy="lb", slo=SLO(limit_ns=NS_PER_S)).latency
    print(f"{k:7}   {latency.access.p99 / NS_PER_MS:13.2f} ms   {latency.total.p99 / NS_PER_MS:11.2f} ms")

chosen = simulate(topic, brokers, policy="srtm")
print(f"SRTM chooses {chosen.k} of {len(brokers)}: p99 end to end {chosen.latency.total.p99 / NS_PER_MS:.2f} ms")
