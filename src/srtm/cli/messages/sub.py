"""`srtm sub`: print the messages of a topic."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from srtm.cli.messages.pub import Brokers
from srtm.cli.remote import HERE, Controller, Engine, Token, telling_if_late
from srtm.errors import InputError
from srtm.units import NS_PER_S, parse_duration_ns


def sub(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic to subscribe to", show_default=False)],
    channel: Annotated[
        str, typer.Option(metavar="CHANNEL", help="Channel; subscribers of one channel share its messages")
    ] = "sub#ephemeral",
    count: Annotated[int | None, typer.Option(min=1, metavar="N", help="Stop after this many messages")] = None,
    timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Stop if no message arrives for this long, as in 5s")
    ] = None,
    controller: Controller = HERE,
    broker: Brokers = None,
    lookupd: Annotated[
        list[str] | None,
        typer.Option(
            "--lookupd-http-address",
            metavar="HOST:PORT",
            help="nsqlookupd to use instead of the controller; repeatable",
        ),
    ] = None,
    token: Token = None,
    engine: Engine = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each message as a JSON object on its own line")
    ] = False,
) -> None:
    """Print the messages of a topic, one per line, until Ctrl-C or --count.

    The command subscribes where the topic is delivered: at its brokers, or at their delivery engine. If the engine
    needs credentials, pass them in SRTM_ENGINE, as in nats+tls://user:password@host?ca=ca.pem; other users can see
    command lines.

    Example:
        srtm sub traffic --channel billing --count 10
    """
    from srtm.program import run

    if broker and lookupd:
        raise InputError("--broker and --lookupd-http-address exclude each other; give one")
    options: dict[str, Any] = {"brokers": broker} if broker else {"lookupd": lookupd}
    if not broker and not lookupd:
        options = {"controller": controller, "token": token}
    options["engine"] = engine
    wait_s = None if timeout is None else parse_duration_ns(timeout) / NS_PER_S
    where = (lookupd or [controller])[0]
    printed = run(_print(topic, channel, options, where, count, wait_s, as_json))
    if count is not None and printed < count:
        print(f"srtm: received {printed:,} of {count:,} messages; none for {timeout}", file=sys.stderr)
        raise typer.Exit(1)


async def _print(
    topic: str,
    channel: str,
    options: dict[str, Any],
    where: str,
    count: int | None,
    wait_s: float | None,
    as_json: bool,
) -> int:
    import asyncio

    from srtm.client import Subscriber

    printed = 0
    async with (
        Subscriber(topic, channel, **options) as subscriber,
        telling_if_late(
            topic, where, options.get("brokers", ()), lambda: subscriber.brokers, lambda: subscriber.trouble
        ),
    ):
        while count is None or printed < count:
            try:
                async with asyncio.timeout(wait_s):
                    message = await subscriber.get()
            except TimeoutError:
                break
            if message is None:
                break
            if as_json:
                facts = {
                    "body": message.body.decode("utf-8", "backslashreplace"),
                    "id": message.id.decode(),
                    "timestamp_ns": message.timestamp_ns,
                    "attempts": message.attempts,
                    "broker": message.broker,
                }
                print(json.dumps(facts), flush=True)
            else:
                sys.stdout.buffer.write(message.body + b"\n")
                sys.stdout.flush()
            await message.finish()
            printed += 1
    return printed
