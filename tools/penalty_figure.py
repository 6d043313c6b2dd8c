"""The DRL penalty in one picture → docs/figures/penalty.svg: drawn from the simulation of examples/drl_penalty.py.

Left: what one bucket and what six buckets hold at one instant. Right: the tail latency that follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from srtm.model import scan
from srtm.model.latency import SLO
from srtm.model.profile import profile
from srtm.sim import SimulatedBroker, SimulatedTopic, assess
from srtm.units import NS_PER_MS, NS_PER_S, PICO_PER_TOKEN, percentile
from srtm.workload.publishers import Population, Workload

FIGURE = Path(__file__).parent.parent / "docs" / "figures" / "penalty.svg"
BROKERS = 6
# One file serves light and dark pages: the picture follows the reader's system.
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #222 }
  .small { font-size: 12px; fill: #555 }
  .empty { fill: none; stroke: #888 }
  .tokens { fill: #3b8ed0 }
  .waits { fill: #e0792b }
  .line { stroke: #888 }
  .slo { stroke: #2aa67a; stroke-width: 2; stroke-dasharray: 5 4 }
  @media (prefers-color-scheme: dark) { text { fill: #ddd } .small { fill: #aaa } }
"""
TOKEN = 9.0  # width of a token


@dataclass(frozen=True)
class Instant:
    """Tokens in one bucket and in each of several, when a message arrives whose access delay is the p99."""

    time_s: float
    bucket: float
    tokens: float
    shares: list[float]
    tokens_of: list[float]  # below zero: messages that wait


def measured() -> tuple[Instant, list[float]]:
    """An instant of the simulation, and p99 access delay in ms for one to six brokers."""
    brokers = [SimulatedBroker.like("paper-testbed", f"broker-{number}") for number in range(1, BROKERS + 1)]
    sensors = Workload((Population(publishers=1_000, rate_mps=10.0),), duration_ns=60 * NS_PER_S, seed=1)
    topic = SimulatedTopic.of(sensors, profile(sensors.arrivals().times_ns, quantile="0.99").bucket)
    runs = [assess(topic, brokers, "lb", k) for k in range(1, BROKERS + 1)]
    bucket_of = runs[-1].broker_of[topic.arrivals.publisher_of]
    times = topic.arrivals.times_ns
    shares = [runs[-1].shares[broker.name] for broker in brokers]
    delays = scan.split_access_delays(times, bucket_of, shares)
    first = int(np.flatnonzero(delays >= percentile(delays, SLO().quantile))[0])
    at = times[first : first + 1]
    held = [
        share.b - scan.work_at(times[bucket_of == number], share, at)[0] / PICO_PER_TOKEN
        for number, share in enumerate(shares)
    ]
    one = topic.bucket.b - scan.work_at(times, topic.bucket, at)[0] / PICO_PER_TOKEN
    instant = Instant(at[0] / NS_PER_S, topic.bucket.b, one, [share.b for share in shares], held)
    return instant, [run.latency.access.p99 / NS_PER_MS for run in runs]


def drawn(instant: Instant, p99_ms: list[float]) -> str:
    """The picture as SVG."""
    parts = [*_instant(instant), *_tails(p99_ms)]
    label = f"One of {BROKERS} small buckets is empty while others are full; p99 access delay grows with their number"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 300" width="780" height="300" role="img"'
        f' aria-label="{label}">\n<style>{STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _instant(instant: Instant) -> list[str]:
    parts = [
        _text(10, 22, f"{instant.time_s:.2f} s after the start, 1,000 publishers"),
        _text(10, 52, "one bucket", "small"),
        *_gauge(90, 40, instant.bucket, instant.tokens),
        _text(90, 76, f"{instant.tokens:.0f} of {instant.bucket:.0f} tokens available: no message waits", "small"),
    ]
    for number, (share, tokens) in enumerate(zip(instant.shares, instant.tokens_of, strict=True)):
        y = 96 + 27 * number
        parts += [_text(10, y + 12, f"broker {number + 1}", "small"), *_gauge(90, y, share, max(0.0, tokens))]
        waiting = round(max(0.0, -tokens))
        parts += [_rect("waits", 98 + (share + each) * TOKEN, y + 4, TOKEN - 2, 8) for each in range(waiting)]
    idle = sum(max(0.0, tokens) for tokens in instant.tokens_of)
    waiting = sum(round(max(0.0, -tokens)) for tokens in instant.tokens_of)
    return [*parts, _text(90, 276, f"{waiting} messages wait while {idle:.0f} tokens lie idle elsewhere", "small")]


def _tails(p99_ms: list[float]) -> list[str]:
    left, ground, scale = 440, 250, 19.0
    parts = [_text(left - 10, 22, "p99 access delay, ms"), _line("line", left - 10, ground, 770, ground)]
    for k, value in enumerate(p99_ms, 1):
        x, height = left + (k - 1) * 54, max(1.0, value * scale)
        parts += [
            _rect("waits", x, ground - height, 34, height),
            _text(x + 17, ground - height - 6, f"{value:.1f}", middle=True),
            _text(x + 17, ground + 18, str(k), "small", middle=True),
        ]
    limit = ground - SLO().limit_ns / NS_PER_MS * scale
    parts += [_line("slo", left - 10, limit, 770, limit), _text(left - 38, limit + 4, "SLO", "small")]
    return [*parts, _text(left - 10, 288, "brokers that share the same traffic and the same (r, b)", "small")]


def _gauge(x: float, y: float, size: float, tokens: float) -> list[str]:
    return [_rect("tokens", x, y, tokens * TOKEN, 16), _rect("empty", x, y, size * TOKEN, 16)]


def _rect(style: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _line(style: str, x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<line class="{style}" x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"/>'


def _text(x: float, y: float, text: str, style: str = "", *, middle: bool = False) -> str:
    anchor = ' text-anchor="middle"' if middle else ""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}"{anchor}>{text}</text>'


if __name__ == "__main__":
    FIGURE.write_text(drawn(*measured()))
