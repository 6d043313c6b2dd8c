"""`srtm debug bundle`: everything needed to diagnose a problem, in one file, without secrets."""

from __future__ import annotations

import io
import json
import platform
import sys
import tarfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

import srtm
from srtm.cli.common import AsJson, print_json
from srtm.cli.help import App
from srtm.cli.remote import HERE, Controller, Token, ask, text_at, topic_at
from srtm.errors import InputError, SRTMError

app = App("Collect information for a bug report.")

_MOST_LOG = 20 * 1024 * 1024  # bytes of each log, the last ones


@app.callback()
def _debug() -> None:
    """Keep `bundle` a command of its own."""


@app.command()
def bundle(
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write", show_default="srtm-debug-TIME.tar.gz")
    ] = None,
    logs: Annotated[list[Path] | None, typer.Option("--log", metavar="FILE", help="Log to include; repeatable")] = None,
    controller: Controller = HERE,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Write a tar.gz with everything needed to diagnose a problem.

    The bundle holds versions, options, statistics, metrics, topics, events and brokers, but no secrets.
    Anything that cannot be collected is listed in problems.json.

    Example:
        srtm debug bundle --log controller.log
    """
    for log in logs or ():
        if not log.is_file():
            raise InputError(f"--log: no such file: {log}")
    target = out or Path(f"srtm-debug-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    found, problems = collect(controller, token)
    for number, log in enumerate(logs or ()):
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _MOST_LOG))
            found[f"logs/{number}-{log.name}"] = file.read()
    found["problems.json"] = _document(problems)
    with tarfile.open(target, "w:gz") as archive:
        for name, content in sorted(found.items()):
            entry = tarfile.TarInfo(f"{target.name.removesuffix('.tar.gz')}/{name}")
            entry.size, entry.mtime = len(content), int(time.time())
            archive.addfile(entry, io.BytesIO(content))
    if as_json:
        print_json({"file": str(target), "entries": sorted(found), "problems": problems})
        return
    for what, why in problems.items():
        print(f"srtm: skipped {what}: {why}", file=sys.stderr)
    print(target)


def collect(controller: str, token: str | None) -> tuple[dict[str, bytes], dict[str, str]]:
    """Files by name, and the problems of those that could not be collected."""
    found: dict[str, bytes] = {"versions.json": _document(_versions())}
    problems: dict[str, str] = {}

    def take(name: str, read: Callable[[], Any]) -> Any:
        try:
            value = read()
        except SRTMError as problem:
            problems[name] = str(problem)
            return None
        found[name] = value.encode() if isinstance(value, str) else _document(value)
        return value

    take("controller/options.json", lambda: ask(controller, token, "GET", "/v1/options"))
    take("controller/metrics.txt", lambda: text_at(controller, "/metrics", token))
    take("controller/audit.json", lambda: ask(controller, token, "GET", "/v1/audit"))
    topics = take("controller/topics.json", lambda: ask(controller, token, "GET", "/v1/topics"))
    brokers = take("controller/brokers.json", lambda: ask(controller, token, "GET", "/v1/brokers"))
    for topic in (topics or {}).get("topics", ()):
        name = topic["topic"]
        paths = {"topic": topic_at(name), **{what: topic_at(name, what) for what in ("history", "publishers")}}
        for what, at in paths.items():
            take(f"topics/{name}/{what}.json", lambda at=at: ask(controller, token, "GET", at))  # type: ignore[misc]
    for number, broker in enumerate((brokers or {}).get("brokers", ())):
        folder = f"brokers/{number}-{_file_name(broker['name'])}"
        for name, path in (("info.json", "/info"), ("stats.json", "/stats?format=json"), ("metrics.txt", "/metrics")):
            take(f"{folder}/{name}", lambda at=broker["http"], path=path: text_at(at, path))  # type: ignore[misc]
    return found, problems


def _versions() -> dict[str, Any]:
    packages = {each.name: each.version for each in metadata.distributions()}
    return {
        "srtm": srtm.__version__,
        "python": sys.version,
        "platform": platform.platform(),
        "packages": dict(sorted(packages.items())),
    }


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name)[:100]


def _document(value: object) -> bytes:
    return json.dumps(value, indent=1).encode()
