"""`/v1/audit` and `/v1/options`: what was done by whom, and with which settings the controller runs."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import srtm
from srtm.control.access.guard import identity_of
from srtm.control.clock import now_ns
from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    from fastapi import APIRouter, Request

    from srtm.control.controller import Controller
    from srtm.control.options import ControllerOptions

log = logging.getLogger(__name__)


def noted(controller: Controller, request: Request, action: str, **arguments: Any) -> None:
    """Log an action, and add it to the audit log."""
    who = identity_of(request).at(request.client.host if request.client else "?")
    log.info("AUDIT(%s): %s %s", who, action, json.dumps(arguments))
    controller.store.note_action(now_ns(), who, action, arguments)


def without_secrets(options: ControllerOptions) -> dict[str, Any]:
    """Settings, with secrets masked."""
    found = asdict(options) | {"store": str(options.store_address)}
    secret = [each.name for each in fields(options) if each.metadata.get("secret")]
    return found | {name: "(given)" for name in secret if found[name] is not None}


def add_routes(api: APIRouter, controller: Controller) -> None:
    """Add the endpoints."""

    @api.get("/audit")
    async def audit() -> dict[str, Any]:
        """Get the audit log: the last thousand actions, newest first."""
        kept = controller.store.actions()
        return {
            "entries": [
                {"at_ms": at_ns // NS_PER_MS, "who": who, "action": action, "arguments": arguments}
                for at_ns, who, action, arguments in kept
            ]
        }

    @api.get("/options")
    async def options() -> dict[str, Any]:
        """Get the controller's version and settings; secrets are masked."""
        shown = without_secrets(controller.options)
        return {"version": srtm.__version__, "epoch": controller.state.epoch, "options": shown}
