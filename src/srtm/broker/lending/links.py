"""Connections between brokers that lend: each connects to those that it may ask, and answers those that ask it.

In: names and addresses of peers, sockets of brokers that connect. Out: what they say, in an inbox. A connection that
breaks is made again, with waits that grow; while there is none, asks are lost.

A broker with a certificate connects by TLS, and verifies its peers; one that requires TLS refuses all others.

Always holds: nobody is heard that has not proved to have the control token, if this broker has one; and nobody is
asked whose name is not the one that the controller gave.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, NamedTuple

from srtm.broker.lending.lenders import Heard
from srtm.broker.lending.pipe import Pipe
from srtm.broker.options import tls_of, tls_to_peers
from srtm.errors import InputError, ProtocolError
from srtm.net.backoff import Backoff
from srtm.net.explain import explained
from srtm.net.sockets import connect, split_address
from srtm.net.tls import Tls
from srtm.protocol.lending import (
    MAGIC,
    MAGIC_TLS,
    NONCE_SIZE,
    Answers,
    Asks,
    BeginTls,
    Challenge,
    Hello,
    Refused,
    Welcome,
    encode,
    hello,
    proves,
)

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Mapping

    from srtm.broker.lending.lenders import Lenders
    from srtm.broker.options import BrokerOptions
    from srtm.broker.poller import Poller
    from srtm.broker.turn import Turn
    from srtm.protocol.lending import Entry, Message

log = logging.getLogger(__name__)

_CONNECT_S = 1.0
_GREET_S = 5.0


class Layers(NamedTuple):
    """TLS of connections from and to other brokers, if this one has a certificate, and whether it is `required`."""

    served: ssl.SSLContext | None
    used: ssl.SSLContext | None
    required: bool


class Links:
    """All of a broker's connections to and from others."""

    def __init__(self, options: BrokerOptions, incarnation: int, turn: Turn, poller: Poller, lenders: Lenders) -> None:
        self.name = options.name
        self.incarnation = incarnation
        self.token = options.control_token
        self.turn = turn
        self.poller = poller
        self.lenders = lenders
        self.strangers: set[Visitor] = set()  # have connected, and not said who they are
        self.visitors: dict[str, Visitor] = {}
        self.incarnations: dict[str, int] = {}  # as last heard
        self.tls = Layers(tls_of(options), tls_to_peers(options), options.settings.tls_required)
        self._links: dict[str, Link] = {}
        self._closed = False

    def meet(self, peers: Mapping[str, str]) -> None:
        """Keep connections to these, by name and address, and to no others."""
        if self._closed:  # an exchange came while the broker stops
            return
        for name, link in list(self._links.items()):
            if peers.get(name) != link.address:
                self._links.pop(name).stop()
        for name, address in peers.items():
            if name not in self._links:
                self._links[name] = Link(self, name, address)

    def post(self, peer: str, asks: bool, entry: Entry, /) -> None:  # noqa: FBT001 - a callback
        """Say something at the end of this turn, if that broker is there."""
        end = self._links.get(peer) if asks else self.visitors.get(peer)
        if end is not None and end.greeted and end.pipe is not None:
            end.pipe.post(entry)

    def welcome(self, sock: socket.socket, address: str, secure: bool, /) -> None:  # noqa: FBT001 - a callback
        """Serve a broker that has connected and said `MAGIC`, or `MAGIC_TLS` to be `secure`."""
        visitor = Visitor(self, sock, address)
        if not secure and self.tls.required:
            visitor.refuse("this broker requires TLS: start the other one with --tls-cert and --tls-key, too")
        elif secure and self.tls.served is None:
            visitor.refuse("this broker has no certificate: start it with --tls-cert and --tls-key, too")
        elif secure:
            visitor.secure()
        else:
            visitor.challenge()

    def close(self) -> None:
        """Leave all, and meet nobody any more."""
        self.meet({})
        self._closed = True
        for visitor in (*self.strangers, *self.visitors.values()):
            visitor.pipe.close()


class Visitor:
    """A broker that connected, and asks."""

    __slots__ = ("_links", "_nonce", "address", "greeted", "incarnation", "name", "pipe")

    def __init__(self, links: Links, sock: socket.socket, address: str) -> None:
        self.address = address
        self.greeted = False
        self.name = ""
        self.incarnation = 0
        self._links = links
        self._nonce = secrets.token_bytes(NONCE_SIZE)
        self.pipe = Pipe(sock, links.turn, links.poller, self._take, self._lost, asks=False)
        links.strangers.add(self)
        links.turn.loop.call_later(_GREET_S, self._check_greeting)

    def secure(self) -> None:
        """Let the handshake begin; the challenge follows it."""
        context = self._links.tls.served
        assert context is not None
        self.pipe.send(encode(BeginTls()))
        self.pipe.secure(Tls(context), self.challenge)

    def challenge(self) -> None:
        """Ask for a proof that it has the control token."""
        self.pipe.send(encode(Challenge(self._nonce)))

    def _take(self, message: Message) -> None:
        match message:
            case Hello() if not self.greeted:
                self._greet(message)
            case Asks(entries) if self.greeted:
                self._links.lenders.inbox += [Heard(self.name, True, entry, self.incarnation) for entry in entries]
            case _:
                raise ProtocolError("E_INVALID", f"unexpected {type(message).__name__.lower()}")

    def _greet(self, said: Hello) -> None:
        links = self._links
        if not proves(said, self._nonce, links.token):
            self.refuse("the control tokens of these brokers differ")
            raise ProtocolError("E_INVALID", "refused")
        self.greeted, self.name, self.incarnation = True, said.name, said.incarnation
        links.strangers.discard(self)
        if earlier := links.visitors.get(said.name):
            earlier.pipe.close()
        links.visitors[said.name] = self
        if links.incarnations.get(said.name, said.incarnation) != said.incarnation:
            links.lenders.renew(said.name, links.turn.now_ns())
        links.incarnations[said.name] = said.incarnation
        self.pipe.send(encode(Welcome(links.name, links.incarnation)))

    def refuse(self, reason: str) -> None:
        """Say why not, and end it."""
        log.warning("LENDING(%s): refused: %s", self.address, reason)
        self.pipe.send(encode(Refused(reason)))
        self._leave()

    def _check_greeting(self) -> None:
        if not self.greeted:
            self._leave()

    def _leave(self) -> None:
        self._links.strangers.discard(self)
        self.pipe.close()

    def _lost(self, problem: str) -> None:
        self._links.strangers.discard(self)
        if self._links.visitors.get(self.name) is self:
            del self._links.visitors[self.name]
        log.info("LENDING(%s): %s left: %s", self.address, self.name or "a stranger", problem)


class Link:
    """The connection to one peer that this broker asks, made again whenever it breaks."""

    __slots__ = ("_ended", "_links", "_problem", "_task", "address", "greeted", "incarnation", "name", "pipe")

    def __init__(self, links: Links, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.greeted = False
        self.incarnation = 0
        self.pipe: Pipe | None = None
        self._links = links
        self._problem = ""
        self._ended = asyncio.Event()
        self._task = links.turn.loop.create_task(self._keep())

    def stop(self) -> None:
        """Connect no more."""
        self._task.cancel()
        if self.pipe is not None:
            self.pipe.close()

    async def _keep(self) -> None:
        backoff, told = Backoff(), set[str]()
        while True:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    sock = await connect(*split_address(self.address))
            except (OSError, ValueError, InputError) as error:
                self._problem = f"cannot connect: {explained(error) if isinstance(error, OSError) else error}"
            else:
                links = self._links
                self._ended.clear()
                self.pipe = Pipe(sock, links.turn, links.poller, self._take, self._lost, asks=True)
                self.pipe.send(MAGIC if links.tls.used is None else MAGIC_TLS)
                late = links.turn.loop.call_later(_GREET_S, self._check_greeting)
                await self._ended.wait()
                late.cancel()
                if self.greeted:
                    backoff.reset()
                    told.clear()
                self.greeted = False
            if self._problem not in told:
                told.add(self._problem)
                log.warning("LENDING(%s at %s): %s", self.name, self.address, self._problem)
            await asyncio.sleep(backoff.next_s())

    def _take(self, message: Message) -> None:
        links = self._links
        assert self.pipe is not None
        secures = links.tls.used is not None
        match message:
            case BeginTls() if secures and not self.pipe.secured:
                assert links.tls.used is not None
                self.pipe.secure(Tls(links.tls.used, split_address(self.address)[0]))
            case Challenge(nonce) if self.pipe.secured == secures:  # a token is proved to nobody in the clear
                self.pipe.send(encode(hello(links.name, links.incarnation, nonce, links.token)))
            case Welcome(name, incarnation) if name == self.name:
                self.greeted, self.incarnation = True, incarnation
            case Welcome(name, _):
                raise ProtocolError("E_INVALID", f"broker {name} is there instead")
            case Refused(reason):
                raise ProtocolError("E_INVALID", f"it refuses: {reason}")
            case Answers(entries) if self.greeted:
                links.lenders.inbox += [Heard(self.name, False, entry, self.incarnation) for entry in entries]
            case _:
                raise ProtocolError("E_INVALID", f"unexpected {type(message).__name__.lower()}")

    def _check_greeting(self) -> None:
        if self.pipe is not None and not self.greeted:
            self.pipe.end(f"no greeting within {_GREET_S:g} s")

    def _lost(self, problem: str) -> None:
        if self.pipe is not None and not self.pipe.ready:
            host = split_address(self.address)[0]
            problem += f"; its certificate must name {host}, and --tls-root-ca-file must vouch for it"
        self.pipe = None
        self._problem = problem
        self._ended.set()
