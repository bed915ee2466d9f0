"""A process's owners as members of windows: which plans they accept, the rows that they contribute, their journals."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import sqlalchemy as sa

from coterie.crypto import clocks
from coterie.crypto.verified import Verified
from coterie.parties.sum_party import Contributed, Seat, SumRecords, Withheld, check_place
from coterie.process.runtime import Runtime
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Declined
from coterie.secure_sum.registry import Signer
from coterie.store.engine import Writer
from coterie.systems.drift.shielded import Released
from coterie.wire.v1.orchestrator_pb2 import RunPlan
from coterie_data_owner.drift.holdings import Holdings

__all__ = ["WindowMembers"]


class WindowMembers:
    """The owners of a process as members of windows; `MemberDriver` drives them.

    Parameters
    ----------
    holdings : sequence of Holdings
        Holdings of each owner.
    plan : RunPlan
    runtime : Runtime
        Of this process, which watches the third party's log.
    directory_key : bytes
        The directory's public key.
    writer : Writer
        The store's writer.
    before : callable
        Called before owners accept the plan of a window.
    """

    def __init__(
        self,
        holdings: Sequence[Holdings],
        plan: RunPlan,
        runtime: Runtime,
        directory_key: bytes,
        writer: Writer,
        before: Callable[[], Awaitable[None]],
    ) -> None:
        self._holdings = {one.identity.participant_id: one for one in holdings}
        self._plan = plan
        self._runtime = runtime
        self._device = runtime.party
        self._directory_key = directory_key
        self._writer = writer
        self._before = before
        self._verified = Verified(note=runtime.note)

    async def accept(self, plan: SumPlan, version: int) -> _Window:
        """Let each owner check the plan of a window."""
        await self._before()
        holdings, seats = {}, {}
        for member, one in enumerate(plan.members):
            holding = self._holdings.get(one.participant)
            if holding is None:
                continue
            objections = await self._objections(plan, member, holding)
            holdings[member] = holding
            seats[member] = Seat(holding.slots, holding.journal(), self._signer(holding), objections)
        return _Window(plan, seats, holdings)

    async def _objections(self, plan: SumPlan, member: int, holding: Holdings) -> list[str]:
        try:
            check_place(plan, member, self._plan, self._device)
            await holding.check(plan)
        except Declined as declined:
            return [str(declined)]
        return []

    def _signer(self, holding: Holdings) -> Signer:
        return Signer(holding.identity, holding.bundle, self._directory_key, clocks.now(), self._verified)

    @asynccontextmanager
    async def undisturbed(self) -> AsyncIterator[None]:
        """Let no owner take visits or news of the model meanwhile."""
        async with AsyncExitStack() as stack:
            for holding in self._holdings.values():
                await stack.enter_async_context(holding.undisturbed())
            yield

    async def keep(self, records: SumRecords[Released]) -> None:
        """Store journals with the rows offered to a window; owners keep no receipts."""
        changes = [
            (self._holdings[participant], journal, records.beside.get(participant))
            for participant, journal in records.journals.items()
        ]
        writes = [holding.write_of(journal, released) for holding, journal, released in changes]

        def write(connection: sa.Connection) -> None:
            for one in writes:
                one(connection)

        if not changes:
            return
        await self._runtime.settled()
        await self._writer.run_when_possible(write)
        for holding, journal, released in changes:
            holding.stored(journal, released)


@dataclass(frozen=True, eq=False)
class _Window:
    """A window in which owners of this process take part."""

    plan: SumPlan
    seats: Mapping[int, Seat]
    holdings: Mapping[int, Holdings]

    def contributions(self, members: Sequence[int]) -> Iterator[Contributed[Released] | Withheld]:
        """Yield the rows that each owner releases."""
        for member in members:
            try:
                codes, released = self.holdings[member].contribution(self.plan)
            except Declined as declined:
                yield Withheld(member, str(declined))
            else:
                yield Contributed(member, codes, released)

    async def conclude(self, members: Sequence[int]) -> None:
        """Do nothing: rows are released when they are stored."""

    async def save(self, members: Sequence[int]) -> None:
        """Do nothing: rows are released when they are stored."""
