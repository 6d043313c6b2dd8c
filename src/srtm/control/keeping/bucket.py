"""A bucket of JetStream's key-value store, as NATS' own tools see it: a stream with one message for each key.

In: keys and values. Out: the last value of each key; the leader's claim. The bucket is a stream `KV_name` with subjects
`$KV.name.key`, so `nats kv ls name` lists what a controller has. A key that was deleted has an empty message with
`KV-Operation: DEL`, which goes after an hour.
"""

from __future__ import annotations

import asyncio
import base64
import random
from typing import TYPE_CHECKING, Any

import msgspec

from srtm.client.nats import NatsConnection, Refused
from srtm.control.keeping.lease import Claim
from srtm.errors import ClientError, InputError
from srtm.protocol import nats
from srtm.protocol.nats import Delivered, Msg
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from srtm.protocol.engine import EngineAddress

LEASE = "leader"  # the key of the claim
MAX_VALUE = 900_000  # bytes; a NATS server refuses messages of 1 MiB
_NOT_FOUND, _NO_MESSAGE = 404, 10037
_ALONE = 10074  # the server is not part of a cluster, so it cannot have replicas
_REPLICAS = 3
_BATCH = 1_000
_SILENCE_S = 3.0
_PATIENCE_S = 1.0  # with a server; others may do better
_IDLE_S = 30
_WRONG_LAST = (10071, 10164)  # JetStream's numbers for a condition that does not hold
_FEW_ALONE = 20
_MARK = b"Srtm-Write"
_DELETED = b"KV-Operation: DEL\r\nNats-TTL: 1h\r\n"


class _Mail:
    """Messages that are not answers to questions."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Msg] = asyncio.Queue()

    def came(self, message: Msg) -> None:
        """A message arrived."""
        self.messages.put_nowait(message)

    def ended(self, problem: ClientError) -> None:
        """The connection ended: whoever waits gives up in time."""


class Bucket:
    """One bucket."""

    def __init__(self, address: EngineAddress, name: str, replicas: int | None = None) -> None:
        """Without `replicas`, a new bucket has three in a cluster, and one at a server that is alone."""
        self.address = address
        self.name = name
        self._stream = f"KV_{name}"
        self._prefix = f"$KV.{name}."
        self._replicas = replicas
        self._atomic = self._alone = False

    def __str__(self) -> str:
        """Return its address without secrets."""
        return f"{self.address}/{self.name}"

    async def connect(self) -> NatsConnection:
        """A connection to any of the servers; ClientError if none answers, InputError if one refuses us."""
        return await NatsConnection.open(self.address, _Mail(), _PATIENCE_S)

    async def _ask(self, connection: NatsConnection, subject: str, **wanted: Any) -> dict[str, Any]:
        """JetStream's answer, or ClientError soon: another server may answer."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await connection.ask(subject, **wanted)
        except TimeoutError:
            raise ClientError(f"{connection.place} did not answer within {_PATIENCE_S:g} s ({subject})") from None

    async def create(self, connection: NatsConnection) -> None:
        """Create the bucket unless it exists."""
        try:
            self._learn(await self._ask(connection, f"$JS.API.STREAM.INFO.{self._stream}"))
        except Refused as problem:
            if problem.code != _NOT_FOUND:
                raise InputError(f"{self} refuses the bucket: {problem}") from None
        else:
            return
        try:
            await self._create(connection, self._replicas or _REPLICAS)
        except ClientError as problem:
            if problem.facts.get("reason") != _ALONE:
                raise
            if self._replicas is not None:
                raise InputError(f"{self} is not a cluster, so it cannot keep {self._replicas} replicas") from None
            await self._create(connection, 1)
        except Refused as problem:
            raise InputError(f"{self} refuses to create the bucket: {problem}") from None

    def _learn(self, found: dict[str, Any]) -> None:
        """Take note of what the bucket can do."""
        config = found["config"]
        self._atomic, self._alone = bool(config.get("allow_atomic")), config["num_replicas"] == 1

    async def _create(self, connection: NatsConnection, replicas: int) -> None:
        found = await connection.ask(
            f"$JS.API.STREAM.CREATE.{self._stream}",
            name=self._stream,
            description="state of SRTM's controllers",
            subjects=[f"{self._prefix}>"],
            storage="file",
            retention="limits",
            discard="new",
            num_replicas=replicas,
            max_msgs_per_subject=1,
            duplicate_window=120 * NS_PER_S,
            deny_delete=True,
            allow_rollup_hdrs=True,
            allow_direct=True,
            allow_msg_ttl=True,
            allow_atomic=True,
        )
        self._learn(found)

    async def last(self, connection: NatsConnection) -> int:
        """The number of the last message of the bucket."""
        found = await self._ask(connection, f"$JS.API.STREAM.INFO.{self._stream}")
        return int(found["state"]["last_seq"])

    async def claim(self, connection: NatsConnection) -> tuple[int, Claim | None]:
        """The leader's claim and its revision, from the server that leads the stream; 0 and None if there is none."""
        try:
            found = await self._ask(
                connection, f"$JS.API.STREAM.MSG.GET.{self._stream}", last_by_subj=f"{self._prefix}{LEASE}"
            )
        except Refused as problem:
            if problem.reason == _NO_MESSAGE:
                return 0, None
            raise ClientError(f"{self} has no bucket {self.name!r}: {problem}") from None
        message = found["message"]
        try:
            claim = msgspec.json.decode(base64.b64decode(message.get("data", "")), type=Claim)
        except (msgspec.MsgspecError, ValueError):  # somebody else wrote it
            claim = None
        return int(message["seq"]), claim

    def batches(self, writes: int) -> bool:
        """Whether so many writes should go as a batch; at a server that is alone, a batch costs as much as twenty."""
        return self._atomic and writes >= (_FEW_ALONE if self._alone else 2)

    def publish(
        self,
        connection: NatsConnection,
        changes: Sequence[tuple[str, bytes | None]],
        mark: str,
        attempt: int,
        last: int,
    ) -> asyncio.Future[Msg]:
        """Store values, or delete keys, all or none, if the last message of the bucket has this number.

        `mark` tells the messages of these changes from all others.
        """
        named, batch = f"{_MARK.decode()}: {mark}\r\n".encode(), f"{mark}-{attempt}".encode()
        for number, (key, value) in enumerate(changes, 1):
            lines = (nats.expecting(last) if number == 1 else b"") + named + (_DELETED if value is None else b"")
            if len(changes) > 1:
                lines += nats.batched(batch, number, commit=number == len(changes))
            subject = f"{self._prefix}{key}".encode()
            if number < len(changes):
                connection.say(nats.tell_with(subject, b"", value or b"", lines))
            else:
                return connection.publish(subject, value or b"", lines)
        raise AssertionError("no changes")

    def wrong_last(self, problem: Refused) -> bool:
        """Whether a condition on the last message did not hold."""
        return problem.reason in _WRONG_LAST

    async def mark(self, connection: NatsConnection, sequence: int) -> str | None:
        """The mark of a message; None if it is gone."""
        try:
            found = await self._ask(connection, f"$JS.API.STREAM.MSG.GET.{self._stream}", seq=sequence)
        except Refused:
            return None
        head = base64.b64decode(found["message"].get("hdrs", ""))
        return Msg(b"", 0, b"", head).value(_MARK).decode()

    async def load(self, upto: int | None = None) -> dict[str, bytes]:
        """The last value of each key; message `upto`, of this process, must be the last one of the bucket.

        A replica may be behind, but it has messages in order: whoever has read up to ours has read all before it.
        Without `upto`, the values are as some replica has them.
        """
        connection = await self.connect()
        try:
            config: dict[str, Any] = {
                "deliver_policy": "last_per_subject",
                "filter_subject": f"{self._prefix}>",
                "ack_policy": "none",
                "replay_policy": "instant",
                "inactive_threshold": _IDLE_S * NS_PER_S,
                "num_replicas": 1,
                "mem_storage": True,
            }
            made = await connection.ask(
                f"$JS.API.CONSUMER.CREATE.{self._stream}", stream_name=self._stream, config=config
            )
            if upto is None and not made.get("num_pending"):
                return {}
            pulls = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{made['name']}".encode()
            return await self._pulled(connection, pulls, upto)
        except Refused as problem:
            raise ClientError(f"{self} does not list its keys: {problem}", code=problem.code) from None
        finally:
            connection.close()

    async def _pulled(self, connection: NatsConnection, pulls: bytes, upto: int | None) -> dict[str, bytes]:
        mail: _Mail = connection.listener  # type: ignore[assignment]
        reply = f"{connection.inbox}.{random.randrange(10**9)}l".encode()
        wanted = msgspec.json.encode({"batch": _BATCH, "expires": round(_SILENCE_S / 2 * NS_PER_S)})
        found: dict[str, bytes] = {}
        due, prefix = 0, self._prefix.encode()
        while True:
            if due == 0:
                connection.say(nats.publish(pulls, reply, wanted))
                due = _BATCH
            try:
                async with asyncio.timeout(_SILENCE_S):
                    message = await mail.messages.get()
            except TimeoutError:
                raise ClientError(f"{self} stopped sending its keys") from None
            if not message.reply.startswith(nats.ACK_PREFIX):
                due = 0  # the pull is over
                continue
            due -= 1
            name = message.subject.removeprefix(prefix).decode()
            if message.value(b"KV-Operation"):
                found.pop(name, None)
            elif name != LEASE:
                found[name] = message.body
            delivered = Delivered.by(message.reply)
            if delivered.sequence >= upto if upto is not None else not delivered.pending:
                return found
