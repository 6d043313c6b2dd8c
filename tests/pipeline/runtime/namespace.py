"""A network of its own: a namespace of the kernel that reaches this machine by one pair of addresses alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest


class Namespace(NamedTuple):
    name: str
    outside: str  # this machine's address, as seen from inside
    inside: str

    @property
    def enter(self) -> list[str]:
        """What to put before a command that is to run inside."""
        return ["ip", "netns", "exec", self.name]


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)


@contextmanager
def namespace() -> Iterator[Namespace]:
    """Make a namespace, and remove it with its interfaces; skips the test if that is not permitted."""
    name = f"srtm{os.getpid()}"
    if not shutil.which("ip") or subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        pytest.skip("needs the command ip, and to be root")
    made = Namespace(name, "198.18.7.1", "198.18.7.2")  # a range for measurements, which nothing else uses
    try:
        _ip(f"link add {name}a type veth peer name {name}b netns {name}")
        _ip(f"addr add {made.outside}/30 dev {name}a")
        _ip(f"link set {name}a up")
        _ip(f"-n {name} addr add {made.inside}/30 dev {name}b")
        _ip(f"-n {name} link set {name}b up")
        _ip(f"-n {name} link set lo up")
        yield made
    finally:
        subprocess.run(["ip", "link", "del", f"{name}a"], capture_output=True, check=False)
        _ip(f"netns del {name}")
