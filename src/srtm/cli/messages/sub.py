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
    topic: Annotated[str, typer.Argument(help="The topic to subscribe to.", show_default=False)],
    channel: Annotated[str, typer.Option(help="The channel; others of the same name share its messages.")] = (
        "sub#ephemeral"
    ),
    count: Annotated[int | None, typer.Option(min=1, help="Stop after so many messages.")] = None,
    timeout: Annotated[str | None, typer.Option(help="Stop when nothing came for so long, as in 5s.")] = None,
    controller: Controller = HERE,
    broker: Brokers = None,
    lookupd: Annotated[
        list[str] | None,
        typer.Option("--lookupd-http-address", metavar="HOST:PORT", help="Instead: an nsqlookupd; repeatable."),
    ] = None,
    token: Token = None,
    engine: Engine = None,
    as_json: Annotated[bool, typer.Option("--json", help="Each message as a JSON object, one a line.")] = False,
) -> None:
    """Print the bodies of messages, one a line, until it is stopped (Ctrl-C) or --count have come.

    It subscribes where the topic is delivered: at its brokers, or at their delivery engine. For example:

    srtm sub traffic --channel billing --count 10
    """
    from srtm.program import run

    if broker and lookupd:
        raise InputError("give --broker or --lookupd-http-address, not both")
    options: dict[str, Any] = {"brokers": broker} if broker else {"lookupd": lookupd}
    if not broker and not lookupd:
        options = {"controller": controller, "token": token}
    options["engine"] = engine
    wait_s = None if timeout is None else parse_duration_ns(timeout) / NS_PER_S
    where = (lookupd or [controller])[0]
    printed = run(_print(topic, channel, options, where, count, wait_s, as_json))
    if count is not None and printed < count:
        print(f"srtm: {printed:,} of {count:,} messages came within {timeout}", file=sys.stderr)
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
