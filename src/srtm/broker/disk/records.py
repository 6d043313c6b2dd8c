"""Messages as records of the log, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.broker.disk.batch import Record
from srtm.broker.message import Message

if TYPE_CHECKING:
    from collections.abc import Mapping


def record_of(message: Message, groups: Mapping[str, str | None]) -> Record:
    """Return a message as it is stored."""
    group = groups.get(message.publisher)
    due_ns = message.arrival_ns + message.delay_ns if message.delay_ns else 0
    return Record(message.id, message.arrival_ns, message.publisher, message.body, group, message.attempts, due_ns)


def message_of(record: Record, now_ns: int, offset: int = -1) -> Message:
    """Return the message of a record; a deferred one keeps what is left of its delay."""
    message = Message(record.id, record.arrival_ns, record.body, record.publisher, max(0, record.due_ns - now_ns))
    message.attempts = record.attempts
    message.offset = offset
    return message
