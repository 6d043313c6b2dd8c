"""`python -m tools.native`: compiles the modules on a message's way into src/srtm/_native, with mypyc and a C compiler.

Without a compiler, or if compiling fails, SRTM runs interpreted: one line says why, and the exit code is 0 unless
`--required` is given. Modules that are compiled from the present sources already are left as they are.
The hook in hatch_build.py calls this for wheels, and `make setup` for the environment that it makes.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
PACKAGE = SOURCE / "srtm"
sys.path[:0] = [] if str(SOURCE) in sys.path else [str(SOURCE)]

from srtm import native  # noqa: E402

# What a message passes on its way through a broker. Others call these, but not once a message. `model/law.py` is left
# out, because numba compiles its source.
MODULES = (
    "broker/backpressure.py",
    "broker/broker.py",
    "broker/channel.py",
    "broker/clients/buffered.py",
    "broker/clients/clients.py",
    "broker/clients/connection.py",
    "broker/clients/reads.py",
    "broker/clients/resting.py",
    "broker/clients/subscription.py",
    "broker/clients/verbs.py",
    "broker/disk/replay.py",
    "broker/gate.py",
    "broker/intake.py",
    "broker/message.py",
    "broker/poller.py",
    "broker/receipts.py",
    "broker/recent.py",
    "broker/topic.py",
    "broker/turn.py",
    "model/limiter.py",
    "protocol/commands.py",
    "protocol/frames.py",
    "protocol/mpub.py",
    "protocol/server.py",
)
GROUP = "srtm"  # of modules that call each other directly
_BUILD = """
import sys
from mypyc.build import mypycify
from setuptools import setup
work, out, *arguments = sys.argv[1:]
extensions = mypycify(arguments, group_name={group!r}, target_dir=work, opt_level="3")
setup(name="srtm-native", ext_modules=extensions, script_args=["-q", "build_ext", "-b", out, "-t", work])
"""
_MYPY = ("--config-file=", "--ignore-missing-imports", "--follow-imports=silent", "--python-version", "3.11")


class NotCompiled(Exception):
    """Why there are no compiled modules."""


def sources() -> list[str]:
    """The modules to compile, and all modules of the package that they import: mypyc takes constants from them."""
    found: dict[str, None] = {}
    left = list(MODULES)
    while left:
        path = left.pop()
        if path in found:
            continue
        found[path] = None
        for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                base = Path(*name.split(".")[1:]) if name.startswith("srtm.") else None
                if base is not None:
                    left += [
                        str(at) for at in (base.with_suffix(".py"), base / "__init__.py") if (PACKAGE / at).is_file()
                    ]
    return sorted(found)


def _name(path: str) -> str:
    return "srtm." + path.removesuffix(".py").replace("/", ".")


def fresh(folder: Path = PACKAGE / "_native") -> bool:
    """Whether a folder has these modules, compiled from the present sources for this Python."""
    names = {_name(path) for path in MODULES}
    try:
        known = native.manifest(folder)
    except (OSError, ValueError):
        return False
    found = native.compiled_modules(folder).keys()
    return found == names | {f"{GROUP}__mypyc"} and not native.stale(folder) and sorted(known) == sources()


def compile_into(folder: Path) -> None:
    """Compile the modules into a folder, which they replace at once; NotCompiled says why that was not possible."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        raise NotCompiled(f"there is no C compiler ({compiler})")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise NotCompiled("Python's headers (Python.h) are not installed")
    hashes = {path: native.hash_of(PACKAGE / path) for path in sources()}
    with tempfile.TemporaryDirectory(prefix="srtm-native-") as work:
        built, made = Path(work) / "lib", Path(work) / "made"
        files = [str(Path("srtm") / path) for path in MODULES]
        done = subprocess.run(
            [sys.executable, "-c", _BUILD.format(group=GROUP), f"{work}/c", str(built), *_MYPY, *files],
            cwd=SOURCE,
            env={**os.environ, "SRTM_INTERPRETED": "1", "MYPY_CACHE_DIR": f"{work}/mypy"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            said = (done.stdout + done.stderr).strip()
            raise NotCompiled(f"mypyc or the C compiler failed:\n{said}")
        made.mkdir()
        for file in built.rglob(f"*{native.SUFFIX}"):
            shutil.copy(file, made / ".".join(file.relative_to(built).parts))
        lines = [f"{known} {path}\n" for path, known in hashes.items()]
        (made / native.MANIFEST).write_text("".join(lines))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made, folder)


def main() -> None:
    """Compile, unless that is done already."""
    parser = argparse.ArgumentParser(prog="tools.native", description="Compile the modules on a message's way.")
    parser.add_argument("--required", action="store_true", help="fail if the modules cannot be compiled")
    required, folder, began_s = parser.parse_args().required, PACKAGE / "_native", time.monotonic()
    if os.environ.get("SRTM_INTERPRETED"):
        print("SRTM_INTERPRETED is set: SRTM runs interpreted")
        return
    if fresh(folder):
        return
    print("compiling the broker's hot modules, once; this takes about a minute", flush=True)
    try:
        compile_into(folder)
    except NotCompiled as problem:
        shutil.rmtree(folder, ignore_errors=True)
        if required:
            sys.exit(f"tools.native: {problem}")
        first, *more = str(problem).splitlines()
        hint = "; python -m tools.native --required shows more" if more else ""
        print(f"SRTM runs interpreted: {first.removesuffix(':')}{hint}")
        return
    print(f"SRTM runs compiled ({time.monotonic() - began_s:.0f} s)")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
