"""`srtm advise`: advice about topics from live traffic."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from srtm.cli.common import AsJson, Master, Options, many, print_json, spark_options
from srtm.cli.remote import HERE, Controller, Token, ask, secret_from
from srtm.errors import InputError
from srtm.units import NS_PER_S, parse_duration_ns

if TYPE_CHECKING:
    from collections.abc import Callable

    from srtm.pipeline.advise import Posted

_POLL_S = 0.5


class Auto(StrEnum):
    """What the controller may do by itself."""

    GROUPS = "groups"


def advise(
    auto: Annotated[
        list[Auto] | None,
        typer.Option(
            metavar="WHAT", help="Let the controller act on findings: groups", show_default="show advice only"
        ),
    ] = None,
    folder: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for the checkpoint and the latest arrivals")
    ] = Path("srtm-advise"),
    every: Annotated[str, typer.Option(metavar="DURATION", help="Time between two batches")] = "5s",
    window: Annotated[str, typer.Option(metavar="DURATION", help="Latest traffic that advice is based on")] = "60s",
    controller: Controller = HERE,
    token: Token = None,
    control_token: Annotated[
        str | None,
        typer.Option(
            "--control-token-file",
            metavar="FILE",
            help="File with the token for the brokers; SRTM_CONTROL_TOKEN holds it directly",
            callback=secret_from("SRTM_CONTROL_TOKEN"),
        ),
    ] = None,
    master: Master = None,
    spark_conf: Options = None,
    as_json: AsJson = False,
) -> None:
    """Watch the live traffic of all topics, and advise the controller until stopped.

    Advice says that a contract is too small or too large, that an SLO is at risk, that publishers burst together
    without declaring it, or that a publisher changed its group. srtm topic advice, the page and /metrics show it.
    With --auto groups, the controller places publishers by the groups found; groups that publishers declare always win.

    Brokers keep their latest arrivals only while this command reads them. After a restart with the same --folder, even
    after a crash, it continues where it stopped. --json prints a line for each batch.

    Example:
        srtm advise --auto groups
    """
    from srtm.pipeline.advise import AdviseOptions, Advisor
    from srtm.pipeline.session import spark_session

    every_s, window_s = (parse_duration_ns(each) / NS_PER_S for each in (every, window))
    if not 1 <= every_s <= 600:
        raise InputError(f"--every must lie between 1s and 10m, not {every}")
    if not every_s <= window_s <= 3600:
        raise InputError(f"--window must lie between --every ({every}) and 1h, not {window}")
    ask(controller, token, "GET", "/v1/topics")  # no controller is an error before Spark starts
    url = controller if "://" in controller else f"http://{controller}"
    chosen = tuple(each.value for each in auto or ())
    options = AdviseOptions(url.rstrip("/"), folder.absolute(), token, control_token, every_s, window_s, auto=chosen)
    with spark_session(master=master, options=spark_options(spark_conf)) as spark:
        query = Advisor(options, spark, _printing(as_json=as_json)).start()
        print(f"srtm: advising {url} every {every}; stop with Ctrl-C", file=sys.stderr, flush=True)
        try:
            while not query.awaitTermination(_POLL_S):  # type: ignore[arg-type]
                pass
        except KeyboardInterrupt:
            query.stop()


def _printing(*, as_json: bool) -> Callable[[Posted], None]:
    """What to do after each batch: print it as JSON, or print the advice if that changed."""
    told: dict[str, list[str]] = {}
    lost = 0

    def show(posted: Posted) -> None:
        nonlocal told, lost
        advice = posted.answer["advice"] if posted.answer else told
        if as_json:
            accepted = posted.answer["accepted"] if posted.answer else False
            document = {"batch": posted.batch, "messages": posted.messages, "lost": posted.lost, "accepted": accepted}
            print_json({**document, "advice": advice})
            sys.stdout.flush()
        elif advice != told:
            for topic in sorted(told.keys() | advice.keys()):
                print(f"{topic}: {', '.join(advice.get(topic, [])) or 'no advice'}", flush=True)
        if posted.lost > lost:
            print(
                f"srtm: missed {many(posted.lost - lost, 'arrival')}: brokers keep only the latest;"
                " reduce --every, or give Spark more cores",
                file=sys.stderr,
            )
        told, lost = advice, max(lost, posted.lost)

    return show
