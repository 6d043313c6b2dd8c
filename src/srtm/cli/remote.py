"""Requests of verbs to a controller."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srtm.errors import ControlError
from srtm.files import read_secret

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import httpx

Controller = Annotated[
    str,
    typer.Option(envvar="SRTM_CONTROLLER", metavar="URL", help="HTTP API of the controller, or a list"),
]


def secret_from(variable: str) -> Callable[[str | None], str | None]:
    """A callback of a --…-file option: the secret in the file that was given, or else in a variable."""
    return lambda path: read_secret(path) if path else os.environ.get(variable) or None


# Secrets come from files and variables: other users can see command lines.
Token = Annotated[
    str | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File with the token for the controller; SRTM_TOKEN holds it directly",
        callback=secret_from("SRTM_TOKEN"),
    ),
]
Engine = Annotated[
    str | None,
    typer.Option(
        envvar="SRTM_ENGINE",
        metavar="URL",
        help="Credentials for the delivery engine",
    ),
]
HERE = "http://127.0.0.1:4161"
_PATIENCE_S = 120.0  # an explanation is computed
_LATE_S = 2.0
_UNAUTHORIZED = 401
_UNAVAILABLE = 503


def ask(
    controller: str,
    token: str | None,
    method: str,
    path: str,
    body: object = None,
    *,
    patience_s: float = _PATIENCE_S,
) -> Any:
    """The JSON of the controller's answer; ControlError if it refuses or does not answer.

    The error's fact `stranger` says whether another program answered at that address.
    """
    answer = _answer(controller, method, path, patience_s, token, json=body)
    return answer.json() if answer.content else None


def topic_at(name: str, *more: str) -> str:
    """The path of a topic or of a part of it; InputError if the topic's name is invalid."""
    from srtm.client.cluster import topic_path
    from srtm.protocol.client import pub

    pub(name, b"x")  # checks the name
    return topic_path(name, *more)


def text_at(url: str, path: str, token: str | None = None) -> str:
    """The text of an answer of a controller or broker; never show the controller's token to a broker."""
    return _answer(url, "GET", path, _PATIENCE_S, token).text


@asynccontextmanager
async def telling_if_late(
    topic: str,
    controller: str,
    brokers: Sequence[str],
    found: Callable[[], object],
    trouble: Callable[[], str | None] = lambda: None,
) -> AsyncIterator[None]:
    """Say once on stderr what it waits for if nothing is `found` for a while; `trouble` is the known reason."""

    async def tell() -> None:
        await asyncio.sleep(_LATE_S)
        why = f"no answer from {', '.join(brokers)}" if brokers else f"no broker has topic {topic!r} yet"
        try:
            if not brokers:
                await asyncio.to_thread(text_at, controller, "/ping")
        except ControlError as problem:
            why = str(problem)
        why = trouble() or why
        if not found():
            print(f"srtm: {why}; waiting", file=sys.stderr, flush=True)

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()


def _answer(
    controller: str, method: str, path: str, patience_s: float, token: str | None, **more: Any
) -> httpx.Response:
    import httpx

    from srtm.client.cluster import refusal
    from srtm.net.several import urls

    try:
        answer = _first(urls(controller), token, method, path, patience_s, **more)
    except (httpx.RemoteProtocolError, httpx.ReadError) as problem:
        raise ControlError(
            f"{controller} is not a controller ({problem or 'it closed the connection'});"
            " give the address of the controller's HTTP API with --controller",
            controller=controller,
            stranger=True,
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL) as problem:
        raise ControlError(
            f"no controller answers at {controller} ({problem});"
            " start one with srtm up, or give its address with --controller",
            controller=controller,
        ) from None
    if answer.status_code >= 400:
        found = answer.json() if "json" in answer.headers.get("content-type", "") else None
        said = refusal(found) if isinstance(found, dict) and "detail" in found else None  # a broker speaks otherwise
        stranger = f"{controller} does not answer like a controller; give the address of its HTTP API with --controller"
        if said and answer.status_code == _UNAUTHORIZED:
            said += "; set SRTM_TOKEN, or give --token-file"
        raise ControlError(said or stranger, stranger=answer.status_code < 500)
    return answer


def _first(
    controllers: list[str], token: str | None, method: str, path: str, patience_s: float, **more: Any
) -> httpx.Response:
    """The answer of the first controller that can answer, or of the last one."""
    import httpx

    from srtm.net.tls import context_of_environment

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    times = httpx.Timeout(patience_s, connect=2.0)
    # Loading certificates takes 50 ms.
    tls = context_of_environment() if any(url.startswith("https:") for url in controllers) else False
    with httpx.Client(timeout=times, trust_env=False, headers=headers, verify=tls) as client:
        for url in controllers[:-1]:
            with suppress(httpx.HTTPError):
                answer = client.request(method, url + path, **more)
                if answer.status_code != _UNAVAILABLE:
                    return answer
        return client.request(method, controllers[-1] + path, **more)
