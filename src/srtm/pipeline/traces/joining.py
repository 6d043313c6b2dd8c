"""How the driver joins what tasks found in stretches (`traces.scanning`), for all topics at once.

The stretches of a topic in order of time give the state that each of them really starts from. A state that is not empty
changes the histogram, but only until the queue has been empty once both with it and without it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from srtm.model import burst, fleet, scan
from srtm.pipeline.traces.parts import rows_of, unpacked

if TYPE_CHECKING:
    from srtm.pipeline.traces.batches import Ints

_SUMMARY = ("messages", "first_ns", "last_ns", "backlog")


class Stretches(NamedTuple):
    """Stretches of topics, in order of topic and time; `summaries` has rows (messages, first, last, backlog)."""

    topics: Ints
    summaries: Ints
    peaks: Ints
    envelopes: Ints
    kept_from: Ints  # where the first arrivals of each begin in `beginnings`, and how many there are
    kept: Ints
    beginnings: Ints

    @classmethod
    def of(cls, parts: dict[str, pa.Table]) -> Stretches:
        """The stretches of all tasks."""
        table = parts["topics"]
        topics, first_ns, kept = (table[name].to_numpy() for name in ("topic", "first_ns", "kept"))
        # Of one stretch, topics are in order: nothing need be copied.
        order: Ints | slice = slice(None) if (np.diff(topics) > 0).all() else np.lexsort((first_ns, topics))
        return cls(
            topics[order],
            np.column_stack([table[name].to_numpy() for name in _SUMMARY])[order],
            table["peak"].to_numpy()[order],
            rows_of(table["envelope"], len(burst.WINDOWS_NS))[order],
            (np.cumsum(kept) - kept)[order],
            kept[order],
            parts["beginning"]["arrival_ns"].to_numpy(),
        )


class Corrections(NamedTuple):
    """What the states before stretches change: rows (topic, tokens, messages), and what the beginnings do not tell.

    Rows of `still_open` are (topic, first time of the stretch, backlog, last time before it), in order.
    """

    changes: Ints
    still_open: Ints
    overflows: Ints


def corrections(stretches: Stretches, laws: Ints) -> Corrections:
    """What the states before stretches change in their histograms, as far as their beginnings tell."""
    topics, summaries = stretches.topics, stretches.summaries
    states = fleet.entering(topics, summaries, laws)
    waited = np.minimum(summaries[:, 1] - np.where(states[:, 1] == fleet.NEVER, 0, states[:, 1]), laws[topics, 2])
    reached = (states[:, 1] != fleet.NEVER) & (states[:, 0] > laws[topics, 0] * waited)
    overflows = topics[reached & (states[:, 0] > scan.HIGHEST)]
    rows = np.flatnonzero(reached & (states[:, 0] <= scan.HIGHEST))
    begins, kept = stretches.kept_from[rows], stretches.kept[rows]
    after, alone = fleet.no_states(len(rows)), fleet.no_states(len(rows))
    after[:, :2] = states[rows]
    segments = np.column_stack([np.arange(len(rows)), begins, begins + kept])
    more = fleet.histograms(stretches.beginnings, segments, laws[topics[rows]], after)
    less = fleet.histograms(stretches.beginnings, segments, laws[topics[rows]], alone)
    too_short = (after[:, :2] != alone[:, :2]).any(axis=1) & (kept < summaries[rows, 0])
    overflows = np.concatenate([overflows, topics[rows[after[:, fleet.PEAK] > scan.HIGHEST]]])
    changes = np.concatenate([more, less * np.array([1, 1, -1])])
    changes = changes[~too_short[changes[:, 0]]]
    changes[:, 0] = topics[rows[changes[:, 0]]]
    left = rows[too_short]
    still_open = np.column_stack([topics[left], summaries[left, 1], states[left]])
    return Corrections(changes, still_open, overflows)


def publishers_of(received: pa.Table, topics: int) -> Ints:
    """How many publishers each topic has over all its stretches.

    Tasks number publishers by themselves, and send the names of their numbers before the pairs.
    """
    known, meaning = pa.array([], pa.string()), np.empty(0, np.int32)
    numbers, senders = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
    for name, table in unpacked(received):
        if name == "names":
            names = table["name"].combine_chunks()
            new = names.filter(pc.is_null(pc.index_in(names, value_set=known)))
            known = pa.concat_arrays([known, new])
            meaning = pc.index_in(names, value_set=known).to_numpy()
        elif name == "publishers":
            numbers.append(table["topic"].to_numpy())
            senders.append(meaning[table["sender"].to_numpy()])
    found, _ = fleet.distinct_pairs(np.concatenate(numbers), np.concatenate(senders), topics)
    return np.bincount(found, minlength=topics)


def renumbered(received: pa.Table, column: str) -> tuple[pa.StringArray, dict[str, pa.Table]]:
    """Names that tasks numbered by themselves, in order, and `parts.joined` with their numbers in a column; −1 stays.

    Tasks send the names of their numbers before the tables that use them.
    """
    known, meaning = pa.array([], pa.string()), np.array([-1])
    tables: dict[str, list[pa.Table]] = defaultdict(list)
    for part, table in unpacked(received):
        if part == "names":
            names = table["name"].combine_chunks()
            known = pa.concat_arrays([known, names.filter(pc.is_null(pc.index_in(names, value_set=known)))])
            meaning = np.append(pc.index_in(names, value_set=known).to_numpy(), -1)
        else:
            tables[part].append(_translated(table, column, meaning))
    order = pc.sort_indices(known).to_numpy()
    places = np.full(len(known) + 1, -1)
    places[order] = np.arange(len(known))
    found = {part: _translated(pa.concat_tables(some), column, places) for part, some in tables.items()}
    return known.take(pa.array(order)), found


def _translated(table: pa.Table, column: str, meaning: Ints) -> pa.Table:
    if column not in table.schema.names:
        return table
    numbers = pa.array(meaning[table[column].to_numpy()].astype(np.int64))
    return table.set_column(table.schema.get_field_index(column), column, numbers)


def tallies(*tables: pa.Table | Ints) -> Ints:
    """Rows (topic, value, count) in order, with the counts of equal topics and values added up."""
    rows: Ints = np.concatenate(
        [
            table
            if isinstance(table, np.ndarray)
            else np.column_stack([table[name].to_numpy() for name in ("topic", "value", "count")])
            for table in tables
        ]
    )
    further, higher = np.diff(rows[:, 0]), np.diff(rows[:, 1])
    if ((further > 0) | ((further == 0) & (higher > 0))).all():  # of one batch, for example
        return rows if rows[:, 2].all() else rows[rows[:, 2] != 0]
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    begins = np.flatnonzero(np.concatenate([[True], (rows[1:, :2] != rows[:-1, :2]).any(axis=1)]))
    added = np.add.reduceat(rows[:, 2], begins)
    summed: Ints = np.column_stack([rows[begins, :2], added])[added != 0]
    return summed


def values_at(counted: Ints, ranks: Ints) -> Ints:
    """The value of rank `ranks[t]`, from 1, of each topic t; 0 for topics without a value."""
    below = np.cumsum(counted[:, 2])
    begins = np.searchsorted(counted[:, 0], np.arange(len(ranks)))
    before = np.concatenate([[0], below])[begins]
    places = np.searchsorted(below, before + ranks)
    ends = np.searchsorted(counted[:, 0], np.arange(len(ranks)), side="right")
    found = np.zeros(len(ranks), np.int64)
    some = begins < ends
    found[some] = counted[places[some], 1]
    return found


def widest(topics: Ints, envelopes: Ints, count: int) -> Ints:
    """The fullest windows of each topic over all its rows, which come in any order."""
    most = np.zeros((count, envelopes.shape[1]), np.int64)
    if (np.diff(topics) > 0).all():
        most[topics] = envelopes
    else:
        order = np.argsort(topics, kind="stable")
        begins = np.flatnonzero(np.concatenate([[True], np.diff(topics[order]) != 0]))
        most[topics[order[begins]]] = np.maximum.reduceat(envelopes[order], begins)
    return most
