"""The verbs of `srtm`."""

from __future__ import annotations

from typing import Annotated

import typer

import srtm
from srtm import native
from srtm.cli import lab, latency, outcome
from srtm.cli.cluster import advise, certs, check, debug, generate, store, token, top, topic, up
from srtm.cli.help import App
from srtm.cli.messages import load, pub, sub
from srtm.cli.servers import broker, calibrate, controller
from srtm.cli.traces import conformance, groups, penalty, plan, profile, report, spark, trace

app = App("Scalable real-time messaging: hold each topic's tail latency on as few brokers as possible.", name="srtm")
for heading, verbs in {
    "Run a cluster": (up.up, controller.controller, broker.broker, calibrate.calibrate, latency.latency),
    "Manage topics": (("topic", topic.app), top.top, check.check, advise.advise),
    "Manage access": (("token", token.app), ("certs", certs.app)),
    "Send and receive": (pub.pub, sub.sub, load.load),
    "Analyze traces (Spark)": (
        ("trace", trace.app),
        profile.profile,
        groups.groups,
        plan.plan,
        penalty.penalty,
        conformance.conformance,
        report.report,
        ("spark", spark.app),
    ),
    "Tools": (("store", store.app), ("generate", generate.app), ("debug", debug.app), ("lab", lab.app)),
}.items():
    for verb in verbs:
        if isinstance(verb, tuple):
            app.add_typer(verb[1], name=verb[0], rich_help_panel=heading)
        else:
            app.command(rich_help_panel=heading)(verb)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"srtm {srtm.__version__} ({native.build()})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    del version


def run(arguments: list[str]) -> int:
    """Run one command line; return its exit code."""
    return outcome.run(lambda: app(arguments, prog_name="srtm"), arguments)
