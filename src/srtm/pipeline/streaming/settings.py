"""The options of the format `srtm`, parsed and validated in one place.

In: the strings that Spark collected, in any case. Out: `Settings`, or one InputError that lists every problem.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from srtm.errors import InputError
from srtm.pipeline.streaming import positions
from srtm.pipeline.streaming.positions import Offsets
from srtm.protocol.engine import hidden, parse
from srtm.protocol.names import valid_name
from srtm.units import NS_PER_S, parse_duration_ns

T = TypeVar("T")

DEFAULT_CONTROLLER = "http://127.0.0.1:4161"
ROWS_PER_PARTITION = 100_000  # a tenth of a second of reading: small enough to share out, large enough for a task
Keys = Literal["none", "field", "envelope"]


@dataclass(frozen=True)
class Settings:
    """The settings of a source or sink."""

    topic: str  # of several, what the user wrote
    controller: str = DEFAULT_CONTROLLER  # empty if there is none
    brokers: tuple[str, ...] = ()  # their HTTP URLs; replaces the controller
    engine: str | None = field(default=None, repr=False)  # NATS servers, possibly with credentials
    token: str | None = None
    timeout_s: float = 60.0
    starting: Literal["earliest", "latest"] | Offsets = "earliest"
    ending: Literal["latest"] | Offsets = "latest"
    max_rows: int | None = None
    rows_per_partition: int = ROWS_PER_PARTITION
    fail_on_data_loss: bool = True
    trim_on_commit: bool = False
    keys: Keys = "none"
    group: str | None = None
    rate: float | None = None
    topics: tuple[str, ...] = ()  # if the user listed several
    pattern: str | None = None  # of the names of topics

    @property
    def several(self) -> bool:
        """Whether a query reads more than one topic, so that offsets name their topic, too."""
        return bool(self.topics) or self.pattern is not None


def read_settings(options: Mapping[str, str]) -> Settings:
    """The settings that options describe."""
    given = {name.lower(): value for name, value in options.items()}
    found: dict[str, Any] = {}
    problems = []
    for name, (meant, read) in _OPTIONS.items():
        if (text := given.pop(name.lower(), None)) is not None:
            try:
                found[meant] = read(text)
            except ValueError as problem:
                problems.append(f"{name} = {hidden(text)!r}: {problem}")
    if "pattern" in found and "topics" in found:
        problems.append("topic and topicPattern are both set: set only one")
    elif "pattern" in found:
        found["topic"] = found["pattern"]
    elif "topics" in found:
        names = found.pop("topics")
        found |= {"topic": names[0]} if len(names) == 1 else {"topic": ",".join(names), "topics": names}
    elif not problems:
        problems.append("topic is missing: set it with option('topic', …)")
    if "controller" in found and "brokers" in found:
        problems.append("controller and brokers are both set: set only one")
    if "engine" in found and "brokers" in found:
        problems.append("engine and brokers are both set: set only one")
    if "engine" in found and "pattern" in found and "controller" not in found:
        problems.append(
            "topicPattern needs a controller that knows the topics: set controller, or list topics in topic"
        )
    if "engine" in found:
        found.setdefault("controller", "")
    known = {name.lower(): name for name in _OPTIONS}
    problems += [  # Spark has its own options, so only what resembles one of ours is refused
        f"unknown option {unknown}; did you mean {known[close[0]]}?"
        for unknown in given
        if (close := difflib.get_close_matches(unknown, known, 1, 0.8))
    ]
    if problems:
        raise InputError(f"format srtm: {'; '.join(problems)}")
    return Settings(**found)


def _topics(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(map(valid_name, names)):
        raise InputError("a topic name is 1 to 64 letters, digits, or . _ -")
    if len(set(names)) < len(names):
        raise InputError("a topic is named twice")
    return names


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise InputError(f"not a regular expression: {error}") from None
    return text


def _url(text: str) -> str:
    url = text.strip().rstrip("/")
    url = url if "://" in url else f"http://{url}"
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https") or not rest or "/" in rest:
        raise InputError("give an HTTP address, for example http://127.0.0.1:4161")
    return url


def _urls(text: str) -> tuple[str, ...]:
    found = tuple(_url(each) for each in text.split(",") if each.strip())
    if not found:
        raise InputError("give the HTTP addresses of brokers, for example 127.0.0.1:4151,127.0.0.1:4153")
    return found


def _engine(text: str) -> str:
    address = parse(text)
    if address is None or address.kind != "nats":
        raise InputError("give NATS servers, for example nats://host:4222,host:4222")
    return text


def _whole(text: str) -> int:
    if not text.strip().isdigit() or not int(text):
        raise InputError("must be a whole number of at least 1")
    return int(text)


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise InputError("must be true or false")
    return text.lower() == "true"


def _seconds(text: str) -> float:
    return parse_duration_ns(text) / NS_PER_S


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 < rate < float("inf"):
        raise InputError("must be a positive number of messages a second")
    return rate


def _one_of(*names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.lower() not in names:
            raise InputError(f"must be {', '.join(names[:-1])} or {names[-1]}")
        return text.lower()

    return read


def _offsets(*names: str) -> Callable[[str], str | Offsets]:
    def read(text: str) -> str | Offsets:
        if text.lower() in names:
            return text.lower()
        try:
            return positions.write(positions.read(json.loads(text)))
        except (ValueError, AttributeError):  # a list has no items()
            raise InputError(
                f'must be {" or ".join(names)}, or offsets by broker, for example {{"broker-1": 120}}'
            ) from None

    return read


_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "topic": ("topics", _topics),
    "topicPattern": ("pattern", _pattern),
    "controller": ("controller", _url),
    "brokers": ("brokers", _urls),
    "engine": ("engine", _engine),
    "token": ("token", str),
    "timeout": ("timeout_s", _seconds),
    "startingOffsets": ("starting", _offsets("earliest", "latest")),
    "endingOffsets": ("ending", _offsets("latest")),
    "maxRowsPerTrigger": ("max_rows", _whole),
    "maxRowsPerPartition": ("rows_per_partition", _whole),
    "failOnDataLoss": ("fail_on_data_loss", _flag),
    "trimOnCommit": ("trim_on_commit", _flag),
    "keys": ("keys", _one_of("none", "field", "envelope")),
    "group": ("group", str),
    "rate": ("rate", _rate),
}
