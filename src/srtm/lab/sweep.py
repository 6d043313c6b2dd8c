"""The sweep: result × point × repetition, one Spark task per cell; finished cells are kept and not run again.

A simulated cell's rows depend on its result (and that result's version), its world, its point and its seed, and on
nothing else: not on the number of executors, nor on earlier cells. Live cells run one after another in this process;
those on paced brokers, which leave the processors to each other, run several at a time, in processes of their own.
Rows are kept in `FOLDER/RESULT/DIGEST.parquet` and written under another name first, so that a sweep that is killed can
continue later.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from srtm.errors import InputError
from srtm.lab.result import Rows
from srtm.lab.results import known
from srtm.lab.world import Simulated
from srtm.workload.publishers import Population

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from srtm.lab.live.paced import Paced
    from srtm.lab.live.world import Live
    from srtm.lab.result import Point, Result, Row
    from srtm.lab.world import World
    from srtm.pipeline.session import SparkSession

log = logging.getLogger(__name__)

_MOST_MPS = 1_000  # of paced cells together: brokers and load must be idle most of the time
_BATCHED = 3  # times less in batches of 10
_APART_S = 4.0  # between two starts: starting a cluster takes processor time
_MOST_REPETITIONS = 500  # seeds of one run must not meet those of the next, nor of a topic's history
_SEEDS_APART = 1_000
_SETTINGS = "lab.json"
_FULL, _TINY = Simulated(), Simulated(most_messages=600_000)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run of the lab; in the simulated world, the same settings give the same rows."""

    seed: int = 1
    repetitions: int = 10
    tiny: bool = False
    live: Live | None = None
    paced: Paced | None = None  # of live results on paced brokers
    thorough: bool = False  # also run the points that take long

    def __post_init__(self) -> None:
        """List everything that is wrong at once."""
        wrong = []
        if not 0 <= self.seed < 2**31:
            wrong.append(f"seed must be between 0 and 2**31, not {self.seed}")
        if not 1 <= self.repetitions <= _MOST_REPETITIONS:
            wrong.append(f"repetitions must be between 1 and {_MOST_REPETITIONS}, not {self.repetitions}")
        if wrong:
            raise InputError("; ".join(wrong))


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of one result, with one seed, in one world."""

    result: str
    point: Point
    repetition: int
    seed: int
    world: World | Live | Paced

    @property
    def digest(self) -> str:
        """The key of the kept rows."""
        told = [self.result, known(self.result).version, self.world.name, self.point, self.seed]
        return sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:24]

    @property
    def weight(self) -> float:
        """Rough duration, relative to other cells; of live ones, searches for large groups take longest."""
        result, publishers = known(self.result), float(self.point.get("publishers", 1_000))
        if result.paced:
            return float(self.point.get("group_size", 1)) if self.point["policy"] == "srtm" else 1 / publishers
        return result.weight * publishers


def cells_of(result: Result, settings: Settings) -> list[Cell]:
    """The cells of a result, in order; those of another one, if it has that one's rows."""
    if result.rows_of:
        return cells_of(known(result.rows_of), settings)
    world: World | Live | Paced = settings.live or (_TINY if settings.tiny else _FULL)
    if result.paced:
        assert settings.paced is not None
        world = settings.paced
    chosen = result.tiny if settings.tiny else [*result.points, *(result.more if settings.thorough else ())]
    return [
        Cell(result.name, point, repetition, settings.seed * _SEEDS_APART + repetition, world)
        for point in chosen
        for repetition in range(min(settings.repetitions, result.repetitions or settings.repetitions))
    ]


def work(cell: Cell) -> bytes:
    """Run a cell and return its rows as JSON, with exact numbers."""
    return json.dumps(known(cell.result).run(cell.world, cell.point, cell.seed)).encode()


class Kept:
    """A folder of finished cells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, settings: Settings) -> None:
        """Create the folder, and write down the settings."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / _SETTINGS).write_text(json.dumps(asdict(settings)))
        except OSError as error:
            raise InputError(f"--out: cannot write to {self.folder}: {error.strerror}") from None

    def settings(self) -> Settings:
        """The settings of the newest run in this folder."""
        try:
            told = json.loads((self.folder / _SETTINGS).read_text())
            return Settings(**{**told, **_worlds(told)})
        except (OSError, ValueError, TypeError):
            raise InputError(f"no lab run in {self.folder}; start one with srtm lab run all") from None

    def has(self, cell: Cell) -> bool:
        """Whether the cell is finished."""
        return self._path(cell).exists()

    def put(self, cell: Cell, rows: list[Row]) -> None:
        """Keep the rows of a finished cell."""
        path = self._path(cell)
        path.parent.mkdir(exist_ok=True)
        named = [{**row, "result": cell.result, "repetition": cell.repetition, "seed": cell.seed} for row in rows]
        unfinished = path.with_suffix(".unfinished")
        pq.write_table(pa.Table.from_pylist(named), unfinished)
        unfinished.replace(path)

    def rows(self, result: Result, settings: Settings) -> Rows | None:
        """All rows of a result, in order; None while cells are missing."""
        cells = cells_of(result, settings)
        if not all(self.has(cell) for cell in cells):
            return None
        return Rows(row for cell in cells for row in self._read(cell))

    def _read(self, cell: Cell) -> list[Row]:
        path = self._path(cell)
        try:
            rows: list[Row] = pq.read_table(path, partitioning=None).to_pylist()
        except (OSError, pa.ArrowInvalid) as error:
            raise InputError(f"cannot read {path} ({error}); remove it and run the lab again") from None
        return rows

    def _path(self, cell: Cell) -> Path:
        return self.folder / cell.result / f"{cell.digest}.parquet"


def _worlds(told: dict[str, Any]) -> dict[str, Live | Paced | None]:
    """The live worlds of a run, if it had any."""
    if told.get("live") is None:
        return {}
    from srtm.lab.live.paced import Paced
    from srtm.lab.live.world import Live

    return {"live": Live(**told["live"]), "paced": Paced(**told["paced"])}


def all_cells(results: Sequence[Result], settings: Settings) -> list[Cell]:
    """The cells of these results, each once."""
    return list({cell.digest: cell for result in results for cell in cells_of(result, settings)}.values())


def unfinished(results: Sequence[Result], settings: Settings, kept: Kept) -> list[Cell]:
    """The cells still to run, each once, the longest first."""
    return sorted((cell for cell in all_cells(results, settings) if not kept.has(cell)), key=lambda cell: -cell.weight)


def sweep_here(cells: Sequence[Cell], kept: Kept, beside: Callable[[], Row], done: Callable[[Cell], None]) -> None:
    """Run cells one after another in this process, as live cells need; calls `beside` before each."""
    for cell in cells:
        noted = beside()
        kept.put(cell, [{**row, **noted} for row in known(cell.result).run(cell.world, cell.point, cell.seed)])
        done(cell)


def sweep_together(
    cells: Sequence[Cell], kept: Kept, together: int, beside: Callable[[int, int], Row], done: Callable[[Cell], None]
) -> None:
    """Run cells in processes of their own, so many at a time; calls `beside` with the time that each took.

    All of them together send no more messages than leave brokers idle most of the time. If a cell fails, the others
    run; the first failure is raised at the end. If this process is interrupted, so are the cells, and their brokers
    end with them.
    """
    waiting, running, problems = list(cells), dict[Future[tuple[bytes, int, int]], Cell](), []
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(together, context, _interruptible, (os.getpid(),), max_tasks_per_child=1) as pool,
        _interrupting(),
    ):
        while waiting or running:
            room_mps = _MOST_MPS - sum(_sent_mps(cell) for cell in running.values())
            fitting = (cell for cell in waiting if _sent_mps(cell) <= room_mps or not running)
            starting = next(fitting, None) if len(running) < together else None
            if starting is not None:
                waiting.remove(starting)
                running[pool.submit(_timed, starting)] = starting
            finished, _ = wait(running, None if starting is None else _APART_S, FIRST_COMPLETED)
            for each in finished:
                cell = running.pop(each)
                if problem := each.exception():
                    problems.append(problem)
                    log.error("LAB(%s): %s of seed %d failed: %s", cell.result, cell.point, cell.seed, problem)
                    continue
                found, began_ns, ended_ns = each.result()
                noted = beside(began_ns, ended_ns)
                kept.put(cell, [{**row, **noted} for row in json.loads(found)])
                done(cell)
    if problems:
        raise problems[0]


def _interruptible(parent: int) -> None:
    """Called in the process of a cell: SIGINT ends it, even if a shell started this run with SIGINT ignored."""
    from srtm.control.local.cluster import die_with

    die_with(parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _interrupting() -> Iterator[None]:
    """Interrupt the processes that this one has started if the block is left by an exception."""
    try:
        yield
    except BaseException:
        for process in multiprocessing.active_children():
            if process.pid is not None:
                os.kill(process.pid, signal.SIGINT)
        raise


def _sent_mps(cell: Cell) -> float:
    """Messages that a paced cell sends, by what they cost: those of a batch leave together."""
    assert not isinstance(cell.world, Simulated)
    total_mps = Population(int(cell.point.get("publishers", 1_000))).total_mps / cell.world.factor  # type: ignore[union-attr]
    return total_mps if "publishers" in cell.point else total_mps / _BATCHED


def _timed(cell: Cell) -> tuple[bytes, int, int]:
    """The rows of a cell, and from when to when it ran."""
    began_ns = time.time_ns()
    return work(cell), began_ns, time.time_ns()


def sweep(cells: Sequence[Cell], kept: Kept, spark: SparkSession, done: Callable[[Cell], None]) -> None:
    """Run cells on Spark, and keep each as soon as it finishes."""
    from srtm.pipeline.runtime.cells import run_cells

    for number, found in run_cells(spark, cells, work):
        kept.put(cells[number], json.loads(found))
        done(cells[number])
