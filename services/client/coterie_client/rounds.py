"""Take part with a host's users in a run of a rounds-based system, and recommend from its models."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from coterie.evaluation.unseen import best_unseen
from coterie.parties.member_driver import MemberDriver
from coterie.rounds.sides import ComparesItems, Likeness
from coterie.systems.server_step import planned_server_side
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie_client.denoising import denoising
from coterie_client.host import Host, Recommended
from coterie_client.journals import Journals
from coterie_client.learner import Learner
from coterie_client.members import HostMembers

__all__ = ["Rounds"]


class Rounds:
    """A client host's part in a run of a rounds-based system.

    Parameters
    ----------
    host : Host
        Registered.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        plan = host.party.plan
        # Metric names and `asks_supports` depend on nothing but the system and its settings: any sizes do.
        server = planned_server_side(plan, 1, 1)
        self.metrics: Sequence[str] = server.metrics
        self._journals = Journals(
            host.engine, host.writer, host.settings.state / "contributions.bin", plan.run_id
        )
        self._learner = Learner(host, self._journals)
        self._members = HostMembers(host, self._journals, self._learner)
        fetches = wire.FetchKind
        opened = (fetches.FETCH_KIND_OPEN_ITEMS,) if server.asks_supports else ()
        self.forgetting = self._members.forgetting
        """Deletes at the third party what the users published, once the person wishes it."""
        self._driver = MemberDriver(
            host.party,
            self._members,
            host.runtime.accounting.activity,
            attached=(fetches.FETCH_KIND_MODEL, *opened),
        )
        self._denoising = denoising(host, self._members) if plan.secure_sum == "denoised" else None
        # Once the run is over, the chosen version.
        self._chosen: int | None = None
        self._settled = asyncio.Event()

    async def begin(self, running: asyncio.TaskGroup) -> None:
        """Start answering the COS's tasks in a background task."""
        self._host.party.carries = True
        running.create_task(self.run())
        running.create_task(self.forgetting.run())
        if self._denoising is not None:
            running.create_task(self._denoising.run())

    async def told(self, tasks: Sequence[wire.Task]) -> None:
        """Take the COS's open tasks, and the best or chosen version that they name."""
        for task in tasks:
            if task.kind == wire.TaskKind.TASK_KIND_FINISH and not task.resumable:
                self._chosen = task.version
            elif task.kind == wire.TaskKind.TASK_KIND_ROUND:
                self._members.best = task.best
        others = self._denoising
        if others is None:
            self._driver.hear(tasks)
            return
        others.hear([task for task in tasks if others.is_asked(task)])
        self._driver.hear([task for task in tasks if not others.is_asked(task)])

    async def finished(self) -> None:
        """Stop answering: the run is over."""
        self._driver.finish()
        if self._denoising is not None:
            self._denoising.finish()

    async def run(self) -> None:
        """Answer tasks until `finished`; then restore users' private arrays for the chosen version."""
        await self._driver.run()
        if self._chosen is not None and self._journals.joined:
            await self._learner.adopt(self._chosen)
        self._settled.set()

    def recorded(self, item: str) -> int:
        """Return 0: an interaction stays at this host, and enters training with the next round."""
        return 0

    async def recommend(self, user: int, k: int) -> Recommended:
        """Recommend by scores computed here, from the newest model or, after the run, the chosen one."""
        if self._chosen is not None:
            await self._settled.wait()
        try:
            model = await self._learner.newest()
        except Refusal as refusal:
            raise Refusal(
                ErrorReason.ERROR_REASON_NOT_READY,
                "there is no model yet: the run is still gathering",
                field="user",
            ) from refusal
        side = await self._learner.side()
        catalogue = self._learner.catalogue
        if catalogue is None:
            raise AssertionError("a side was made without a catalogue")
        scores = await asyncio.to_thread(side.recommend, model.arrays, user - 1)
        seen = self._host.histories.seen(user, catalogue)
        items, values = best_unseen(self._learner.items, scores, seen, k)
        return items, values, model.version

    async def because(self, user: int, items: Sequence[str]) -> Likeness | None:
        """Return the user's training item that is most like each of some items in the newest model."""
        model, side = await self._learner.newest(), await self._learner.side()
        catalogue = self._learner.catalogue
        if catalogue is None or not isinstance(side, ComparesItems):
            return None
        own = np.array(sorted(self._host.histories.seen(user, catalogue)), np.intp)
        asked = np.array([catalogue.index[item] for item in items], np.intp)
        if not len(own) or not len(asked):
            return Likeness(side.likeness, (None,) * len(asked), (0.0,) * len(asked))
        values = await asyncio.to_thread(side.alike, model.arrays, asked, own)
        best = values.argmax(axis=1)
        most = values[np.arange(len(asked)), best]
        return Likeness(
            side.likeness,
            tuple(
                self._learner.items[own[at]] if value > 0 else None
                for at, value in zip(best, most, strict=True)
            ),
            tuple(max(float(value), 0.0) for value in most),
        )

    async def forget_published(self) -> int:
        """Have what the host's users published beside sums deleted at the third party; return how many uploads."""
        return await self._members.forget_published()

    async def settled(self) -> None:
        """Wait until what the COS has asked for is answered and stored, and what the person wishes deleted is."""
        await (self._settled.wait() if self._driver.finished else self._driver.quiet())
        await self.forgetting.looked()

    async def stop(self) -> None:
        """Do nothing: no work outlives the process."""

    def close(self) -> None:
        """Close the files."""
        self._journals.close()
        self._learner.close()
