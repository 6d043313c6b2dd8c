"""Onsets of bursts, from messages: what `model.correlation` looks for groups in.

An *onset* is a message of a publisher that comes after a silence of its own. Stretches of a trace are scanned as if
nothing came before them (`Scanner`), for one topic or many, and joined afterwards (`StretchOnsets`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from srtm.errors import ArrivalsError
from srtm.model import coincidence as plain
from srtm.model._compiled import compiled

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import ArrayLike, NDArray

    Ints = NDArray[np.int64]
    Indices = NDArray[np.int32]

_mark_onsets = compiled(plain.mark_onsets)
_note_groups = compiled(plain.note_groups)

NEVER = -(2**63)


class Onsets(NamedTuple):
    """Onsets of every publisher of a topic, publishers in order of name; p's are `times[starts[p]:starts[p + 1]]`."""

    names: tuple[str, ...]
    times: Ints
    starts: Ints

    @classmethod
    def of(cls, by_name: Mapping[str, ArrayLike]) -> Onsets:
        """Onsets from sorted times by publisher."""
        names = tuple(sorted(by_name))
        times = [np.asarray(by_name[name], np.int64) for name in names]
        starts = np.concatenate([[0], np.cumsum([len(each) for each in times])]).astype(np.int64)
        return cls(names, np.concatenate([np.empty(0, np.int64), *times]), starts)

    def only(self, chosen: Ints) -> Onsets:
        """The onsets of some publishers, by number in increasing order."""
        counts = np.diff(self.starts)[chosen]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        rows = np.arange(starts[-1]) + np.repeat(self.starts[chosen] - starts[:-1], counts)
        return Onsets(tuple(self.names[p] for p in chosen.tolist()), self.times[rows], starts)


class Scanner:
    """Finds the onsets in a stretch, fed in order of time; the caller numbers senders from 0.

    A sender is a publisher of a topic: several topics may be scanned at once. `last_ns` is the time of each sender's
    last message. `note` keeps the group it named then.
    """

    def __init__(self, silence_ns: int) -> None:
        self._silence_ns = silence_ns
        self.last_ns: Ints = np.empty(0, np.int64)
        self.group_of: Indices = np.empty(0, np.int32)
        self._named_ns: Ints = np.empty(0, np.int64)
        self._found: list[tuple[Ints, Indices]] = []

    def feed(self, times: Ints, senders: Indices, count: int) -> None:
        """Take messages, those of a sender in order of time; `count` is the number of senders so far."""
        if not len(times):
            return
        if count > len(self.last_ns):
            self.last_ns = _longer(self.last_ns, count, NEVER)
            self.group_of, self._named_ns = _longer(self.group_of, count, 0), _longer(self._named_ns, count, NEVER)
        out = np.empty(len(times), np.int64)
        found, is_sorted = _mark_onsets(times, senders, self._silence_ns, self.last_ns, out)
        if not is_sorted:
            raise ArrivalsError("arrivals are not sorted by time")
        self._found.append((times[out[:found]], senders[out[:found]]))

    def note(self, times: Ints, senders: Indices, groups: Indices, ranks: Indices) -> None:
        """Take the groups that messages name, by number (0: none); `ranks` orders the numbers by name."""
        _note_groups(times, senders, groups, ranks, self.group_of, self._named_ns)

    def onsets(self) -> Iterator[Ints]:
        """The onsets of each sender, the first of which is its first message of the stretch."""
        times, ends = self.in_order()
        yield from np.split(times, ends[:-1]) if len(ends) else ()

    def in_order(self) -> tuple[Ints, Ints]:
        """The onsets by sender and time, and where those of each sender end."""
        senders = np.concatenate([np.empty(0, np.int32), *(found for _, found in self._found)])
        order = np.argsort(senders, kind="stable")
        times = np.concatenate([np.empty(0, np.int64), *(found for found, _ in self._found)])[order]
        return times, np.cumsum(np.bincount(senders, minlength=len(self.last_ns)))


def _longer(array: NDArray[Any], length: int, fill: int) -> NDArray[Any]:
    return np.concatenate([array, np.full(length - len(array), fill, array.dtype)])


class StretchOnsets(NamedTuple):
    """Onsets found in stretches as if nothing came before them: a row for each sender in each stretch.

    Row i has the times before `ends[i]` that row i − 1 has not; `last_ns` is the sender's last message there.
    """

    senders: Ints
    last_ns: Ints
    ends: Ints
    times: Ints

    def joined(self, senders: int, silence_ns: int) -> tuple[Ints, Ints]:
        """The onsets by sender and time, and where those of each sender end; stretches do not overlap."""
        counts = np.diff(self.ends, prepend=0)
        some = np.flatnonzero(counts)
        firsts = self.times[self.ends[some] - counts[some]]
        order = some[np.lexsort((firsts, self.senders[some]))]
        counts, owner = counts[order], self.senders[order]
        begins = self.ends[order] - counts
        # A message that starts a stretch starts a burst only after a silence of its sender.
        goes_on = np.zeros(len(order), np.bool_)
        goes_on[1:] = owner[1:] == owner[:-1]
        goes_on[1:] &= self.times[begins[1:]] - silence_ns <= self.last_ns[order[:-1]]
        begins, counts = begins + goes_on, counts - goes_on
        rows = np.arange(counts.sum()) + np.repeat(begins - np.cumsum(counts) + counts, counts)
        ends = np.cumsum(np.bincount(owner, counts, senders).astype(np.int64))
        return self.times[rows], ends


def onsets_of(arrivals: Ints, publisher_of: Indices, names: Iterable[str], silence_ns: int) -> Onsets:
    """The onsets of a topic's sorted arrivals."""
    listed = tuple(names)
    scanner = Scanner(silence_ns)
    scanner.feed(arrivals, publisher_of, len(listed))
    return Onsets.of({name: found for name, found in zip(listed, scanner.onsets(), strict=True) if len(found)})
