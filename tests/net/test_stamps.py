"""Kernel stamps on a real socket: when bytes arrived, not when they were read."""

from __future__ import annotations

import select
import socket
import sys
import time

import pytest

from srtm.net.sockets import listen
from srtm.net.stamps import ANCILLARY, arrival_ns, stamp


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: only its TCP sockets have stamps")
def test_a_stamp_is_the_time_of_arrival() -> None:
    with listen("127.0.0.1", 0) as listener:
        stamp(listener)  # inherited by what it accepts
        with socket.create_connection(listener.getsockname()) as ours:
            theirs, _ = listener.accept()
            with theirs:
                for _ in range(100):  # the kernel begins a moment after the first socket has asked
                    before_ns = time.time_ns()
                    ours.sendall(b"x")
                    select.select([theirs], [], [])
                    after_ns = time.time_ns()
                    time.sleep(0.005)
                    found = arrival_ns(theirs.recvmsg(1, ANCILLARY)[1])
                    if found:
                        break
    assert before_ns <= found <= after_ns


def test_without_a_stamp_there_is_no_time() -> None:
    assert arrival_ns([]) == 0
