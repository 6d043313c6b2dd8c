"""Tables of topics for the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from srtm.cli.common import in_ms, new_table, print_table


def table_of(topics: list[dict[str, Any]]) -> Table:
    """A table of topics, one row each."""
    contract, traffic = ("topic", "state", "r", "b", "policy", "k", "lending"), ("publishers", "msg/s", "waiting")
    table = new_table(*contract, *traffic, "p99 access", "p99 total", "penalty", "SLO")
    for topic in topics:
        table.add_row(*_row(topic))
    return table


def _row(topic: dict[str, Any]) -> list[str]:
    """The row of a topic."""
    met = {None: "", True: "met", False: "not met"}[topic["slo_met"]]
    return [
        topic["topic"],
        topic["state"] + (", paused" if topic["paused"] else ""),
        f"{topic['r']:g}",
        f"{topic['b']:g}",
        topic["policy"],
        str(topic["k"]),
        _rule(topic),
        f"{topic['publishers']:,}",
        f"{topic['rate']:,.0f}",
        f"{topic['waiting']:,}",
        p99_of(topic["access_ms"]),
        p99_of(topic["total_ms"]),
        "—" if topic["penalty_ms"] is None else in_ms(topic["penalty_ms"]),
        f"{topic['slo_ms']:g} ms {met}",
    ]


def _rule(topic: dict[str, Any]) -> str:
    """The rule by which brokers lend now, or a dash."""
    rule = topic.get("lending", {}).get("chosen", "off")  # older controllers do not know it
    return "—" if rule == "off" else str(rule)


def p99_of(points: dict[str, float] | None) -> str:
    """The p99 of a latency, or a dash."""
    return in_ms(points["p99"]) if points else "—"


def lending_of(lending: dict[str, Any]) -> str:
    """What brokers lend each other, in a sentence."""
    mode = lending["mode"] if lending["mode"] == lending["chosen"] else f"{lending['mode']}, now {lending['chosen']}"
    return (
        f"lending {mode}: {lending['asked']:,} asks ({lending['unanswered']:,} unanswered),"
        f" {lending['lent']:,.0f} tokens lent, {lending['borrowed']:,.0f} borrowed, {lending['lost']:,.0f} lost"
    )


def lending_table(topic: dict[str, Any]) -> Table:
    """A table of lenders and borrowers, with round trips."""
    numbers = ("tokens/s", "lent", "taken", "lost", "asks", "unanswered", "rtt p50", "rtt p99")
    table = new_table("lender", "borrower", *numbers, title=f"{topic['topic']}: {lending_of(topic['lending'])}")
    for pair in topic["lending"]["peers"]:
        took = pair["rtt_ms"]
        table.add_row(
            pair["lender"],
            pair["borrower"],
            f"{pair['per_second']:,.1f}",
            f"{pair['lent']:,.0f}",
            f"{pair['borrowed']:,.0f}",
            f"{pair['lost']:,.0f}",
            f"{pair['asked']:,}",
            f"{pair['unanswered']:,}",
            in_ms(took["p50"]) if took else "—",
            in_ms(took["p99"]) if took else "—",
        )
    return table


def accusations(topic: dict[str, Any]) -> list[str]:
    """Brokers that are excluded from lending, one sentence each."""
    return [
        f"{topic['topic']}: {each['broker']} is excluded from lending: {each['evidence']}"
        for each in topic.get("lending", {}).get("accused", ())
    ]


def print_topic(topic: dict[str, Any]) -> None:
    """Print a topic."""
    title = f"{topic['topic']}: {topic['state']}, (r, b) = ({topic['r']:g}/s, {topic['b']:g}), {topic['policy']}"
    title += ", on disk" if topic["durability"] == "disk" else ""
    table = new_table("broker", "publishers", "msg/s", "r", "b", "waiting", "p99 access", "p99 total", title=title)
    for each in topic["brokers"]:
        table.add_row(
            each["broker"],
            f"{each['publishers']:,}",
            f"{each['rate']:,}",
            f"{each['r']:,.1f}",
            f"{each['b']:,.1f}",
            f"{each['waiting']:,}",
            p99_of(each["access_ms"]),
            p99_of(each["total_ms"]),
        )
    print_table(table)
    if topic.get("lending", {}).get("mode", "off") != "off":
        if topic["lending"]["peers"]:
            print_table(lending_table(topic))
        else:
            print(lending_of(topic["lending"]))
    for accusation in accusations(topic):
        print(accusation)
    for event in topic["events"][-10:]:
        print(f"{event['ago_s']:8.1f} s ago  {event['kind']}: {event['text']}")
