"""Which extra of the package a command needs, for installations without it."""

from __future__ import annotations

from importlib.util import find_spec

_EXTRA = {
    "up": "broker,control",
    "broker": "broker",
    "controller": "control",
    "store": "control",
    "calibrate": "broker",
    "topic": "client",
    "top": "client",
    "check": "client",
    "debug": "client",
    "pub": "client",
    "sub": "client",
    "load": "client",
    "advise": "spark,client",
    "trace": "spark",
    "spark": "spark",
    "profile": "spark",
    "groups": "spark",
    "plan": "spark",
    "penalty": "spark",
    "conformance": "spark",
    "report": "spark",
    "lab": "spark,broker,control,lab",
}


def remedy(arguments: list[str], error: ImportError) -> str | None:
    """Return what to install for a command line that failed to import; None if no extra would help."""
    verb = next((each for each in arguments if not each.startswith("-")), "")
    extra = _EXTRA.get(verb)
    if extra is None or (error.name or "").partition(".")[0] == "srtm":
        return None
    return f"srtm {verb} needs {error.name}: pip install 'srtm[{extra}]'"


def require(*modules: str) -> None:
    """Fail now if a module is missing that the command's child processes would need."""
    for module in modules:
        if find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
