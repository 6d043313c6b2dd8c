"""The results of a job, a line per topic in order of name, kept as columns: a line is made when it is asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar, overload

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from srtm.pipeline.traces.topics import Faults

Line = TypeVar("Line")


class Lines(Sequence[Line], ABC):
    """Lines of the topics that a job could judge, by number, and of the others."""

    def __init__(self, names: pa.StringArray, faults: Faults) -> None:
        self._known, self._faults = len(names), list(faults.items())
        self._order = pc.sort_indices(pa.concat_arrays([names, pa.array(faults, pa.string())])).to_numpy()

    @abstractmethod
    def _line(self, number: int) -> Line:
        """The line of a topic."""

    @abstractmethod
    def _fault(self, topic: str, messages: int, error: str) -> Line:
        """The line of a topic that cannot be judged."""

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, place: int) -> Line: ...
    @overload
    def __getitem__(self, place: slice) -> list[Line]: ...
    def __getitem__(self, place: int | slice) -> Line | list[Line]:
        if isinstance(place, slice):
            return [self._at(number) for number in self._order[place].tolist()]
        return self._at(int(self._order[place]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def _at(self, number: int) -> Line:
        if number < self._known:
            return self._line(number)
        topic, (messages, error) = self._faults[number - self._known]
        return self._fault(topic, messages, error)
