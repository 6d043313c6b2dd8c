"""Commands of one publisher, in order, until each is answered or refused.

In: commands as bytes, each with a token that its owner chooses. Out: bytes to write, and for each token, in order,
whether its command was answered or refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from srtm.errors import ClientError, SRTMError

Command = tuple[bytes, Any]


class Commands:
    """Commands still to be written, and written ones that await an answer; its length counts both."""

    __slots__ = ("_answered", "_refused", "unanswered", "unsent")

    def __init__(self, answered: Callable[[Any], None], refused: Callable[[Any, SRTMError], None]) -> None:
        self.unsent: deque[Command] = deque()
        self.unanswered: deque[Command] = deque()
        self._answered = answered
        self._refused = refused

    def __len__(self) -> int:
        return len(self.unsent) + len(self.unanswered)

    def next(self) -> bytes:
        """Return the oldest unsent command, which awaits its answer from now on."""
        command = self.unsent.popleft()
        self.unanswered.append(command)
        return command[0]

    def answer(self) -> None:
        """The oldest unanswered command succeeded."""
        self._answered(self.unanswered.popleft()[1])

    def refuse(self, problem: SRTMError) -> None:
        """The oldest unanswered command failed."""
        self._refused(self.unanswered.popleft()[1], problem)

    def put_back(self) -> None:
        """Have unanswered commands written again, before the others."""
        self.unsent.extendleft(reversed(self.unanswered))
        self.unanswered.clear()

    def give_up(self, why: str) -> None:
        """All commands failed."""
        for _, token in [*self.unanswered, *self.unsent]:
            self._refused(token, ClientError(why))
        self.unanswered.clear()
        self.unsent.clear()
