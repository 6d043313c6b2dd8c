"""An event loop in virtual time: it never sleeps. When nothing is left to do now, the clock jumps to the next timer.

Work takes no virtual time, so latencies are exact and a run is the same every time. Code that blocks the loop is
imitated by `clock.advance`. Executors run their work at once. Time stands still for threads that are waited for (see
`wait_for`), such as that of a broker's log.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, Any

from srtm.testing.clock import VirtualClock
from srtm.testing.network import MemorySocket, Network
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from contextvars import Context
    from typing import TypeVar

    Result = TypeVar("Result")

PATIENCE_S = 10.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop, its clock and its network."""

    def __init__(self, clock: VirtualClock | None = None) -> None:
        self.clock = clock or VirtualClock()
        self.network = Network(self.clock, self.run_until)
        self._virtual = _Selector(self.network, self.clock, self._hear_threads)
        self._barriers: list[Callable[[], object]] = []
        self._heard = False
        super().__init__(self._virtual)

    def time(self) -> float:
        """The monotonic clock in seconds."""
        return self.clock.monotonic_ns() / NS_PER_S

    def connect_socket(self, _host: str, port: int) -> MemorySocket:
        """A connection within the memory network; `srtm.net.sockets` asks the loop for it."""
        return self.network.connect(port)

    def run_in_executor(  # type: ignore[override]
        self, _executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run work at once."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as problem:
            future.set_exception(problem)
        return future

    def wait_for(self, barrier: Callable[[], object]) -> None:
        """Call this before time passes: it returns when a thread has done everything it was given."""
        self._barriers.append(barrier)

    def wait_no_more(self, barrier: Callable[[], object]) -> None:
        """Let time pass whatever that thread does."""
        self._barriers.remove(barrier)

    def _hear_threads(self) -> bool:
        """Whether threads that are waited for have brought something to do now."""
        self._heard = False
        for barrier in self._barriers:
            barrier()
        return self._heard

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Call something soon, from any thread."""
        self._heard = True
        return super().call_soon_threadsafe(callback, *args, context=context)

    def run_until(self, holds: Callable[[], object], patience_s: float | None = PATIENCE_S) -> None:
        """Run until something is true; TimeoutError after so much virtual time."""
        if holds():
            return
        timer = None if patience_s is None else self.call_later(patience_s, self.stop)
        self._virtual.watch(holds, self.stop)
        try:
            self.run_forever()
        finally:
            self._virtual.watch(None, self.stop)
            if timer is not None:
                timer.cancel()
        if not holds():
            raise TimeoutError(f"it did not happen within {patience_s} s of virtual time")

    def sleep(self, seconds: float) -> None:
        """Run for so much virtual time."""
        self.call_later(seconds, self.stop)
        self.run_forever()

    def settle(self) -> None:
        """Run until nothing is left to do at this instant."""
        self._virtual.watch_idle(self.stop)
        self.run_forever()

    def run(self, main: Coroutine[Any, Any, Result]) -> Result:
        """The result of a coroutine."""
        return self.run_until_complete(main)

    def close(self) -> None:
        """Cancel every task that is left, and close the loop."""
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        if tasks:
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()


class _Keys(dict[int, selectors.SelectorKey]):
    """Keys by number; they may also be asked for by file."""

    def __getitem__(self, file: Any) -> selectors.SelectorKey:
        return super().__getitem__(_number(file))

    def get(self, file: Any, default: Any = None) -> Any:
        return super().get(_number(file), default)


class _Selector(selectors.BaseSelector):
    """Sees memory files only. Instead of waiting it moves the clock."""

    def __init__(self, network: Network, clock: VirtualClock, hear_threads: Callable[[], bool]) -> None:
        self._holds: Callable[[], object] | None = None
        self._idle = False
        self._stop: Callable[[], None] = lambda: None
        self._network = network
        self._clock = clock
        self._hear_threads = hear_threads
        self._keys = _Keys()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        number = _number(fileobj)
        key = self._keys[number] = selectors.SelectorKey(fileobj, number, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(_number(fileobj))

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def _ready(self) -> list[tuple[selectors.SelectorKey, int]]:
        found = []
        for number, key in self._keys.items():
            events = key.events & selectors.EVENT_READ if self._network.can_read(number) else 0
            events |= key.events & selectors.EVENT_WRITE if self._network.can_write(number) else 0
            if events:
                found.append((key, events))
        return found

    def watch(self, holds: Callable[[], object] | None, stop: Callable[[], None]) -> None:
        """Stop the loop when something is true; None ends that."""
        self._holds, self._stop = holds, stop

    def watch_idle(self, stop: Callable[[], None]) -> None:
        """Stop the loop when time would pass, instead of that."""
        self._idle, self._stop = True, stop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = self._ready()
        if self._holds is not None and self._holds():
            self._stop()
            return found
        if found or timeout == 0 or self._hear_threads():
            return found
        if self._idle:
            self._idle = False
            self._stop()
            return found
        if timeout is None:
            raise RuntimeError("nothing will ever happen: no socket is ready, and no timer is set")
        self._clock.advance(timeout)
        return found


def _number(file: Any) -> int:
    return file if isinstance(file, int) else int(file.fileno())
