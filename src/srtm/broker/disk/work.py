"""Work for the thread that commits, and how the log is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from srtm.broker.disk.batch import Record

Done = Callable[[Any], None]  # called with the result, or with the error
Answer = Callable[[list[tuple[Done, Any]]], None]  # calls each with its result, on the right thread


@dataclass(frozen=True, slots=True)
class LogOptions:
    """How the log is kept."""

    batch_bytes: int = 256 << 10  # bodies in one row: bounds what a read of one message must fetch
    group_messages: int = 10_000  # bound one commit, and so what the next append waits for
    group_bytes: int = 8 << 20
    save_s: float = 0.1  # progress of channels is written with a commit of messages, or this much later
    checkpoint_bytes: int = 1 << 20  # of write-ahead log: checkpoint when nothing is waiting
    checkpoint_bytes_busy: int = 4 << 20  # checkpoint though something is
    reserve_bytes: int = 16 << 20  # set aside for a checkpoint on a full disk: the write-ahead log and a group
    retry_s: float = 1.0  # after a failure, for what nobody waits for


@dataclass(slots=True)
class Append:
    """Messages for one topic; answered with the first offset."""

    topic: str
    records: Sequence[Record]
    bytes: int
    done: Done


@dataclass(slots=True)
class Call:
    """Anything else, on the writer's thread; answered with its result."""

    run: Callable[[], Any]
    done: Done
    answer: Answer


@dataclass(slots=True)
class Progress:
    """Rows of channels by (topic, channel), None to delete one. Committed before any later append; not answered."""

    rows: dict[tuple[str, str], tuple[int, bytes] | None]
    urgent: bool = False


Work = Append | Call | Progress | None
