"""Why a topic is where it is, for the terminal."""

from __future__ import annotations

from typing import Any

from srtm.cli.cluster.tables import p99_of
from srtm.cli.common import in_ms, new_table, print_table
from srtm.units import NS_PER_MS


def print_explanation(found: dict[str, Any], over_contract: str | None) -> None:
    """Print the API's explanation; `over_contract` says by how much publishers exceed the contract."""
    name, lends = found["topic"], found.get("lending", "off") != "off"
    quotas = ", ".join(f"{broker} {rate:,.0f} msg/s" for broker, rate in found["quotas"].items())
    print(f"{name}: k = {found['k']} by {found['policy']}: {quotas or 'no publisher is placed'}")
    lent = ("p99 access, lending", "asks/msg", "rule")
    columns = ("k", "p99 access", "p99 processing", "p99 total", "SLO", *lent)
    table = new_table(*columns, title="predicted by the model")
    for each in found["predicted"]:
        if each["possible"]:
            parts = [p99_of(each[part]) for part in ("access_ms", "processing_ms", "total_ms")]
            table.add_row(str(each["k"]), *parts, "met" if _met(each, lends=lends) else "not met", *_lending(each))
        else:
            table.add_row(str(each["k"]), each["reason"])
    print_table(table)
    print(_verdict(found, lends=lends))
    if over_contract:
        print(f"{name}: {over_contract}")
    for number, each in enumerate((found["measured"] or {"rounds": []})["rounds"], 1):
        worst = max(each["latency_ns"].values(), default=0) / NS_PER_MS
        certain = "" if each["certain"] else " (not certain)"
        broken = "".join(f"; {other!r} missed its SLO on {broker}" for broker, other in each.get("broken", {}).items())
        print(f"round {number}: k = {each['k']}, worst broker {in_ms(worst)}, {each['seconds']:.0f} s{certain}{broken}")
    for broker, others in found.get("neighbours", {}).items():
        print(f"{broker} also carries {', '.join(f'{other!r} ({slo_ms:g} ms)' for other, slo_ms in others.items())}")
    for broker, evidence in found.get("accused", {}).items():
        print(f"{broker} is excluded from lending: {evidence}")
    if found.get("refused"):
        print(f"refused: {found['refused']}")


def _lending(predicted: dict[str, Any]) -> tuple[str, ...]:
    lending = predicted.get("with_lending")  # older controllers do not know it
    if lending is None or predicted["k"] == 1:
        return ("—", "—", "—")
    return p99_of(lending["access_ms"]), f"{lending['asks_per_message']:.2g}", lending["rule"]


def _met(predicted: dict[str, Any], *, lends: bool) -> bool:
    """Whether the SLO is met as the contract has it, with lending or without."""
    return bool((predicted.get("with_lending", predicted) if lends else predicted)["meets_slo"])


def _verdict(found: dict[str, Any], *, lends: bool) -> str:
    """The conclusion from the table."""
    if not found["predicted"]:
        return str(found.get("note", "no broker is available for placement"))
    meeting = [each["k"] for each in found["predicted"] if each["possible"] and _met(each, lends=lends)]
    if not meeting:
        return "the model predicts that no number of brokers meets the SLO; raise b, relax the SLO, or send less"
    return f"fewest brokers that meet the SLO, by the model: {meeting[0]}"
