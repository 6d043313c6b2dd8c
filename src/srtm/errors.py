"""Every error that SRTM raises on purpose, in one tree.

SRTMError
├── InputError            a value from outside is unusable; the message names it and the remedy
│   ├── BucketError       (r, b) that is no token bucket
│   ├── ArrivalsError     arrival times that are unsorted, missing or out of range
│   ├── SplitError        shares that cannot add up to the whole
│   ├── PlacementError    brokers or publishers that cannot be placed at all
│   ├── WorkloadError     a workload that cannot be generated
│   └── GroupsError       a file of correlation groups that cannot be read or written, or contradicts itself
├── TraceError            a trace file or folder that cannot be read or written
├── LogError              the durable log cannot be opened, written or read; the message names the file and the remedy
│   ├── LogFull           no room on the disk: nothing of this append was stored, a later one may be
│   ├── OffsetTrimmed     the offset is older than what the log still holds
│   └── LogReplaced       the topic has another log than the one that an offset was of
├── PipelineError         Spark cannot start, or cannot do its work; the message names the remedy
├── BrokerError           a broker cannot start or go on
│   ├── PublishRefused    a broker does not take messages: its topic is full, or their engine never takes such
│   └── ExchangeRefused   a broker refuses an exchange with a controller; carries a code
├── ControlError          a controller cannot start or go on
│   └── RegistryFull      no room for more names and registrations
├── ClientError           a publisher or subscriber cannot reach its broker or controller, or may not
│   ├── ControllerAway    the controller does not answer, or has no broker to offer: later, it may
│   └── WindowFull        as many messages wait for their answers as may
├── ProtocolError         what a peer sent breaks NSQ's protocol, or cannot be done; carries NSQ's code
└── BacklogOverflow       exact arithmetic would leave 64 bits

Facts travel as attributes, so that callers need not parse messages.
"""

from __future__ import annotations

from typing import Any


class SRTMError(Exception):
    """Root of the tree; `facts` holds what the message was made of."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts


class InputError(SRTMError, ValueError):
    """A value from outside is unusable."""


class BucketError(InputError):
    """The pair (r, b) is no token bucket."""


class ArrivalsError(InputError):
    """Arrival times are unsorted, missing or out of range."""


class SplitError(InputError):
    """Shares cannot add up to the whole."""


class PlacementError(InputError):
    """Brokers or publishers cannot be placed at all."""


class WorkloadError(InputError):
    """The workload cannot be generated."""


class TraceError(SRTMError):
    """A trace cannot be read or written."""


class GroupsError(InputError):
    """A file of correlation groups cannot be read or written, or contradicts itself."""


class LogError(SRTMError):
    """The durable log cannot be opened, written or read."""


class LogFull(LogError):
    """There is no room for what was to be appended."""


class OffsetTrimmed(LogError):
    """The log no longer holds the offset; `facts["begin"]` is the oldest that it holds."""


class LogReplaced(LogError):
    """The topic has another log than the one that an offset was of: offsets of the two have nothing in common."""


class PipelineError(SRTMError):
    """Spark cannot start, or cannot do its work."""


class BrokerError(SRTMError):
    """A broker cannot start or go on."""


class PublishRefused(BrokerError):
    """A broker does not take messages; `facts["reason"]` is full, defer or size."""


class ExchangeRefused(BrokerError):
    """A broker refuses an exchange with a controller; `code` (`protocol.exchange.RefusalCode`) says why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message, code=code)
        self.code = code


class ControlError(SRTMError):
    """A controller cannot start or go on."""


class RegistryFull(ControlError):
    """There is no room for more names and registrations."""


class ClientError(SRTMError):
    """A publisher or subscriber cannot reach its broker or controller, or may not."""


class ControllerAway(ClientError):
    """The controller does not answer, or has no broker to offer: later, it may."""


class WindowFull(ClientError):
    """As many messages wait for their answers as may."""


class ProtocolError(SRTMError):
    """NSQ's error: its `code`, its `text`, whether it is `fatal` to the connection, and `wire`, what the peer is told.

    As in nsqd, only E_FIN_FAILED, E_REQ_FAILED and E_TOUCH_FAILED leave the connection open: they happen to consumers
    that were merely too late. `text` may hold bytes of the peer that are no UTF-8, as surrogates; `wire` has them as
    they came, and `str()` is safe to print.
    """

    SURVIVED = frozenset({"E_FIN_FAILED", "E_REQ_FAILED", "E_TOUCH_FAILED"})

    def __init__(self, code: str, text: str = "", **facts: Any) -> None:
        self.code = code
        self.text = text
        self.fatal = code not in self.SURVIVED
        self.wire = (f"{code} {text}" if text else code).encode("utf-8", "surrogateescape")
        super().__init__(self.wire.decode("utf-8", "backslashreplace"), **facts)

    def bare(self) -> ProtocolError:
        """The error as a value: without the frames it came through, which would form a cycle with whoever keeps it."""
        self.__traceback__ = self.__context__ = None
        return self


class BacklogOverflow(SRTMError, OverflowError):
    """A backlog left the range in which 64-bit arithmetic is exact."""
