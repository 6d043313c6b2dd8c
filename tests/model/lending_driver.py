"""Brokers that lend, in virtual time, over a network that the caller decides about."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from srtm.model.bucket import TokenBucket
from srtm.model.lending import Answer, Ask, Lending
from srtm.model.limiter import Limiter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from srtm.model.lending import Rule

    # When copies of a message arrive, counted from now; none: it is lost.
    Network = Callable[[object], Sequence[int]]

ARRIVALS, MESSAGES = 0, 1
TOKEN = 10**12


@dataclass
class Broker:
    """One broker: its bucket, what waits for tokens, and its side of the lending."""

    name: str
    limiter: Limiter
    lending: Lending
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # message, when it must leave at the latest

    def release(self, now_ns: int) -> list[tuple[int, int, int]]:
        """Messages that have their token by now, with the time at which they got it."""
        gone = []
        while self.waiting and (at_ns := self.limiter.next_release_ns(len(self.waiting))) <= now_ns:
            gone.append((*self.waiting.popleft(), at_ns))
        return gone

    def tokens_ptok(self, now_ns: int) -> int:
        """Tokens that are really there: claims of waiting messages are not."""
        return self.limiter.level_ptok(now_ns) + len(self.waiting) * TOKEN


class Cluster:
    """Brokers of one topic, and everything that is on its way."""

    def __init__(
        self, shares: list[TokenBucket], rule: Rule, round_trip_ns: int, network: Network, start_ns: int
    ) -> None:
        self.network = network
        self.released: dict[int, int] = {}
        self.late: list[int] = []
        self.now_ns = start_ns
        self.flying: dict[int, tuple[str, Answer]] = {}  # to whom, by the number of the event
        self._events: list[tuple[int, int, int, int, Any]] = []
        self._numbers = count()
        self.brokers = []
        for number, share in enumerate(shares):
            limiter = Limiter(share, start_ns)
            lending = Lending("topic", limiter, start_ns, rule=rule, round_trip_ns=round_trip_ns)
            self.brokers.append(Broker(str(number), limiter, lending))
        self.join(1)

    def join(self, epoch: int) -> None:
        """Tell every broker the shares of the others."""
        for broker in self.brokers:
            broker.lending.join(epoch, self.others(broker), self.now_ns)

    def others(self, broker: Broker) -> dict[str, TokenBucket]:
        """The shares of all others, as they are."""
        return {other.name: other.limiter.bucket for other in self.brokers if other is not broker}

    def at(self, time_ns: int, kind: int, order: int, event: Any) -> int:
        """Put an event in its place; among messages of one time, those of the first asker come first."""
        number = next(self._numbers)
        heapq.heappush(self._events, (time_ns, kind, order, number, event))
        return number

    def step(self) -> bool:
        """Run the next event; False at the end."""
        if not self._events:
            return False
        self.now_ns, _, _, number, event = heapq.heappop(self._events)
        self.flying.pop(number, None)
        event()
        return True

    def arrive(self, broker: Broker, messages: list[int]) -> None:
        """Messages come together, and are one turn of the broker's loop."""
        self.settle(broker)
        for message in messages:
            broker.waiting.append((message, broker.limiter.admit(self.now_ns)))
        self.turn(broker)

    def turn(self, broker: Broker) -> None:
        """Drain, ask, and set the timer."""
        self.settle(broker)
        if to_ask := broker.lending.turn(self.now_ns, len(broker.waiting)):
            name, ask = to_ask
            self.send(ask, self.brokers[int(name)], broker, int(broker.name))
        if (wake_ns := broker.lending.wake_ns) is not None:
            self.at(wake_ns, MESSAGES, int(broker.name), lambda: self.wake(broker, wake_ns))

    def wake(self, broker: Broker, wake_ns: int) -> None:
        """The timer, unless it was set anew."""
        if broker.lending.wake_ns == wake_ns:
            self.turn(broker)

    def settle(self, broker: Broker) -> None:
        """Release what has its token."""
        for message, latest_ns, at_ns in broker.release(self.now_ns):
            self.released[message] = at_ns
            if at_ns > latest_ns:
                self.late.append(message)

    def send(self, message: Ask | Answer, to: Broker, sender: Broker, order: int) -> None:
        """Put every copy on its way."""
        for delay_ns in self.network(message):
            number = self.at(self.now_ns + delay_ns, MESSAGES, order, lambda: self.receive(message, to, sender, order))
            if isinstance(message, Answer):
                self.flying[number] = (to.name, message)

    def receive(self, message: Ask | Answer, broker: Broker, sender: Broker, order: int) -> None:
        """As the gate's owner must: release what is due, then let it have its effect."""
        self.settle(broker)
        if isinstance(message, Ask):
            answer = broker.lending.lend(sender.name, message, self.now_ns, len(broker.waiting))
            if answer is not None:
                self.send(answer, sender, broker, order)
        else:
            broker.lending.borrow(sender.name, message, self.now_ns, len(broker.waiting))
            self.turn(broker)

    def tokens_ptok(self) -> int:
        """Tokens at brokers, and tokens on the way that would be taken now."""
        held = 0
        for broker in self.brokers:
            self.settle(broker)
            held += broker.tokens_ptok(self.now_ns)
        takes = {broker.name: broker.lending.takes_ptok(self.now_ns) for broker in self.brokers}
        asked = {broker.name: broker.lending._asked for broker in self.brokers}
        on_the_way: dict[str, int] = {}
        for name, answer in self.flying.values():
            if (waits := asked[name]) is not None and waits.ask.id == answer.id:
                on_the_way[name] = min(takes[name], answer.lent_ptok)  # doubled answers count once
        return held + sum(on_the_way.values())
