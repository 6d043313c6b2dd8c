"""How verbs speak to a controller."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srtm.errors import ControlError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    import httpx

Controller = Annotated[
    str, typer.Option(envvar="SRTM_CONTROLLER", metavar="URL", help="Where the controller's HTTP is.")
]
Token = Annotated[
    str | None, typer.Option(envvar="SRTM_TOKEN", help="What the controller wants to be shown, if anything.")
]
Engine = Annotated[
    str | None,
    typer.Option(
        envvar="SRTM_ENGINE",
        metavar="ADDRESS",
        help="Login and TLS files for a delivery engine that wants them, as in nats+tls://user:password@host?ca=ca.pem."
        " Pass secrets in the variable; other users can see command lines.",
    ),
]
HERE = "http://127.0.0.1:4161"
_PATIENCE_S = 120.0  # an explanation is computed
_LATE_S = 2.0


def ask(
    controller: str,
    token: str | None,
    method: str,
    path: str,
    body: object = None,
    *,
    patience_s: float = _PATIENCE_S,
) -> Any:
    """The JSON of an answer; what the controller refuses, and that there is none, are errors.

    Their fact `stranger` says whether somebody else may be there, who does not know what was asked for.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    answer = _answer(controller, method, path, patience_s, json=body, headers=headers)
    return answer.json() if answer.content else None


def topic_at(name: str, *more: str) -> str:
    """The path of a topic, or of something that belongs to it; InputError if no topic can be called so."""
    from srtm.client.cluster import topic_path
    from srtm.protocol.client import pub

    pub(name, b"x")  # the name is judged here
    return topic_path(name, *more)


def text_at(url: str, path: str) -> str:
    """The text of an answer of a controller or a broker."""
    return _answer(url, "GET", path, _PATIENCE_S).text


@asynccontextmanager
async def telling_if_late(
    topic: str,
    controller: str,
    brokers: Sequence[str],
    found: Callable[[], object],
    trouble: Callable[[], str | None] = lambda: None,
) -> AsyncIterator[None]:
    """Say on stderr what is waited for, once, if nothing is `found` for a while; `trouble` is what was in the way."""

    async def tell() -> None:
        await asyncio.sleep(_LATE_S)
        why = f"nobody answers at {', '.join(brokers)}" if brokers else f"no broker has a topic {topic!r} yet"
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


def _answer(controller: str, method: str, path: str, patience_s: float, **more: Any) -> httpx.Response:
    import httpx

    from srtm.client.cluster import refusal

    url = controller if "://" in controller else f"http://{controller}"
    try:
        with httpx.Client(timeout=httpx.Timeout(patience_s, connect=2.0), trust_env=False) as client:
            answer = client.request(method, url.rstrip("/") + path, **more)
    except (httpx.RemoteProtocolError, httpx.ReadError) as problem:
        raise ControlError(
            f"what listens at {controller} is no controller ({problem or 'it hung up'}): give the address of its HTTP"
            " with --controller",
            controller=controller,
            stranger=True,
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL) as problem:
        raise ControlError(
            f"no controller answers at {controller} ({problem}): start one with srtm up, or say where it is with"
            " --controller",
            controller=controller,
        ) from None
    if answer.status_code >= 400:
        found = answer.json() if "json" in answer.headers.get("content-type", "") else None
        said = refusal(found) if isinstance(found, dict) and "detail" in found else None  # a broker speaks otherwise
        stranger = f"what listens at {controller} does not answer as a controller does: give the address of its HTTP"
        raise ControlError(said or f"{stranger} with --controller", stranger=answer.status_code < 500)
    return answer
