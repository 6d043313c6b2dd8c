"""How verbs speak to a controller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from srtm.errors import ControlError

if TYPE_CHECKING:
    import httpx

Controller = Annotated[
    str, typer.Option(envvar="SRTM_CONTROLLER", metavar="URL", help="Where the controller's HTTP is.")
]
Token = Annotated[
    str | None, typer.Option(envvar="SRTM_TOKEN", help="What the controller wants to be shown, if anything.")
]
HERE = "http://127.0.0.1:4161"
_PATIENCE_S = 120.0  # an explanation is computed


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
        raise ControlError(
            refusal(found) or f"{url} does not answer as a controller does", stranger=answer.status_code < 500
        )
    return answer
