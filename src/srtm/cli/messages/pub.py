"""`srtm pub`: publish lines of stdin or a file, or one message."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from srtm.cli.common import AsJson, print_json
from srtm.cli.remote import HERE, Controller, Token, telling_if_late
from srtm.errors import InputError

_TOGETHER = 100  # messages in one command
_AHEAD = 20  # unanswered commands

Brokers = Annotated[
    list[str] | None,
    typer.Option("--broker", metavar="HOST:PORT", help="Broker or nsqd to use instead of the controller; repeatable"),
]


def pub(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic to publish to", show_default=False)],
    body: Annotated[str | None, typer.Option(metavar="TEXT", help="Message to publish instead of stdin")] = None,
    file: Annotated[Path | None, typer.Option(metavar="FILE", help="File with one message per line")] = None,
    count: Annotated[int, typer.Option(min=1, metavar="N", help="Times to publish all of it")] = 1,
    id: Annotated[  # noqa: A002
        str | None, typer.Option(metavar="ID", help="Id of the publisher", show_default="a new one")
    ] = None,
    group: Annotated[str | None, typer.Option(metavar="GROUP", help="Correlation group of the publisher")] = None,
    controller: Controller = HERE,
    broker: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Broker or nsqd to use instead of the controller")
    ] = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Publish lines of stdin or a file, or one message.

    The command returns when all messages are acknowledged. Empty lines are skipped.

    Examples:
        echo hello | srtm pub traffic
        srtm pub traffic --body hello --count 10
    """
    from srtm.program import run

    if body is not None and file is not None:
        raise InputError("--body and --file exclude each other; give one")
    if body == "":
        raise InputError("--body must not be empty; a message has at least one byte")
    if file is None and body is None and count > 1:
        raise InputError("--count needs --body or --file; stdin can only be read once")
    where = {"controller": controller, "token": token} if broker is None else {"broker": broker}
    options = {**where, "id": id, "group": group}
    published = run(_publish(topic, options, _bodies(body, file, count), waits=body is None and file is None))
    if as_json:
        print_json({"topic": topic, "published": published})
    else:
        print(f"{topic}: {published:,} messages published", file=sys.stderr)


async def _publish(topic: str, options: dict[str, Any], bodies: Iterator[bytes], *, waits: bool) -> int:
    """Publish all bodies and return their number; `waits` if reading them can block, as stdin does."""
    import asyncio

    from srtm.client import Publisher

    published = 0
    loop = asyncio.get_running_loop()
    publisher = Publisher(topic, **options)
    brokers = [options["broker"]] if "broker" in options else []
    async with telling_if_late(topic, options.get("controller", ""), brokers, lambda: publisher.address), publisher:
        ahead: set[asyncio.Task[None]] = set()
        try:
            while batch := await loop.run_in_executor(None, _next, bodies) if waits else _next(bodies):
                ahead.add(loop.create_task(publisher.publish_many(batch)))
                published += len(batch)
                if len(ahead) >= _AHEAD:
                    done, ahead = await asyncio.wait(ahead, return_when=asyncio.FIRST_COMPLETED)
                    await asyncio.gather(*done)
            await asyncio.gather(*ahead)
        finally:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)
    return published


def _bodies(body: str | None, file: Path | None, count: int) -> Iterator[bytes]:
    for _ in range(count):
        if body is not None:
            yield body.encode()
        elif file is not None:
            with _opened(file) as lines:
                yield from (line.rstrip(b"\r\n") for line in lines)
        else:
            yield from (line.rstrip(b"\r\n") for line in sys.stdin.buffer)


def _opened(file: Path) -> IO[bytes]:
    try:
        return file.open("rb")
    except OSError as problem:
        raise InputError(f"--file: cannot read {file}: {problem.strerror}") from None


def _next(bodies: Iterator[bytes]) -> list[bytes]:
    """The messages of the next command; from a terminal, one at a time."""
    most = 1 if sys.stdin.isatty() else _TOGETHER
    found: list[bytes] = []
    for body in bodies:
        if body:
            found.append(body)
            if len(found) == most:
                break
    return found
