"""A controller process over time: ready, leading, and ready again when another process leads.

In: a place for the store, the registry of brokers. Out: while this process leads, a running controller that continues
where the last one stopped, as after a restart. Losing the lead ends that controller with all that it had not stored.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from srtm.control.access.brokers import Admission
from srtm.control.clock import now_ns
from srtm.control.controller import Controller
from srtm.control.service import Service
from srtm.control.store import Store
from srtm.errors import LeadershipLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp

    from srtm.control.access.access import Access
    from srtm.control.discovery.registry import Registry
    from srtm.control.discovery.tcp import Applicant
    from srtm.control.front import Front
    from srtm.control.keeping.keeper import Keeper, Keeping, Leader
    from srtm.control.options import ControllerOptions

log = logging.getLogger(__name__)


class Leading:
    """The turns of this process as the leader."""

    def __init__(
        self,
        options: ControllerOptions,
        registry: Registry,
        keeping: Keeping,
        front: Front,
        app: Callable[[Service], ASGIApp],
        access: Access,
    ) -> None:
        self.superseded = asyncio.Event()  # a controller with another store has taken over the brokers
        self._options = options
        self._registry = registry
        self._keeping = keeping
        self._front = front
        self._app = app
        self._admission = Admission(options, access)  # by the options alone, while another process leads
        self._keeper: Keeper | None = None
        self._service: Service | None = None

    async def begin(self, me: Leader) -> None:
        """Wait until this process leads, then take up what the last leader left."""
        keeper = await self._keeping.lead(me)
        try:
            store = Store(keeper=keeper)
            recalls = store.recalling or (self._options.recover and not store.topics())
            # The epoch must be later than all others, also those of a store that was lost.
            controller = Controller(self._options, store, now_ns(), first_epoch=int(time.time()))
            if recalls:
                controller.recall(now_ns())
            await keeper.committed()
        except BaseException:
            keeper.close()
            raise
        self._keeper, self._service = keeper, Service(controller, self._registry)
        self._front.lead(self._app(self._service), keeper if self._keeping.shared else None)
        if self._keeping.shared:
            epoch, topics = controller.state.epoch, len(controller.topics)
            log.info("CONTROLLER: leads in epoch %s, with %s topics in %s", epoch, topics, keeper.place)

    def start(self) -> None:
        """Start the controller that has begun."""
        assert self._service is not None
        self._service.start()

    @property
    def access(self) -> Access | None:
        """The credentials that the controller knows while this process leads."""
        return self._service.access if self._service is not None else None

    def admit(self, applicant: Applicant, now_ns: int) -> str | None:
        """Why a broker may not register; None if it may."""
        admission = self._admission if self._service is None else self._service.admission
        return admission.admit(applicant, now_ns)

    async def run(self, me: Leader) -> None:
        """Lead whenever no other process does, until cancelled, or until a controller with another store does."""
        while True:
            if self._service is None:
                with suppress(LeadershipLost):
                    await self.begin(me)
                    self.start()
                continue
            assert self._keeper is not None
            ends = [asyncio.ensure_future(work) for work in (self._keeper.lost(), self._service.superseded.wait())]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in ends:
                    each.cancel()
            if self._service.superseded.is_set():
                self.superseded.set()
                return
            log.warning("CONTROLLER: another controller leads")
            await self._end()

    async def stop(self) -> None:
        """Stop, and let another controller lead at once."""
        keeper = self._keeper
        await self._end(closing=False)
        if keeper is not None:
            await keeper.release()

    async def _end(self, *, closing: bool = True) -> None:
        self._front.lead(None)
        service, keeper = self._service, self._keeper
        self._service = self._keeper = None
        if service is not None:
            await service.stop()
        if keeper is not None and closing:
            keeper.close()
