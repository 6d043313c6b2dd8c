"""Three controllers on a cluster of NATS, their brokers, and what can go wrong with them, all of it real."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.control.processes import PATIENCE_S, Processes, Program, until
from tests.engines import NatsCluster, leader_of


class Controllers(Processes):
    """Three controllers and some brokers; requests go to `client`, which asks any controller that answers."""

    def __init__(self, folder: Path, stack: ExitStack, cluster: NatsCluster, *more: str) -> None:
        self.cluster = cluster
        self.store = cluster.url.partition("?")[0]
        self.folder = folder
        self.running = []
        self.brokers = {}
        stack.callback(self.stop)
        free = ["--tcp-port", "0", "--http-port", "0", "--web-port", "none", "--log-level", "error"]
        self.controllers = [self._started(Program("controller", *free, "--store", self.store, *more)) for _ in range(3)]
        self.controller = self.controllers[0]
        self.url = ",".join(f"http://127.0.0.1:{each.http}" for each in self.controllers)
        self.client: Any = AnyOf([f"http://127.0.0.1:{each.http}" for each in self.controllers], stack)

    def all_brokers(self, count: int) -> None:
        """Start so many brokers, and wait until a leader has heard all."""
        places = ",".join(f"127.0.0.1:{each.tcp}" for each in self.controllers)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda number: self.broker(f"broker-{number}", controller=places), range(1, count + 1)))
        self.all_alive()

    def leader(self, of: list[Program] | None = None) -> Program | None:
        """The controller that says that it leads."""
        for each in self.controllers if of is None else of:
            with suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{each.http}/v1/leader", timeout=0.5, trust_env=False).json()["leads"]:
                    return each
        return None

    def some_leader(self) -> Program:
        found = until(self.leader)
        assert isinstance(found, Program)
        return found

    def replaced_s(self, old: Program, since: float) -> float:
        """How long after a time another controller leads and answers for the cluster."""
        others = [each for each in self.controllers if each is not old]
        new = until(lambda: self.leader(others))
        url = f"http://127.0.0.1:{new.http}/v1/brokers"
        until(lambda: _alive(httpx.get(url, timeout=1, trust_env=False).json()) == len(self.brokers))
        return time.monotonic() - since

    def answers_s(self, since: float) -> float:
        """How long after a time a controller leads and a change is answered."""
        until(lambda: (found := self.leader()) and _stores(found))
        return time.monotonic() - since

    async def stream_leader(self) -> str:
        """The NATS server that leads the bucket."""
        return await leader_of(self.cluster.url, "KV_srtm")

    def kill(self, victim: Program) -> None:
        victim.kill()

    def pause(self, victim: Program) -> None:
        victim.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, victim.process.pid, os.WSTOPPED)

    def resume(self, victim: Program) -> None:
        victim.process.send_signal(signal.SIGCONT)

    def start_again(self, victim: Program) -> None:
        self.controllers[self.controllers.index(victim)] = self._started(victim.again())


def _stores(leader: Program) -> bool:
    url = f"http://127.0.0.1:{leader.http}/v1/topics/probe"
    wish = {"r": 1, "b": 10, "fit": "none"}
    return httpx.put(url, json=wish, timeout=6, trust_env=False).status_code == 200


def _alive(found: Any) -> int:
    return sum(each["status"] == "alive" for each in found["brokers"])


class AnyOf:
    """Asks one controller after the other until one answers."""

    def __init__(self, urls: list[str], stack: ExitStack) -> None:
        self._clients = [
            stack.enter_context(httpx.Client(base_url=url, timeout=httpx.Timeout(5, connect=1), trust_env=False))
            for url in urls
        ]

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        """The first answer that is not 503; after a while, whatever there is."""
        ends = time.monotonic() + PATIENCE_S
        while True:
            for client in list(self._clients):
                with suppress(httpx.HTTPError):
                    answer = client.request(method, path, **more)
                    if answer.status_code != 503 or time.monotonic() > ends:
                        return answer
                self._clients.append(self._clients.pop(0))
            time.sleep(0.05)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.request("GET", path, **more)

    def put(self, path: str, **more: Any) -> httpx.Response:
        return self.request("PUT", path, **more)


@contextmanager
def controllers(folder: Path, *more: str) -> Iterator[Controllers]:
    with ExitStack() as stack:
        cluster = stack.enter_context(NatsCluster(folder))
        yield Controllers(folder, stack, cluster, *more)
