"""A store in a bucket of JetStream, for several controllers: one leads by a lease, and the others are ready.

In: documents. Out: the same documents to whoever leads next. A controller that is ready looks at the lease a few times
a second. When the lease has ended, it writes its own claim, on condition that nobody wrote anything since it looked;
one of several succeeds. From then on the bucket refuses every write of the last leader (`ledger`), and what that one
had stored is what the new leader reads. docs/adr/0030-several-controllers.md has the reasons.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from srtm.control.keeping.bucket import LEASE
from srtm.control.keeping.lease import LEASE_S, Claim, Held, Observed, now_ns
from srtm.control.keeping.ledger import Ledger
from srtm.errors import ClientError, InputError, LeadershipLost
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from srtm.client.nats import NatsConnection
    from srtm.control.keeping.bucket import Bucket
    from srtm.control.keeping.keeper import Keeper, Leader

log = logging.getLogger(__name__)

_LOOK_S = 0.2  # between two looks at the lease
_RELEASE_S = 1.0


class JetStreamKeeper:
    """A bucket that this process may write for as long as it leads."""

    lasting = shared = True
    guarded = False  # tokens are not for shared stores: controllers that do not lead could not check them

    def __init__(self, bucket: Bucket, claim: Claim, ledger: Ledger, held: Held) -> None:
        self._bucket = bucket
        self._claim = claim
        self._ledger = ledger
        self._held = held
        self._kept: defaultdict[str, dict[str, bytes]] = defaultdict(dict)  # by the first part of the key
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(ledger.run()), loop.create_task(self._beat())]

    async def load(self, upto: int) -> None:
        """Read all documents; message `upto` is this process's claim."""
        for key, value in (await self._bucket.load(upto)).items():
            self._kept[key.partition("/")[0]][key] = value

    @property
    def place(self) -> str:
        """The address of the bucket, without secrets."""
        return str(self._bucket)

    @property
    def leads(self) -> bool:
        """Whether this process may act now: no other can lead yet, by this host's clock."""
        return self._ledger.problem is None and self._held.holds(now_ns())

    def read(self, prefix: str = "") -> dict[str, bytes]:
        """All documents whose keys begin with `prefix`."""
        kind, slash, _ = prefix.partition("/")
        groups = [self._kept.get(kind, {})] if slash else list(self._kept.values())
        return {key: value for group in groups for key, value in group.items() if key.startswith(prefix)}

    def write(self, changes: Mapping[str, bytes | None]) -> None:
        """Store these documents soon; None deletes one."""
        for key, value in changes.items():
            group = self._kept[key.partition("/")[0]]
            if value is not None:
                group[key] = value
            elif group.pop(key, None) is None:
                continue
            self._ledger.append(key, value)

    async def committed(self) -> None:
        """Return when everything written so far is stored; LeadershipLost if it will not be."""
        await self._ledger.flush()

    async def confirm(self) -> None:
        """Return when a write after this call is stored; LeadershipLost if it will not be."""
        await self._renew()

    async def lost(self) -> None:
        """Return when another process leads."""
        await self._ledger.ended.wait()

    async def release(self) -> None:
        """Let another process lead at once, and close the connection."""
        self._tasks.pop().cancel()
        free = replace(self._claim, free=True)
        with suppress(LeadershipLost, TimeoutError):
            async with asyncio.timeout(_RELEASE_S):
                await self._ledger.stored(self._ledger.append(LEASE, msgspec.json.encode(free)))
        self.close()

    def close(self) -> None:
        """End as the end of the process would."""
        self._ledger.end(LeadershipLost(f"{self._bucket} was closed"))
        for task in self._tasks:
            task.cancel()

    async def _beat(self) -> None:
        """Write the lease again and again."""
        with suppress(LeadershipLost):
            while True:
                await asyncio.sleep(self._held.beat_s)
                await self._renew()

    async def _renew(self) -> None:
        self._claim = replace(self._claim, beat=self._claim.beat + 1)
        write = self._ledger.append(LEASE, msgspec.json.encode(self._claim), first=True)
        await self._ledger.stored(write)
        self._held.written(write.sent_ns)


class JetStreamKeeping:
    """A bucket that several controllers share."""

    shared = True

    def __init__(self, bucket: Bucket, lease_s: float = LEASE_S) -> None:
        self._bucket = bucket
        self._lease_ns = round(lease_s * NS_PER_S)
        self._observed = Observed(self._lease_ns)
        self._keeper: JetStreamKeeper | None = None
        self._reached = False
        self._told = ""  # the last problem in the log

    @property
    def leader(self) -> Leader | None:
        """The process that leads, as far as this one knows."""
        if self._keeper is not None and self._keeper.leads:
            return self._keeper._claim.leader
        return self._observed.leader(now_ns())

    async def lead(self, me: Leader) -> Keeper:
        """Wait until this process leads. InputError if the servers refuse the first connection."""
        self._keeper = None
        self._observed = Observed(self._lease_ns)
        while True:
            try:
                self._keeper = await self._campaign(me)
            except (ClientError, InputError) as problem:
                if isinstance(problem, InputError) and not self._reached:
                    raise
                if str(problem) != self._told:
                    self._told = str(problem)
                    log.warning("STORE(%s): %s; trying again", self._bucket, problem)
            else:
                return self._keeper
            await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        """Nothing is open besides the keeper."""

    async def _campaign(self, me: Leader) -> JetStreamKeeper:
        """Watch the lease over one connection until this process leads."""
        connection = await self._bucket.connect()
        try:
            await self._bucket.create(connection)
            self._reached, self._told = True, ""
            while True:
                await self._look(connection)
                if self._observed.ended(now_ns()) and (keeper := await self._take(connection, me)):
                    return keeper
                await asyncio.sleep(_LOOK_S * random.uniform(0.8, 1.2))
        finally:
            connection.close()

    async def _look(self, connection: NatsConnection) -> int:
        """See the lease; returns its revision."""
        revision, claim = await self._bucket.claim(connection)
        self._observed.see(revision, claim, now_ns())
        return revision

    async def _take(self, connection: NatsConnection, me: Leader) -> JetStreamKeeper | None:
        """Try to lead; None if somebody else wrote meanwhile."""
        last = await self._bucket.last(connection)
        if await self._look(connection) > last or not self._observed.ended(now_ns()):
            return None
        claim = Claim(me, secrets.token_hex(8), self._lease_ns)
        ledger, held = Ledger(self._bucket, claim.holder, last), Held(self._lease_ns)
        write = ledger.append(LEASE, msgspec.json.encode(claim))
        keeper = JetStreamKeeper(self._bucket, claim, ledger, held)
        try:
            await ledger.stored(write)
            held.written(write.sent_ns)
            await keeper.load(last + 1)
        except LeadershipLost:
            keeper.close()
            return None
        except BaseException:
            keeper.close()
            raise
        return keeper
