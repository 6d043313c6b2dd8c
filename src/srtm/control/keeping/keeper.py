"""What a store is to a controller: documents by key, which one controller at a time may write.

A `Keeping` is a place for a store, and `lead` waits until this process may write there. It returns a `Keeper`, on which
the typed `control.store.Store` stands. Nothing else knows what kind of place it is.

Always holds, and `tests/control/keeping/test_conformance.py` checks it for every kind:

- writes are stored in the order in which they were made, so whatever is stored is a prefix of them;
- after `committed` has returned, everything written before the call is there for whoever leads next;
- once another process leads, no write of this one is stored, and `committed` raises `LeadershipLost`;
- `leads` is False before another process can lead, by this host's own clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote, unquote

if TYPE_CHECKING:
    from collections.abc import Mapping


TOKENS = "token"  # the first part of keys that survive the loss of all others, if they can be read


def key(*parts: str) -> str:
    """The key of a document. Any text may be a part; the key is also a key of NATS."""
    return "/".join(_part(each) for each in parts)


def parts(of: str) -> list[str]:
    """The parts of a key."""
    return [unquote(each.replace("=", "%"), errors="surrogateescape") for each in of.split("/")]


def _part(text: str) -> str:
    quoted = quote(text, safe="", errors="surrogateescape").replace(".", "%2E").replace("~", "%7E")
    return quoted.replace("%", "=")


class Keeper(Protocol):
    """A store that this process may write for as long as it leads."""

    @property
    def place(self) -> str:
        """The address of the store, without secrets."""

    @property
    def lasting(self) -> bool:
        """Whether the documents outlive this process."""

    @property
    def shared(self) -> bool:
        """Whether several controllers use the store."""

    guarded: bool  # whether it has tokens, or had some when its documents were lost

    @property
    def leads(self) -> bool:
        """Whether this process may act now."""

    def read(self, prefix: str = "") -> dict[str, bytes]:
        """All documents whose keys begin with `prefix`, with everything written here."""

    def write(self, changes: Mapping[str, bytes | None]) -> None:
        """Store these documents; None deletes one."""

    async def committed(self) -> None:
        """Return when everything written so far is stored; LeadershipLost if it will not be."""

    async def confirm(self) -> None:
        """Return when it is certain that this process still led when it was asked; LeadershipLost if it did not."""

    async def lost(self) -> None:
        """Return when another process leads."""

    async def release(self) -> None:
        """Let another process lead at once, and close the store."""

    def close(self) -> None:
        """Close the store as the end of the process would."""


@dataclass(frozen=True, slots=True)
class Leader:
    """The controller that leads, as it described itself."""

    name: str
    url: str  # of its HTTP API


class Keeping(Protocol):
    """A place for a store."""

    @property
    def leader(self) -> Leader | None:
        """The process that leads, as far as this one knows; None if it knows of none."""

    @property
    def shared(self) -> bool:
        """Whether several controllers may use the place."""

    async def lead(self, me: Leader) -> Keeper:
        """Wait until this process leads."""

    async def close(self) -> None:
        """Close all connections."""
