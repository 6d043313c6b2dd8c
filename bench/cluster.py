"""`python -m bench.cluster [policies|placements]`: a live cluster on this machine, with its own commands.

policies: the same load of correlation groups on a topic placed by `lb` and on one placed by `srtm`, in turn.
placements: from a topic's creation to a confirmed fit, predicting first and by measuring alone.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from bench import host

SRTM = [sys.executable, "-m", "srtm"]


@contextmanager
def cluster(brokers: int, *flags: str) -> Iterator[str]:
    """`srtm up` on free ports; its controller's URL."""
    command = [*SRTM, "up", "--brokers", str(brokers), "--free-ports", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = ""
            for line in process.stdout:
                found = re.search(r"http://\S+", line)
                url = url or (found[0] if found else "")
                if line.startswith("ready"):
                    break
            yield url
        finally:
            process.terminate()
            process.wait(30)


def said(url: str, *command: str) -> Any:
    """What a command says as JSON."""
    done = subprocess.run([*SRTM, *command, "--controller", url, "--json"], capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def removed(url: str, topic: str) -> None:
    subprocess.run([*SRTM, "topic", "rm", topic, "--controller", url], capture_output=True, check=True)


def load(
    url: str, topic: str, options: argparse.Namespace, policy: str, seed: int, fit: str = "model"
) -> subprocess.Popen[str]:
    """`srtm load` under way; it creates the topic with the (r, b) that its schedule needs."""
    command = [*SRTM, "load", topic, "--publishers", str(options.publishers), "--rate", str(options.rate)]
    command += ["--batch", "1", "--group-size", str(options.group_size), "--duration", f"{options.seconds}s"]
    command += [
        "--slo-p99",
        options.slo,
        "--quantile",
        options.quantile,
        "--policy",
        policy,
        "--fit",
        fit,
        "--seed",
        str(seed),
    ]
    command += ["--controller", url, "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def policies(options: argparse.Namespace) -> None:
    print(f"{'run':<4}{'policy':<8}{'k':>3}{'p99 access ms':>15}{'p99 total ms':>14}{'load late ms':>14}{'lost':>6}")
    rows: dict[str, list[dict[str, float]]] = {"lb": [], "srtm": []}
    with cluster(options.brokers) as url:
        for run in range(options.runs):
            for policy in ("lb", "srtm"):
                topic = f"{policy}-{run}"
                sending = load(url, topic, options, policy, run + 1)
                time.sleep(options.seconds * 0.9)  # the last ten seconds are what the controller remembers
                seen = said(url, "topic", "show", topic)
                out, _ = sending.communicate()
                report = json.loads(out)
                row = {
                    "k": seen["k"],
                    "access": seen["access_ms"]["p99"],
                    "total": report["total_ms"]["p99"],
                    "late": report["lateness_ms"]["p99"],
                    "lost": report["lost"] + report["doubled"],
                }
                rows[policy].append(row)
                print(
                    f"{run + 1:<4}{policy:<8}{row['k']:>3}{row['access']:>15.3f}{row['total']:>14.2f}"
                    f"{row['late']:>14.2f}{row['lost']:>6.0f}",
                    flush=True,
                )
                removed(url, topic)
    for policy, found in rows.items():
        middle = {name: statistics.median(row[name] for row in found) for name in found[0]}
        print(
            f"median {policy}: k {middle['k']:g}, p99 access {middle['access']:.3f} ms, total {middle['total']:.2f} ms"
        )


def placements(options: argparse.Namespace) -> None:
    print(f"{'seed':<6}{'fit':<9}{'k':>3}{'to a confirmed fit s':>22}  {'SLO':<9}rounds: k, s, verdict (?: unsure)")
    with cluster(options.brokers, "--mcap-mps", str(options.mcap)) as url:
        for seed in range(1, options.runs + 1):
            for fit in ("model", "measure"):
                topic = f"{fit}-{seed}"
                began = time.monotonic()
                sending = load(url, topic, options, "srtm", seed, fit)
                seen = _fitted(url, topic, sending)
                took = time.monotonic() - began
                sending.terminate()
                sending.wait()
                fitted = seen["fitted"] or {"k": 0, "rounds": [], "met": False}
                verdict = "met" if fitted["met"] else "not met"
                rounds = ", ".join(
                    f"{each['k']} {each['seconds']:.0f} s {'met' if each['within'] else 'not'}"
                    + ("" if each["certain"] else "?")
                    for each in fitted["rounds"]
                )
                print(f"{seed:<6}{fit:<9}{fitted['k']:>3}{took:>22.1f}  {verdict:<9}{rounds}", flush=True)
                removed(url, topic)


def _fitted(url: str, topic: str, sending: subprocess.Popen[str]) -> Any:
    """The topic, once its fitting is over."""
    seen: Any = {"fitted": None}
    with httpx.Client(base_url=url, trust_env=False) as client:  # a command each time would be a load of its own
        while sending.poll() is None and not seen["fitted"]:
            time.sleep(0.5)
            answer = client.get(f"/v1/topics/{topic}")
            seen = answer.json() if answer.status_code == 200 else seen
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.cluster", description=__doc__)
    parser.add_argument("part", nargs="?", choices=("policies", "placements"), default="policies")
    parser.add_argument("--brokers", type=int, default=4)
    parser.add_argument("--publishers", type=int, default=400)
    parser.add_argument("--rate", type=float, default=5.0)
    parser.add_argument("--group-size", type=int, default=20)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--slo", default="20ms")
    parser.add_argument("--quantile", default="0.995")
    parser.add_argument("--mcap", type=float, default=1_000.0)
    options = parser.parse_args()
    print(host.describe(1))
    print(" ".join(f"{name}={value}" for name, value in vars(options).items()))
    {"policies": policies, "placements": placements}[options.part](options)
    longest, lost = host.jitter_us()
    print(f"host jitter afterwards: longest gap {longest:.0f} µs, {lost:.2f} % lost")


if __name__ == "__main__":
    main()
