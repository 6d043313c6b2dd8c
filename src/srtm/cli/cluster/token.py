"""`srtm token`: credentials of people, programs and brokers."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Annotated
from urllib.parse import quote

import typer

from srtm.cli.common import AsJson, new_table, print_json, print_table
from srtm.cli.help import App
from srtm.cli.remote import HERE, Controller, Token, ask
from srtm.control.access.token import Role
from srtm.errors import InputError
from srtm.units import NS_PER_S, parse_duration_ns

app = App("Create, list and revoke the tokens that a controller accepts.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the token", show_default=False)]


@app.command()
def create(
    name: Name,
    role: Annotated[str, typer.Option(metavar="ROLE", help=f"Role: {', '.join(Role)}")],
    expires: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Time that the token is valid, as in 30d", show_default="ever"),
    ] = None,
    controller: Controller = HERE,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Create a token, and print its secret once.

    The first token must be an admin's. As soon as it exists, every request to the controller needs a token.
    A viewer reads, an operator also changes topics and publishers, and an admin also manages tokens and removes
    brokers. A broker registers with a token of the role broker that has its name; a * at the end of the name covers
    several brokers.

    Examples:
        srtm token create root --role admin > root.token
        srtm token create dashboard --role viewer --expires 30d --token-file root.token
        srtm token create 'broker-*' --role broker --token-file root.token
    """
    if role not in set(Role):
        raise InputError(f"unknown role {role!r}; choose {', '.join(Role)}")
    expires_s = None if expires is None else parse_duration_ns(expires) / NS_PER_S
    made = ask(controller, token, "POST", "/v1/tokens", {"name": name, "role": role, "expires_s": expires_s})
    if as_json:
        print_json(made)
        return
    print(
        f"token {name} ({role}), {_until(made['expires_ms'])}; keep its secret, nobody can read it again:",
        file=sys.stderr,
    )
    print(made["secret"])


@app.command("ls")
def list_(controller: Controller = HERE, token: Token = None, as_json: AsJson = False) -> None:
    """List the tokens, without their secrets."""
    found = ask(controller, token, "GET", "/v1/tokens")
    if as_json:
        print_json(found)
        return
    table = new_table("token", "role", "id", "created", "expires")
    for each in found["tokens"]:
        ends = f"{_until(each['expires_ms'])}{' (expired)' if each['expired'] else ''}"
        table.add_row(each["name"], each["role"], each["id"], _date(each["created_ms"]), ends)
    print_table(table)


@app.command()
def rm(name: Name, controller: Controller = HERE, token: Token = None) -> None:
    """Revoke a token; requests with it fail at once.

    When the last token is gone, the controller is open to everyone again, unless it runs with --auth-required or a
    token of its own (SRTM_TOKEN).
    """
    ask(controller, token, "DELETE", f"/v1/tokens/{quote(name, safe='')}")
    print(f"token {name}: revoked")


def _until(expires_ms: int | None) -> str:
    return "valid until revoked" if expires_ms is None else f"valid until {_date(expires_ms)}"


def _date(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
