"""Many messages as one value: what a row of the log holds.

```
u32 messages | u32 bytes of names | names: JSON [[publisher, group or null], …], each pair once
i64 arrival_ns × n | u32 index into names × n | u32 bytes of body × n | u16 attempts × n | 16-byte id × n | bodies
```

Where messages are deferred, names are `{"names": […], "due_ns": {"index of a message": time, …}}`.
Little-endian. Columns rather than rows, because Python packs a column in one call.
`decode(encode(records)) == records`.
"""

from __future__ import annotations

import json
import struct
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from srtm.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ID_BYTES = 16
_HEAD = struct.Struct("<II")


class Record(NamedTuple):
    """A message as it is stored."""

    id: bytes
    arrival_ns: int
    publisher: str
    body: bytes
    group: str | None = None
    attempts: int = 0
    due_ns: int = 0  # not to be delivered before


def encode(records: Sequence[Record]) -> bytes:
    """The messages as one value."""
    ids, arrivals, publishers, bodies, groups, attempts, due = zip(*records, strict=True)
    numbers: dict[tuple[str, str | None], int] = {}
    senders = [numbers.setdefault(pair, len(numbers)) for pair in zip(publishers, groups, strict=True)]
    head: Any = list(numbers)
    if any(due):
        head = {"names": head, "due_ns": {index: due_ns for index, due_ns in enumerate(due) if due_ns}}
    names = json.dumps(head).encode()
    count = len(records)
    try:
        columns = struct.pack(f"<{count}q{count}I{count}I{count}H", *arrivals, *senders, *map(len, bodies), *attempts)
    except struct.error as error:
        raise InputError(f"a message does not fit the log: {error}", messages=count) from None
    return b"".join([_HEAD.pack(count, len(names)), names, columns, *ids, *bodies])


def decode(value: bytes, begin: int = 0, end: int | None = None) -> list[Record]:
    """The messages of a value, or those at [begin, end) of it."""
    count, names_bytes = _HEAD.unpack_from(value)
    at = _HEAD.size + names_bytes
    names = json.loads(value[_HEAD.size : at])
    due: dict[str, int] = {}
    if isinstance(names, dict):
        names, due = names["names"], names["due_ns"]
    arrivals = struct.unpack_from(f"<{count}q", value, at)
    senders = struct.unpack_from(f"<{count}I", value, at + 8 * count)
    lengths = struct.unpack_from(f"<{count}I", value, at + 12 * count)
    attempts = struct.unpack_from(f"<{count}H", value, at + 16 * count)
    ids = at + 18 * count
    places = list(accumulate(lengths, initial=ids + ID_BYTES * count))
    records = []
    for index in range(begin, count if end is None else min(end, count)):
        publisher, group = names[senders[index]]
        own = ids + ID_BYTES * index
        body = value[places[index] : places[index + 1]]
        due_ns = due.get(str(index), 0) if due else 0
        identity = value[own : own + ID_BYTES]
        records.append(Record(identity, arrivals[index], publisher, body, group, attempts[index], due_ns))
    return records


class Piece(NamedTuple):
    """Messages of a value in columns, as they are stored: little-endian numbers, and bodies one after the other.

    `senders` are indices into `publishers`.
    """

    messages: int
    arrivals: bytes
    senders: bytes
    lengths: bytes
    bodies: bytes
    publishers: list[str]


def piece(value: bytes, begin: int, end: int, max_bytes: int, at_least: int = 0) -> Piece:
    """The messages at [begin, end) of a value, as columns: at most `max_bytes` of bodies, but `at_least` messages."""
    count, names_bytes = _HEAD.unpack_from(value)
    at = _HEAD.size + names_bytes
    names = json.loads(value[_HEAD.size : at])
    if isinstance(names, dict):
        names = names["names"]
    end, first, last = min(end, count), at + (18 + ID_BYTES) * count, len(value)
    if begin or end < count or last - first > max_bytes:
        lengths = struct.unpack_from(f"<{count}I", value, at + 12 * count)
        places = list(accumulate(lengths, initial=first))
        first = places[begin]
        end = max(begin + at_least, min(end, bisect_right(places, first + max_bytes) - 1))
        last = places[end]
    senders, sizes = at + 8 * count, at + 12 * count
    return Piece(
        end - begin,
        value[at + 8 * begin : at + 8 * end],
        value[senders + 4 * begin : senders + 4 * end],
        value[sizes + 4 * begin : sizes + 4 * end],
        value[first:last],
        [publisher for publisher, _ in names],
    )


def check(records: Sequence[Record]) -> int:
    """Refuse what cannot be encoded, before it meets the messages of others; the bytes of all bodies."""
    size = 0
    for record in records:
        size += len(record.body)
        if len(record.id) != ID_BYTES:
            raise InputError(f"a message's id has {ID_BYTES} bytes, not {len(record.id)}", id=record.id)
    return size


def cut(records: Sequence[Record], max_bytes: int) -> Iterator[Sequence[Record]]:
    """Consecutive pieces with bodies of at most `max_bytes` together; a larger body is a piece of its own."""
    begin = held = 0
    for index, record in enumerate(records):
        held += len(record.body)
        if held > max_bytes and index > begin:
            yield records[begin:index]
            begin, held = index, len(record.body)
    yield records[begin:] if begin else records
