"""The controller's store: topics with their contracts and shares, publishers with their places, brokers.

In: changes. Out: everything, at the next start. A `control.keeping.keeper.Keeper` keeps the documents; a file stores
each before the call returns, a shared bucket soon after, so whoever tells others of a change waits for `committed`
first. The shares in the store are the most that brokers may have in force. Each document is complete by itself, so it
does not matter between which two of them a controller ends.

    count/epoch, count/birth    the last number given
    member/BROKER               a broker
    topic/TOPIC                 a contract with its shares, or what is left of one that is over (`remains`)
    publisher/TOPIC/ID          a publisher with its place; without its topic, it means nothing
    action/NUMBER               an entry of the audit log, by its number modulo its length
    token/NAME                  a token, without its secret
    recalling                   the store is being rebuilt from what brokers report
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec

from srtm.control.access.token import Role, Token
from srtm.control.keeping.keeper import TOKENS, key, parts
from srtm.control.keeping.sqlite import SqliteKeeper
from srtm.control.members import DeclaredPublisher, Member
from srtm.control.placing import fitted as fittings
from srtm.control.placing.layout import Places
from srtm.control.topic import ManagedTopic
from srtm.model.bucket import TokenBucket
from srtm.model.split import within
from srtm.model.transfer import Remains, Transfer, scaled
from srtm.protocol.exchange import Contract

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from srtm.control.keeping.keeper import Keeper

_AUDITED = 1_000  # actions kept in the audit log
_RECALLING = "recalling"


class Store:
    """What survives the controller."""

    def __init__(self, folder: str | Path | None = None, *, keeper: Keeper | None = None) -> None:
        """Use a keeper; without one, a file in a folder, or a store in memory."""
        self.keeper: Keeper = keeper if keeper is not None else SqliteKeeper(folder)
        self._actions: int | None = None  # the number of the last one, once it is known

    def close(self) -> None:
        """Close the store."""
        self.keeper.close()

    def next_epoch(self, first: int = 1) -> int:
        """The epoch of this start: larger than any before, and at least `first`."""
        return self._next("epoch", first)

    def next_birth(self, first: int = 1) -> int:
        """The birth of a new contract: larger than any before, and at least `first`."""
        return self._next("birth", first)

    def _next(self, name: str, first: int) -> int:
        at = key("count", name)
        found = self.keeper.read(at).get(at)
        number = max(first, int(found) + 1 if found else 1)
        self._put(at, number)
        return number

    def _put(self, at: str, document: Any) -> None:
        self.keeper.write({at: msgspec.json.encode(document)})

    def _all(self, kind: str) -> Iterator[tuple[list[str], Any]]:
        """All documents of a kind, with the names in their keys."""
        for each, value in self.keeper.read(key(kind, "")).items():
            yield parts(each)[1:], msgspec.json.decode(value)

    def save_member(self, member: Member) -> None:
        """Save a broker."""
        document = {
            "host": member.host,
            "tcp_port": member.tcp_port,
            "http_port": member.http_port,
            "incarnation": member.incarnation,
            "draining": member.draining,
            "dead": member.status == "dead",
        }
        self._put(key("member", member.name), document)

    def delete_member(self, name: str) -> None:
        """Delete a broker."""
        self.keeper.write({key("member", name): None})

    def members(self, mcap_mps: float) -> list[Member]:
        """All brokers."""
        return [
            Member(
                name,
                each["host"],
                each["tcp_port"],
                each["http_port"],
                mcap_mps,
                status="dead" if each["dead"] else "silent",
                incarnation=each["incarnation"],
                draining=each["draining"],
            )
            for (name,), each in self._all("member")
        ]

    def save_topic(self, topic: ManagedTopic) -> None:
        """Save a topic's contract, and the most that brokers may have in force."""
        document = {
            "contract": topic.contract,
            "birth": topic.birth,
            "pool_ntok": topic.transfer.pool_ntok,
            "shares": _shares_out(topic.transfer.booked),
            "former": _shares_out(topic.transfer.former.shares),
            "opened": topic.opened,
            "paused": topic.paused,
            "fitted": fittings.described(topic.fitting.last) if topic.fitting.last else None,
        }
        self._put(key("topic", topic.name), document)

    def delete_topic(self, name: str, remains: Remains) -> None:
        """Delete a topic, and save `remains`: what brokers may have in force until they know."""
        gone = dict.fromkeys(self.keeper.read(key("publisher", name, "")))
        document = {"remains": _shares_out(remains.shares)}
        self.keeper.write({key("topic", name): msgspec.json.encode(document), **gone})

    def delete_remains(self, name: str) -> None:
        """Delete what was kept of a contract that is over: every broker knows."""
        at = key("topic", name)
        kept = self.keeper.read(at).get(at)
        if kept is not None and "remains" in msgspec.json.decode(kept):
            self.keeper.write({at: None})

    def remains(self) -> dict[str, Remains]:
        """What brokers may have in force of contracts that are over, by topic."""
        found = {name: _shares(each["remains"]) for (name,), each in self._all("topic") if "remains" in each}
        return {topic: Remains(shares, doubtful=frozenset(shares)) for topic, shares in found.items()}

    def topics(self, numbers: Iterator[int] | None = None) -> list[ManagedTopic]:
        """All topics with their publishers; `numbers` numbers the grants of all of them."""
        publishers: defaultdict[str, list[tuple[DeclaredPublisher, str | None, bool]]] = defaultdict(list)
        for (topic_name, _), each in self._all("publisher"):
            declared = DeclaredPublisher(**each["declared"])
            publishers[topic_name].append((declared, each["broker"], each["settled"]))
        found = []
        for (name,), each in self._all("topic"):
            if "remains" in each:
                continue
            promised = msgspec.convert(each["contract"], Contract)
            held = _shares(each["shares"])
            whole = promised.bucket  # may be less than is held, if the contract was just changed
            wanted = held if within(whole, held.values()) else scaled(whole, held)
            remains, pool_ntok = Remains(_shares(each["former"])), each["pool_ntok"]
            transfer = Transfer(whole, held, wanted, numbers=numbers, pool_ntok=pool_ntok, remains=remains, kept=True)
            topic = ManagedTopic(name, promised, each["birth"], transfer, 1, each["opened"], paused=each["paused"])
            topic.sharing.stale = False
            topic.layout.publishers = {one.id: one for one, _, _ in publishers[name]}
            places = {one.id: broker for one, broker, _ in publishers[name] if broker is not None}
            topic.layout.place = Places(name, places)
            topic.fitting.settled = frozenset(one.id for one, _, settled in publishers[name] if settled)
            topic.fitting.last = fittings.read(each["fitted"]) if each["fitted"] else None
            found.append(topic)
        return found

    def save_publishers(self, topic: ManagedTopic, ids: Iterable[str]) -> None:
        """Save publishers of a topic with their places."""
        layout, settled = topic.layout, topic.fitting.settled
        documents = {
            name: {"declared": layout.publishers[name], "broker": layout.place.get(name), "settled": name in settled}
            for name in ids
            if name in layout.publishers
        }
        if documents:
            encode = msgspec.json.encode
            self.keeper.write({key("publisher", topic.name, name): encode(each) for name, each in documents.items()})

    def delete_publisher(self, topic: ManagedTopic, publisher: str) -> None:
        """Delete a publisher."""
        self.keeper.write({key("publisher", topic.name, publisher): None})

    @property
    def recalling(self) -> bool:
        """Whether the store was being rebuilt from what brokers report."""
        return _RECALLING in self.keeper.read(_RECALLING)

    @recalling.setter
    def recalling(self, on: bool) -> None:
        self.keeper.write({_RECALLING: b"true" if on else None})

    @property
    def lasting(self) -> bool:
        """Whether a restarted controller finds what it keeps."""
        return self.keeper.lasting

    @property
    def shared(self) -> bool:
        """Whether several controllers use it."""
        return self.keeper.shared

    @property
    def closed(self) -> bool:
        """Whether it has, or had when it was lost, tokens."""
        return self.keeper.guarded

    def save_token(self, token: Token) -> None:
        """Save a token, without its secret."""
        self.keeper.guarded = True
        document = {
            "id": token.id,
            "role": token.role.value,
            "digest": token.digest.hex(),
            "created_ns": token.created_ns,
            "expires_ns": token.expires_ns,
        }
        self._put(key(TOKENS, token.name), document)

    def delete_token(self, name: str) -> None:
        """Delete a token."""
        self.keeper.write({key(TOKENS, name): None})
        if not self.tokens():
            self.keeper.guarded = False

    def tokens(self) -> list[Token]:
        """All tokens."""
        return [
            Token(
                name,
                each["id"],
                Role(each["role"]),
                bytes.fromhex(each["digest"]),
                each["created_ns"],
                each["expires_ns"],
            )
            for (name,), each in self._all(TOKENS)
        ]

    def note_action(self, at_ns: int, who: str, action: str, arguments: dict[str, Any]) -> None:
        """Add an action to the audit log, which keeps the last thousand."""
        if self._actions is None:
            self._actions = max((each["number"] for _, each in self._all("action")), default=0)
        self._actions += 1
        document = {"number": self._actions, "at_ns": at_ns, "who": who, "action": action, "arguments": arguments}
        self._put(key("action", f"{self._actions % _AUDITED:03d}"), document)

    def actions(self) -> list[tuple[int, str, str, dict[str, Any]]]:
        """The audit log, newest first: time, address, action, arguments."""
        kept = sorted((each for _, each in self._all("action")), key=lambda each: -int(each["number"]))
        return [(each["at_ns"], each["who"], each["action"], each["arguments"]) for each in kept]


def _shares_out(shares: Mapping[str, TokenBucket]) -> dict[str, list[int]]:
    return {name: [share.r_mtps, share.b_ntok] for name, share in shares.items()}


def _shares(kept: Mapping[str, list[int]]) -> dict[str, TokenBucket]:
    return {broker: TokenBucket(*share) for broker, share in kept.items()}
