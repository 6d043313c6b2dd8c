"""Permissions to publish and subscribe, as contracts list them: identities that AUTH servers or certificates prove.

In: contracts, and the commands of a client. Out: the commands that may be carried out; the first that may not becomes
E_UNAUTHORIZED. A topic whose contract names nobody is for everybody, and costs nothing here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from srtm.errors import ProtocolError
from srtm.protocol.commands import Dpub, Mpub, Pub, Sub

if TYPE_CHECKING:
    from collections.abc import Mapping

    from srtm.protocol.exchange import Contract

GUARDED: Final[dict[type, str]] = {Pub: "PUB", Mpub: "MPUB", Dpub: "DPUB", Sub: "SUB"}


class Client(Protocol):
    """A client that may have said who it is."""

    @property
    def identities(self) -> frozenset[str]:
        """The identities that an AUTH server and a certificate vouch for."""


class Named(NamedTuple):
    """The identities that a contract names; nobody in particular if empty."""

    publishers: frozenset[str]
    subscribers: frozenset[str]


class Permissions:
    """The topics of a broker whose contracts name identities."""

    __slots__ = ("topics",)

    def __init__(self) -> None:
        self.topics: dict[str, Named] = {}

    def learn(self, contracts: Mapping[str, Contract]) -> None:
        """Contracts changed."""
        named = {
            name: Named(frozenset(each.may_publish), frozenset(each.may_subscribe)) for name, each in contracts.items()
        }
        self.topics = {name: each for name, each in named.items() if each.publishers or each.subscribers}

    def refusal(self, verb: str, topic: str, identities: frozenset[str], *, subscribes: bool = False) -> str | None:
        """Why a client with these identities may not do that; None if it may."""
        named = self.topics.get(topic)
        if named is None:
            return None
        allowed = named.subscribers if subscribes else named.publishers
        if not allowed or allowed & identities:
            return None
        shown = ", ".join(sorted(identities)) or "none"
        return f'{verb} on "{topic}" is for identities that its contract names; this client has shown: {shown}'

    def allowed(self, events: list[Any], client: Client) -> list[Any]:
        """The commands of a client up to the first that it may not give, which becomes an error."""
        for number, event in enumerate(events):
            verb = GUARDED.get(type(event))
            if verb is None or event.topic not in self.topics:
                continue
            why = self.refusal(verb, event.topic, client.identities, subscribes=type(event) is Sub)
            if why is not None:
                return [*events[:number], ProtocolError("E_UNAUTHORIZED", why)]
        return events
