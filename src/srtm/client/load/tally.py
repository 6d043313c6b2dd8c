"""What came back: answers, refusals and deliveries of one run, with the latency of each message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from srtm.client.load.ear import frame_of
from srtm.client.load.report import Progress
from srtm.model.latency import Distribution
from srtm.units import percentile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from srtm.client.load.options import LoadOptions
    from srtm.client.load.schedule import Schedule
    from srtm.errors import SRTMError

    Ints = NDArray[np.int64]


class Tally:
    """Counts for one schedule."""

    def __init__(self, options: LoadOptions, schedule: Schedule) -> None:
        self.run = schedule.run
        self.frame: np.dtype[Any] = frame_of(options.size)
        self.deliveries = self.foreign = 0
        self.answers = self.refusals = 0  # of commands
        self.refusal: SRTMError | None = None  # the first
        self._schedule = schedule
        self._latency_ns: Ints = np.full(schedule.messages, -1, np.int64)
        self._acknowledged = bytearray(len(schedule))
        self._recent_ns: Ints = np.empty(max(10_000, round(2 * options.workload.total_mps)), np.int64)
        self._recents = 0  # latencies of this second, as far as there is room for them

    def acknowledge(self, number: int) -> None:
        """A command was answered."""
        self._acknowledged[number] = 1
        self.answers += 1

    def refuse(self, number: int, problem: SRTMError) -> None:
        """A command was refused."""
        del number
        self.refusals += 1
        self.refusal = self.refusal or problem

    def heard(self, numbers: Ints, stamp_ns: int) -> None:
        """Messages of this run arrived at this time."""
        latency_ns = np.maximum(stamp_ns - self._schedule.due_ns[numbers // self._schedule.batch], 0)
        self.deliveries += len(numbers)
        fresh = self._latency_ns[numbers] < 0
        if not fresh.all():
            numbers, latency_ns = numbers[fresh], latency_ns[fresh]
        self._latency_ns[numbers] = latency_ns
        room = self._recent_ns[self._recents : self._recents + len(latency_ns)]
        room[:] = latency_ns[: len(room)]
        self._recents += len(room)

    @property
    def outstanding(self) -> bool:
        """Whether a command lacks its answer, or a message neither came back nor was refused."""
        if self._schedule.next > self.answers + self.refusals:
            return True
        sent_ns = self._latency_ns[: self._schedule.sent]
        return bool(np.count_nonzero(sent_ns < 0) > self.refusals * self._schedule.batch)

    @property
    def received(self) -> int:
        """Messages that came back, each counted once."""
        return int(np.count_nonzero(self._latency_ns >= 0))

    @property
    def lost(self) -> int:
        """Messages that were acknowledged and never came back."""
        acknowledged = np.repeat(np.frombuffer(self._acknowledged, np.uint8), self._schedule.batch) > 0
        return int(np.count_nonzero(acknowledged & (self._latency_ns < 0)))

    @property
    def latency(self) -> Distribution | None:
        """From the scheduled time to arrival."""
        came = self._latency_ns[self._latency_ns >= 0]
        return Distribution.of(came) if len(came) else None

    def took_ns(self) -> tuple[Ints, Ints]:
        """The messages that came back, by number, and how long each took from the write of its command."""
        came = np.flatnonzero(self._latency_ns >= 0)
        return came, np.maximum(self._latency_ns[came] - self._schedule.late_ns[came // self._schedule.batch], 0)

    def progress(self, second: int, sent: int, received: int) -> Progress:
        """Sum up a second in which so many messages were sent and received, and begin the next."""
        schedule = self._schedule
        recent, self._recents = self._recent_ns[: self._recents], 0
        late = schedule.late_ns[schedule.next - sent // schedule.batch : schedule.next]
        return Progress(
            second,
            sent,
            received,
            (schedule.next - self.answers - self.refusals) * schedule.batch,
            percentile(recent, "0.99") if len(recent) else None,
            percentile(late, "0.99") if len(late) else None,
        )
