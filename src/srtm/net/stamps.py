"""Arrival times by the kernel: a read of a stamped TCP socket comes with the time at which its bytes arrived.

Linux keeps a stamp for TCP segments as it does for datagrams, without any patch; docs/adr/0011-arrival-times.md says
which one a read gets.
"""

from __future__ import annotations

import socket

SO_TIMESTAMPNS = getattr(socket, "SO_TIMESTAMPNS", 35)
