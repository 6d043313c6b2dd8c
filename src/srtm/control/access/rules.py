"""The rule of every path: which roles may use which method. What has no rule, nobody but an admin may use.

`tests/control/access/test_rules.py` takes the paths from the application and fails if one has no rule here, and
docs/control.md lists this table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.routing import compile_path

from srtm.control.access.token import Role

if TYPE_CHECKING:
    import re

Who = frozenset[Role] | None  # None: anyone, without a credential

ANYONE: Final[Who] = None
ADMIN: Final = frozenset({Role.ADMIN})
OPERATOR: Final = ADMIN | {Role.OPERATOR}
VIEWER: Final = OPERATOR | {Role.VIEWER}
LOOKUP: Final = VIEWER | {Role.BROKER}  # brokers ask which channels their topics have elsewhere

_LOOKUP_READS = ("/info", "/lookup", "/topics", "/channels", "/nodes")
_LOOKUP_CHANGES = ("/topic/create", "/topic/delete", "/topic/tombstone", "/channel/create", "/channel/delete")
_TOPIC = "/v1/topics/{topic}"

RULES: Final[dict[str, dict[str, Who]]] = {
    "/ping": {"GET": ANYONE},
    **{path: {"GET": LOOKUP} for path in _LOOKUP_READS},
    "/debug": {"GET": VIEWER},
    **{path: {"POST": OPERATOR} for path in _LOOKUP_CHANGES},
    "/metrics": {"GET": VIEWER},
    "/docs": {"GET": VIEWER},
    "/openapi.json": {"GET": VIEWER},
    "/v1/health": {"GET": ANYONE},
    "/v1/session": {"GET": ANYONE, "POST": ANYONE, "DELETE": ANYONE},
    "/v1/topics": {"GET": VIEWER},
    _TOPIC: {"GET": VIEWER, "PUT": OPERATOR, "PATCH": OPERATOR, "DELETE": OPERATOR},
    **{f"{_TOPIC}/{what}": {"POST": OPERATOR} for what in ("fit", "move", "pause")},
    **{f"{_TOPIC}/{what}": {"GET": VIEWER} for what in ("explain", "watch", "history", "advice")},
    f"{_TOPIC}/publishers": {"GET": VIEWER, "POST": OPERATOR},
    f"{_TOPIC}/publishers/{{publisher:path}}": {"DELETE": OPERATOR},
    "/v1/findings": {"POST": OPERATOR},
    "/v1/watch": {"GET": VIEWER},
    "/v1/brokers": {"GET": VIEWER},
    "/v1/brokers/{name}": {"DELETE": ADMIN},
    "/v1/brokers/{name}/drain": {"POST": OPERATOR},
    "/v1/targets": {"GET": VIEWER},
    "/v1/audit": {"GET": VIEWER},
    "/v1/options": {"GET": OPERATOR},
    "/v1/tokens": {"GET": ADMIN, "POST": ADMIN},
    "/v1/tokens/{name}": {"DELETE": ADMIN},
}

_PATTERNS: Final[list[tuple[re.Pattern[str], dict[str, Who]]]] = [
    (compile_path(path)[0], rules) for path, rules in RULES.items() if "{" in path
]


def rule_of(method: str, path: str) -> Who:
    """The roles that may make a request; only admins may make one that has no rule."""
    rules = RULES.get(path)
    if rules is None:
        rules = next((found for pattern, found in _PATTERNS if pattern.fullmatch(path)), {})
    return rules.get(method, ADMIN)
