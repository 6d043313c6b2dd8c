"""Registration with nsqlookupd: this broker's addresses, topics and channels.

Every controller of a cluster is such a service. One task per service keeps it up to date: it sends the difference
between what the service was told and what exists, at once after a change, and everything after a reconnection. A PING
every 15 s detects dead connections.

A topic that is new here may have channels elsewhere, which must get its first messages, too. So a new topic delivers
nothing until the lookup services have named its channels, or did not answer in time.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from srtm.broker.options import tls_to_controller
from srtm.errors import BrokerError, InputError, ProtocolError
from srtm.net.backoff import Backoff
from srtm.net.explain import explained
from srtm.net.several import listed, resolved
from srtm.net.sockets import open_streams
from srtm.net.tls import names_in
from srtm.protocol import lookup
from srtm.protocol.names import MAGIC_V1, ephemeral, valid_name

if TYPE_CHECKING:
    import httpx

    from srtm.broker.broker import Broker
    from srtm.broker.topic import Topic

log = logging.getLogger(__name__)

PING_S = 15.0
LOOK_S = 0.5  # between checks whether a service closed the connection: it may have restarted, and know nothing
CONNECT_S = 1.0
ANSWER_S = 5.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 4.0  # shorter than the time that a recovering controller waits
_PATIENT_S = 1.0  # longer pauses are logged
_RESOLVE_S = 10.0  # between looks at the names of controllers
_BATCH = 500  # commands sent before their answers are read

_TLS = "tls://"

Names = set[tuple[str, str | None]]


def by_tls(address: str) -> bool:
    """Whether a controller's address asks for TLS."""
    return address.startswith(_TLS)


class Peer:
    """One lookup service."""

    def __init__(self, address: str, broker: Broker, *, controls: bool) -> None:
        """`controls`: it is a controller of this broker, which hears its token and its HTTPS port."""
        self.tls = by_tls(address)
        host, colon, port = address.removeprefix(_TLS).rpartition(":")
        if not colon or not port.isdigit():
            raise BrokerError(f"invalid controller or nsqlookupd address {address!r}: use host:port", address=address)
        self.address = address
        self._controls = controls
        self.token = broker.options.broker_token if controls else None
        self.http: str | None = None  # the URL to ask for channels, once the service has named it
        self.names: frozenset[str] = frozenset()  # in the service's certificate, as last seen
        self.changed = asyncio.Event()
        self._host, self._port = host.strip("[]"), int(port)
        self._broker = broker
        self._protocol = lookup.LookupClient()
        self._answers: list[bytes | ProtocolError] = []
        self._registered: Names = set()

    async def keep(self) -> None:
        """Stay connected with back-off; register everything, then every change."""
        backoff, told = Backoff(_FIRST_WAIT_S, _LONGEST_WAIT_S), False
        while True:
            try:
                async with asyncio.timeout(CONNECT_S):
                    tls = tls_to_controller(self._broker.options) if self.tls else None
                    reader, writer = await open_streams(self._host, self._port, tls)
            except (OSError, InputError) as error:
                if backoff.limit_s > _PATIENT_S and not told:  # otherwise both may just have started
                    log.warning("LOOKUPD(%s): cannot connect: %s", self.address, explained(error))
                    told = True
            else:
                told = False
                try:
                    await self._speak(reader, writer)
                except (OSError, EOFError, ProtocolError) as error:
                    log.warning("LOOKUPD(%s): %s", self.address, explained(error))
                finally:
                    if self.http is not None:
                        backoff.reset()
                    self.http = None
                    writer.close()
                    with suppress(OSError):
                        await writer.wait_closed()
            await asyncio.sleep(backoff.next_s())

    async def _speak(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        broker = self._broker
        options = broker.options
        us = lookup.PeerInfo(
            options.address,
            options.name,
            broker.tcp_port,
            broker.http_port,
            options.settings.version,
            broker.https_port if self._controls else 0,
        )
        self._protocol, self._registered = lookup.LookupClient(), set()
        self._answers.clear()
        self.names = names_in(writer.get_extra_info("peercert"))
        (answer,) = await self._command(reader, writer, [MAGIC_V1 + lookup.identify(us, self.token)])
        them = lookup.read_peer(answer)
        host = them.broadcast_address or self._host
        self.http = f"{'https' if self.tls else 'http'}://{f'[{host}]' if ':' in host else host}:{them.http_port}"
        log.info("LOOKUPD(%s): registered", self.address)
        while True:
            self.changed.clear()
            await self._update(reader, writer)
            if not await self._change(reader):
                await self._command(reader, writer, [lookup.PING])

    async def _change(self, reader: asyncio.StreamReader) -> bool:
        """Wait for a change; return False if a PING is due first. EOFError if the service closed the connection."""
        until = self._broker.turn.loop.time() + PING_S
        while (left_s := until - self._broker.turn.loop.time()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(LOOK_S, left_s)):
                    return await self.changed.wait()
            if reader.at_eof() or reader.exception():
                raise EOFError("the service closed the connection")
        return False

    async def _update(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send the difference between what exists and what the service was told."""
        there: Names = set()
        # Topics that an engine delivers are not registered: consumers must not come here.
        for topic in self._broker.topics.values() if self._broker.topics.engine is None else ():
            there.add((topic.name, None))
            there.update((topic.name, name) for name in topic.channels)
        gone = self._registered - there
        commands = [
            lookup.unregister(topic, channel)
            for topic, channel in sorted(gone, key=str)
            if channel is None or (topic, None) not in gone
        ]
        commands += [lookup.register(*names) for names in sorted(there - self._registered, key=str)]
        for at in range(0, len(commands), _BATCH):
            await self._command(reader, writer, commands[at : at + _BATCH])
        self._registered = there

    async def _command(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, commands: list[bytes]
    ) -> list[bytes]:
        """Send commands, and return one answer for each."""
        async with asyncio.timeout(ANSWER_S):
            writer.write(b"".join(commands))
            await writer.drain()
            while len(self._answers) < len(commands):
                data = await reader.read(65536)
                if not data:
                    raise EOFError("the service closed the connection")
                self._answers += self._protocol.feed(data)
                for answer in self._answers:
                    if isinstance(answer, ProtocolError):
                        raise answer
        found = [answer for answer in self._answers[: len(commands)] if isinstance(answer, bytes)]
        del self._answers[: len(commands)]
        return found


class Registration:
    """A broker's lookup services, which may change while it runs."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._controllers = listed(broker.options.controller) if broker.options.controller else []
        self._fixed = list(self._controllers)  # with names resolved that have several records
        self.addresses: list[str] | None = list(broker.options.lookupd)  # of nsqlookupd; None is nsqd's empty list, too
        self._peers = {address: self._peer(address) for address in (*self._fixed, *self.addresses)}
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._clients: dict[bool, httpx.AsyncClient] = {}  # with TLS and without

    def _peer(self, address: str) -> Peer:
        return Peer(address, self._broker, controls=address in self._fixed)

    @property
    def controllers(self) -> frozenset[str]:
        """The names in the certificates of the controllers that this broker registered with by TLS."""
        return frozenset().union(*(self._peers[address].names for address in self._fixed if address in self._peers))

    def start(self) -> None:
        """Register, and follow the broker's changes."""
        for address in self._peers:
            self._begin(address)
        if self._controllers:
            self._follow(self._broker.turn.loop.create_task(self._resolve()))
        self._broker.topics.on_change = self._changed
        if self._broker.topics.engine is None:
            self._broker.topics.on_topic = self._made

    def register_with(self, addresses: list[str] | None) -> None:
        """Register with these nsqlookupd from now on, and no longer with others; BrokerError names a bad address."""
        wanted = dict.fromkeys((*self._fixed, *(addresses or ())))
        new = {address: self._peer(address) for address in wanted if address not in self._peers}
        for address in self._peers.keys() - wanted:
            del self._peers[address]
            self._keeping.pop(address).cancel()  # the service drops what it was told when the connection closes
        self._peers |= new
        for address in new:
            self._begin(address)
        self.addresses = addresses

    async def _resolve(self) -> None:
        """Register with every controller that a name stands for, now and whenever that changes."""
        while True:
            found = [each for address in self._controllers for each in await resolved(address)]
            if found != self._fixed:
                log.info("LOOKUPD: controllers are now %s", ", ".join(found))
                self._fixed = found
                self.register_with(self.addresses)
            await asyncio.sleep(_RESOLVE_S)

    def _begin(self, address: str) -> None:
        task = self._keeping[address] = self._broker.turn.loop.create_task(self._peers[address].keep())
        self._follow(task)

    def _follow(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _changed(self) -> None:
        for peer in self._peers.values():
            peer.changed.set()

    def _made(self, topic: Topic) -> None:
        peers = [peer for peer in self._peers.values() if peer.http]
        if peers:
            topic.starting = True
            self._follow(self._broker.turn.loop.create_task(self._start(topic, peers)))

    async def _start(self, topic: Topic, peers: list[Peer]) -> None:
        """Create the channels that the topic has elsewhere, then let it deliver."""
        try:
            found = await asyncio.gather(*(self._channels(peer, topic.name) for peer in peers))
            if self._broker.topics.alive(topic):
                for name in sorted(set().union(*found)):
                    if valid_name(name) and not ephemeral(name):  # an ephemeral channel needs a consumer here
                        self._broker.topics.channel(topic, name)
        finally:
            topic.starting = False
        if self._broker.topics.alive(topic):
            self._broker.turn.touch(topic)

    async def _channels(self, peer: Peer, topic: str) -> list[str]:
        import httpx

        url, headers = peer.http, {"Authorization": f"Bearer {peer.token}"} if peer.token else {}
        try:
            client = self._clients.get(peer.tls)
            if client is None:
                times = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
                tls = tls_to_controller(self._broker.options) if peer.tls else False
                client = self._clients[peer.tls] = httpx.AsyncClient(timeout=times, trust_env=False, verify=tls)
            answer = await client.get(f"{url}/channels", params={"topic": topic}, headers=headers)
            answer.raise_for_status()
            return [str(name) for name in answer.json()["channels"]]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:  # InputError is one
            log.warning("LOOKUPD(%s): cannot list the channels of topic %s: %s", url, topic, error)
            return []

    async def stop(self) -> None:
        """Close the connections; the services then drop the registrations."""
        self._broker.topics.on_change = self._broker.topics.on_topic = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._clients.values():
            await client.aclose()
