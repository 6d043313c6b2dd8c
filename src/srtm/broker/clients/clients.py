"""The clients that are connected: made from sockets, introduced by IDENTIFY, kept alive by heartbeats, closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from srtm.broker.clients.connection import Connection, Keeper
from srtm.broker.clients.heartbeats import Heartbeats
from srtm.broker.clients.reads import Buffers
from srtm.broker.clients.resting import Resting
from srtm.broker.clients.verbs import Verbs
from srtm.broker.options import tls_of
from srtm.protocol import frames
from srtm.protocol.identify import response

if TYPE_CHECKING:
    from collections.abc import Callable

    from srtm.broker.clients.auth import Authority
    from srtm.broker.control import Control
    from srtm.broker.intake import Intake
    from srtm.broker.options import BrokerOptions
    from srtm.broker.poller import Poller, Socket
    from srtm.broker.topics import Topics
    from srtm.broker.turn import Turn
    from srtm.protocol.identify import Identity


class Clients(Keeper):
    """All connections of a broker."""

    def __init__(
        self, options: BrokerOptions, turn: Turn, poller: Poller, topics: Topics, intake: Intake, control: Control
    ) -> None:
        self.turn = turn
        self.poller = poller
        self.tls = tls_of(options, offered=True)
        self.buffers = Buffers(options.read_size)
        self.max_unsent = options.max_unsent_bytes
        # Messages alone never come to so much: a client that leaves more unread does not read its answers.
        self.most_unsent = 2 * options.max_unsent_bytes + options.settings.max_msg_size
        self.connections: dict[Connection, Verbs] = {}
        self.heartbeats = Heartbeats(turn)
        self._settings = options.settings
        self._topics = topics
        self._intake = intake
        self._control = control
        self._resting = Resting(turn, poller)
        self.lend: Callable[[Any, str, bool], None] | None = None  # takes sockets of brokers that ask for tokens
        self.authority: Authority | None = None
        if options.auth_http_addresses:
            from srtm.broker.clients.auth import Authority

            self.authority = Authority(options.auth_http_addresses, turn.loop, options.tls_root_ca_file)

    def add(self, sock: Socket, address: str) -> Connection:
        """Serve a client that has connected; its socket does not block."""
        connection = Connection(self, sock, address, self._settings)
        verbs = connection.speaker = Verbs(connection, self._intake, self._topics, self._introduce)
        if self.authority is not None:
            from srtm.broker.clients.auth import Guard

            verbs.guard = Guard(verbs, self.authority)
        self.connections[connection] = verbs
        self.poller.add(sock, connection.readable)
        self.heartbeats.expect(connection)
        return connection

    def _introduce(self, verbs: Verbs, identity: Identity) -> bytes:
        if identity.srtm:
            self._control.came(identity.srtm, verbs.connection)
        self.heartbeats.expect(verbs.connection)
        engine = self._topics.engine
        return frames.response(response(identity, self._settings, engine.delivery if engine is not None else None))

    def rest(self, connection: Connection) -> None:
        """Read a busy consumer now and then, instead of waking for each FIN."""
        self._resting.rest(connection)

    def end_rest(self, connection: Connection) -> None:
        """Read a resting consumer again as soon as it says something."""
        self._resting.end(connection)

    def closed(self, connection: Connection) -> None:
        """Forget a client whose socket is closed."""
        self.connections.pop(connection, None)
        self.heartbeats.forget(connection)
        self._resting.forget(connection)
        if declared := connection.protocol.identity.srtm:
            self._control.went(declared, connection)

    def close(self) -> None:
        """Disconnect all."""
        for connection in list(self.connections):
            connection.close()
