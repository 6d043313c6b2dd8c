"""Sockets that are ready: read in turns of bounded size, with and without an epoll."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from srtm.broker.poller import AT_ONCE, Poller

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture(params=["epoll", "none"])
def pairs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Pair]]:
    """More pairs than one turn reads; all of them have something to say."""
    if request.param == "none":
        monkeypatch.delattr(select, "epoll")
    made = [socket.socketpair() for _ in range(AT_ONCE + 10)]
    for _, far in made:
        far.send(b"x")
    yield made
    for pair in made:
        for each in pair:
            each.close()


def turns(pairs: list[Pair], on_read: Callable[[Poller, int], None], until: Callable[[], bool]) -> list[int]:
    """How many were read in each turn."""
    sizes = [0]  # the last one is of the turn that reads now
    last_of_a_row: list[bool] = []

    def turn(more: bool) -> None:
        sizes.append(0)
        last_of_a_row.append(not more)

    def read(poller: Poller, number: int) -> None:
        sizes[-1] += 1
        on_read(poller, number)

    async def watch() -> None:
        poller = Poller(asyncio.get_running_loop(), turn)
        for number, (near, _) in enumerate(pairs):
            poller.add(near, partial(read, poller, number))
        async with asyncio.timeout(10):
            while not until():
                await asyncio.sleep(0)
        for near, _ in pairs:
            poller.remove(near)
        poller.close()

    asyncio.run(watch())
    assert last_of_a_row[-1], "what was put off for another turn was put off for ever"
    return sizes


def test_nobody_is_read_twice_before_everybody_was_read_once(pairs: list[Pair]) -> None:
    """They always have more to say, and do not all fit into a turn."""
    order: list[int] = []
    sizes = turns(pairs, lambda _, number: order.append(number), lambda: len(order) >= len(pairs))
    assert set(order[: len(pairs)]) == set(range(len(pairs)))
    assert max(sizes) <= AT_ONCE


def test_who_is_removed_is_not_read_even_in_the_same_turn(pairs: list[Pair]) -> None:
    """The first that is read removes all others."""
    order: list[int] = []

    def only_me(poller: Poller, number: int) -> None:
        order.append(number)
        for other, (near, _) in enumerate(pairs):
            if other != number:
                poller.remove(near)
                poller.remove(near)

    turns(pairs, only_me, lambda: len(order) >= 3)
    assert len(set(order)) == 1


def test_who_is_added_twice_is_watched_once(pairs: list[Pair]) -> None:
    order: list[int] = []

    def read(poller: Poller, number: int) -> None:
        order.append(number)
        poller.add(pairs[number][0], pytest.fail)
        poller.remove(pairs[number][0])

    turns(pairs, read, lambda: len(order) >= len(pairs))
    assert sorted(order) == list(range(len(pairs)))
