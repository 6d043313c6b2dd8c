"""Receipts: a publisher is answered when its messages are as safe as their topic promises.

In: messages or receipts that a disk or an engine has, or will never have. Out: one call to each sink that waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from srtm.broker.message import Message

if TYPE_CHECKING:
    from collections.abc import Iterable


class Sink(Protocol):
    """A publisher that waits for answers: a connection, or an HTTP request."""

    def settle(self) -> None:
        """Answer every command whose receipt is complete, in the order of commands."""

    def refused(self, receipt: Receipt, problem: str) -> None:
        """Report that messages of a command will never be accepted."""


class Receipt:
    """One command of a publisher; `left` counts its messages that are not safe yet."""

    __slots__ = ("left", "sink", "verb")

    def __init__(self, sink: Sink, left: int, verb: str = "PUB") -> None:
        self.sink = sink
        self.left = left
        self.verb = verb


class Tracked(Message):
    """A message whose publisher is answered when the engine acknowledges it."""

    __slots__ = ("receipt",)

    def __init__(
        self,
        id: bytes,  # noqa: A002
        arrival_ns: int,
        body: bytes,
        publisher: str,
        delay_ns: int,
        receipt: Receipt,
    ) -> None:
        super().__init__(id, arrival_ns, body, publisher, delay_ns)
        self.receipt: Receipt | None = receipt


def settle(messages: Iterable[Message], problem: str | None = None) -> None:
    """Answer the publishers of messages that an engine has, or, with a problem, never will."""
    sinks: dict[Sink, None] = {}
    for message in messages:
        receipt = getattr(message, "receipt", None)
        if receipt is None:
            continue
        message.receipt = None  # type: ignore[attr-defined]
        receipt.left -= 1
        if problem is not None:
            receipt.sink.refused(receipt, problem)
        elif not receipt.left:
            sinks[receipt.sink] = None
    for sink in sinks:
        sink.settle()


def settle_stored(receipts: Iterable[Receipt], problem: str | None = None) -> None:
    """Answer publishers whose messages a disk has all together, or, with a problem, has not."""
    sinks: dict[Sink, None] = {}
    for receipt in receipts:
        receipt.left = 0
        if problem is not None:
            receipt.sink.refused(receipt, problem)
        else:
            sinks[receipt.sink] = None
    for sink in sinks:
        sink.settle()
