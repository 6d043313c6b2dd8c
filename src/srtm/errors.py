"""Every error that SRTM raises on purpose, in one tree.

SRTMError
├── InputError            a value from outside is unusable; the message names it and the remedy
│   ├── BucketError       (r, b) is not a token bucket
│   ├── ArrivalsError     arrival times are unsorted, missing or out of range
│   ├── SplitError        shares cannot add up to the whole
│   ├── PlacementError    no placement of the publishers is possible
│   ├── WorkloadError     a workload cannot be generated
│   └── GroupsError       a file of correlation groups cannot be read or written, or contradicts itself
├── TraceError            a trace file or folder cannot be read or written
├── LogError              the durable log cannot be opened, written or read; the message names the file and the remedy
│   ├── LogFull           the disk is full: nothing of this append was stored; a later one may succeed
│   ├── OffsetTrimmed     the log no longer holds the offset
│   └── LogReplaced       the topic no longer has the log that an offset belongs to
├── PipelineError         Spark cannot start, or a job fails; the message names the remedy
├── BrokerError           a broker cannot start or continue
│   ├── PublishRefused    a broker refuses messages: the topic is full, or the engine would refuse them
│   └── ExchangeRefused   a broker refuses an exchange with a controller; carries a code
├── ControlError          a controller cannot start or continue
│   ├── RegistryFull      the registry of names and registrations is full
│   └── LeadershipLost    another controller leads, or may lead: this one can store nothing more
├── ClientError           a publisher or subscriber cannot reach its broker or controller, or is refused
│   ├── ControllerAway    the controller does not answer, or has no broker to offer; a retry may succeed
│   └── WindowFull        the maximum number of messages awaits an answer
├── ProtocolError         a peer broke NSQ's protocol, or asked for the impossible; carries NSQ's code
└── BacklogOverflow       exact arithmetic would exceed 64 bits

Errors carry facts as attributes, so callers need not parse messages.
"""

from __future__ import annotations

from typing import Any


class SRTMError(Exception):
    """Root of the tree; `facts` holds the values in the message."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts


class InputError(SRTMError, ValueError):
    """A value from outside is unusable."""


class BucketError(InputError):
    """The pair (r, b) is not a token bucket."""


class ArrivalsError(InputError):
    """Arrival times are unsorted, missing or out of range."""


class SplitError(InputError):
    """Shares cannot add up to the whole."""


class PlacementError(InputError):
    """No placement of the publishers is possible."""


class WorkloadError(InputError):
    """The workload cannot be generated."""


class TraceError(SRTMError):
    """A trace cannot be read or written."""


class GroupsError(InputError):
    """A file of correlation groups cannot be read or written, or contradicts itself."""


class LogError(SRTMError):
    """The durable log cannot be opened, written or read."""


class LogFull(LogError):
    """The disk is full: nothing of the append was stored."""


class OffsetTrimmed(LogError):
    """The log no longer holds the offset; `facts["begin"]` is the oldest that it holds."""


class LogReplaced(LogError):
    """The topic no longer has the log that an offset belongs to; offsets of two logs are unrelated."""


class PipelineError(SRTMError):
    """Spark cannot start, or a job fails."""


class BrokerError(SRTMError):
    """A broker cannot start or continue."""


class PublishRefused(BrokerError):
    """A broker refuses messages; `facts["reason"]` is full, defer or size."""


class ExchangeRefused(BrokerError):
    """A broker refuses an exchange with a controller; `code` (`protocol.exchange.RefusalCode`) says why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message, code=code)
        self.code = code


class ControlError(SRTMError):
    """A controller cannot start or continue."""


class RegistryFull(ControlError):
    """The registry of names and registrations is full."""


class LeadershipLost(ControlError):
    """Another controller leads, or may lead: this one can store nothing more."""


class ClientError(SRTMError):
    """A publisher or subscriber cannot reach its broker or controller, or is refused."""


class ControllerAway(ClientError):
    """The controller does not answer, or has no broker to offer; a retry may succeed."""


class WindowFull(ClientError):
    """The maximum number of messages awaits an answer."""


class ProtocolError(SRTMError):
    """NSQ's error: its `code`, its `text`, whether it is `fatal` to the connection, and the `wire` form for the peer.

    As in nsqd, only E_FIN_FAILED, E_REQ_FAILED and E_TOUCH_FAILED leave the connection open, because a consumer that is
    merely late causes them. `text` may contain invalid UTF-8 of the peer, as surrogates; `wire` has the original bytes,
    and `str()` is safe to print.
    """

    SURVIVED = frozenset({"E_FIN_FAILED", "E_REQ_FAILED", "E_TOUCH_FAILED"})

    def __init__(self, code: str, text: str = "", **facts: Any) -> None:
        self.code = code
        self.text = text
        self.fatal = code not in self.SURVIVED
        self.wire = (f"{code} {text}" if text else code).encode("utf-8", "surrogateescape")
        super().__init__(self.wire.decode("utf-8", "backslashreplace"), **facts)

    def bare(self) -> ProtocolError:
        """Return the error as a value, without its traceback, which would form a reference cycle with its holder."""
        self.__traceback__ = self.__context__ = None
        return self


class BacklogOverflow(SRTMError, OverflowError):
    """A backlog exceeds the range in which 64-bit arithmetic is exact."""
