"""The real COS service with a lie: ``coterie serve cos``, whose runs and registrations have a lie's hooks.

    python -P -m tests.processes.lying.cos LIE VICTIM [--thorough] [--introduction FILE] --config FILE [--set KEY=VALUE]

Everything but the hooks is the service's own code.  Sums are appended to ``revealed.jsonl`` in its state folder.
"""

import argparse
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from coterie_cos import service
from coterie_cos.drift.asynchronous import AsynchronousRun
from coterie_cos.drift.windows_run import ShieldedRun
from coterie_cos.key_holders import KeyHolders
from coterie_cos.open_sum import OpenSum
from coterie_cos.orchestrator import Orchestrator
from coterie_cos.rounds_run import RoundsRun
from coterie_cos.run import Run
from coterie_cos.summing import Surroundings
from coterie_cos.sums import SavedRound, SumFormed

from coterie.net.server import current_peer
from coterie.rounds.plan_hash import plan_hash
from coterie.rounds.server_round import RoundState, SumPhase, in_memory
from coterie.secure_sum.contribution import ImpossibleSumError
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Closed, ClosedSteps, ServerHalf, Step, Vector
from coterie.secure_sum.registry import keyring_of
from coterie.store.cos import SavedSum
from coterie.wire.tensor import from_wire, to_wire
from coterie.wire.v1 import operator_pb2 as operator
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1 import rounds_pb2
from coterie.wire.v1.common_pb2 import Population, Tensor

from .lies import LIES, Lie, Next
from .revealed import REVEALED, Revealed, append

KINDS = wire.FetchKind


class LyingDriftRun(Run):
    """A run of DRIFT that asks a lie what to tell whom."""

    lie: Lie
    """Set by `main`, for all runs of the process."""

    def run_plan_of(self, party: str) -> wire.RunPlan:
        """Return the run's plan that a party is shown."""
        return self.lie.run_plan(party, wire.RunPlan.FromString(self.plan.SerializeToString()))

    def payload(self, party: str, role: str, request: wire.FetchRequest) -> tuple[int, bytes]:
        """Return what a party fetches; the catalogue as the lie has it."""
        version, honest = cast(tuple[int, bytes], super().payload(party, role, request))  # type: ignore[safe-super]
        if request.kind != KINDS.FETCH_KIND_CATALOGUE:
            return version, honest
        told = self.lie.catalogue(party, wire.Catalogue.FromString(honest))
        return version, _bytes(told)


class LyingAsynchronousRun(LyingDriftRun, AsynchronousRun):
    """A run of DRIFT's published form under a lie."""


class LyingShieldedRun(LyingDriftRun, ShieldedRun):
    """A run of DRIFT's shielded form under a lie."""


class LyingRun(RoundsRun):
    """A run in rounds that asks a lie what to tell whom, and what to do with sums."""

    lie: Lie
    """Set by `main`, for all runs of the process."""

    def __init__(self, request: operator.StartRunRequest, around: Surroundings) -> None:
        super().__init__(request, around)
        self._path = around.folder / REVEALED
        # Vectors of the sum in progress, by member; the sum that was dropped.
        self._vectors: dict[int, bytes] = {}
        self._dropped: OpenSum | None = None
        _believe(self._half, self.sum_plan_of)
        if self._key_holders is not None:
            keys = keyring_of(self._half)
            self._key_holders = LyingKeyHolders(keys, self.registry, self.present, self.revoked)

    # --- what a party is told ----------------------------------------------------------------------------------

    def run_plan_of(self, party: str) -> wire.RunPlan:
        """Return the run's plan that a party is shown."""
        return self.lie.run_plan(party, wire.RunPlan.FromString(self.plan.SerializeToString()))

    def sum_plan_of(self, party: str, plan: SumPlan) -> SumPlan:
        """Return the plan of a sum that a party is shown."""
        return self.lie.sum_plan(party, plan, _Shown(self, party))

    def payload(self, party: str, role: str, request: wire.FetchRequest) -> tuple[int, bytes]:
        """Return what a party fetches, as the lie has it; the honest bytes themselves where it changes nothing."""
        version, honest = super().payload(party, role, request)
        told = self._shown(party, request.kind, honest) if honest else honest
        return version, honest if told == honest else told

    def _shown(self, party: str, kind: wire.FetchKind.ValueType, honest: bytes) -> bytes:
        match kind:
            case KINDS.FETCH_KIND_CATALOGUE:
                return _bytes(self.lie.catalogue(party, wire.Catalogue.FromString(honest)))
            case KINDS.FETCH_KIND_POPULATION:
                return _bytes(self.lie.population(party, Population.FromString(honest)))
            case KINDS.FETCH_KIND_SUM_PLAN:
                plan = SumPlan.from_wire(rounds_pb2.SumPlan.FromString(honest))
                return _bytes(self.sum_plan_of(party, plan).to_wire())
            case KINDS.FETCH_KIND_OPEN_ITEMS:
                packed = from_wire(Tensor.FromString(honest), np.uint8, (None, None), field="open items")
                bits = np.unpackbits(packed, axis=1, count=len(self.registry.items), bitorder="little")
                opened = self.lie.open_items(party, bits.astype(np.bool_))
                return to_wire(np.packbits(opened, axis=1, bitorder="little")).SerializeToString()
            case KINDS.FETCH_KIND_MODEL:
                return self.lie.model(party, honest)
        return honest

    # --- who is in a sum ---------------------------------------------------------------------------------------

    def open_sum(self, opening: RoundState, slots: Mapping[int, Sequence[int]]) -> None:
        """Open a sum, and wait for no party that the lie does not hear."""
        absent = [
            party for party in opening.plan.by_device if not (self.present(party) and self.lie.hears(party))
        ]
        self._vectors = {}
        self._sums.open(opening, slots, absent)
        self.follow_sums()

    def tasks(self, party: str) -> list[wire.Task]:
        """Return a party's open tasks; none of the sum in progress for a party that the lie does not hear."""
        found = super().tasks(party)
        if self.lie.hears(party):
            return found
        return [task for task in found if task.kind != wire.TaskKind.TASK_KIND_ROUND]

    def submitted_at_once(
        self, party: str, head: wire.SubmitRequest, slots: Sequence[int], payload: bytes
    ) -> bool:
        """Take a message, or drop that of a party that the lie does not hear."""
        if self.lie.hears(party):
            super().submitted_at_once(party, head, slots, payload)
            if head.kind == wire.SubmitKind.SUBMIT_KIND_VECTOR and self._sums.current is not None:
                self._vectors[self._sums.current.member_with(slots)] = payload
        return True

    # --- what becomes of sums ----------------------------------------------------------------------------------

    async def apply_sum(self, summed: SumFormed) -> str:
        """Note what the sum reveals; then apply it, or drop it and stay where the run was."""
        found = self._revealed(summed) if self.in_progress(summed.sum) else None
        if found is not None:
            append(self._path, found)
        if found is None or self.lie.applies(found):
            return await super().apply_sum(summed)
        self._dropped = summed.sum
        await self._save(self.state, over=True)
        return ""

    def _revealed(self, summed: SumFormed) -> Revealed | None:
        """Return a formed sum decoded; None where only key holders see it, or it is impossible."""
        state, codes = summed.sum.state, summed.formed
        if not isinstance(codes, np.ndarray):
            return None
        try:
            sums = state.layout.decode(codes, summed.users)
        except ImpossibleSumError:
            return None
        plan = state.plan
        return Revealed(
            round=plan.round,
            purpose=plan.purpose,
            pass_number=plan.pass_number,
            part=plan.part,
            users=summed.users,
            parties=tuple(plan.members[member].device for member in state.submitters),
            holders=tuple(holder.device for holder in plan.holders),
            items=tuple(self.registry.items),
            sums=sums,
        )

    def proceed(self) -> None:
        """Do what the lie does next: open the next sum, wait, or ask for the dropped one with another list."""
        match self.lie.next():
            case Next.LIST if self._dropped is not None:
                if not self.waits:
                    self._ask_again(self._dropped)
            case Next.OPEN | Next.LIST:
                if not self.waits:
                    self._keep_model()
                super().proceed()

    def _keep_model(self) -> None:
        held = self._model.present.arrays
        if (kept := self.lie.kept_model(held)) is not held:
            self._model.change(self._model.prepared(kept))

    def _ask_again(self, dropped: OpenSum) -> None:
        """Go on with a dropped sum from the end of SUBMIT, as after a restart, over the members of another list."""
        state, self._dropped = dropped.state, None
        plan = state.plan
        running, notes = self._half.begin(plan, state.layout), dict[int, bytes]()
        for member, payload in sorted(self._vectors.items()):
            if self.lie.listed(plan.members[member].device):
                vector = self._half.vector(plan, ClosedSteps(), notes, member, payload, state.layout)
                running, notes[member] = self._half.added(running, vector), vector.note
        row = SavedSum(
            plan.round,
            plan.to_wire().SerializeToString(),
            Step.CONFIRM.value,
            SumPhase.COLLECT.value,
            "",
            self._half.to_bytes(running),
        )
        saved = SavedRound(row, {Step.SUBMIT.value: notes}, in_memory)
        self._sums.resume(saved, state.layout, dropped.slots, self._step_s)
        self.follow_sums()
        self.touch()

    async def on_joined(self, party: str, slots: Sequence[int], owners: Sequence[int]) -> None:
        """Tell the lie of a registration."""
        await super().on_joined(party, slots, owners)
        self.lie.joined(party)


@dataclass(frozen=True)
class _Shown:
    """The messages that a party of a run is shown now."""

    run: LyingRun
    party: str

    def run_plan(self) -> wire.RunPlan:
        return self.run.run_plan_of(self.party)

    def payload(self, kind: wire.FetchKind.ValueType) -> bytes:
        role, _, _ = self.party.partition("/")
        return self.run.payload(self.party, role, wire.FetchRequest(kind=kind))[1]


def _believe(half: ServerHalf, plan_of: Callable[[str, SumPlan], SumPlan]) -> None:
    """Make the server's half check messages by the plan that their member was shown, so that only members refuse."""
    check, vector = half.check, half.vector

    def shown(plan: SumPlan, member: int) -> SumPlan:
        return plan_of(plan.device_of(member), plan)

    def check_by(plan: SumPlan, closed: Closed, step: Step, member: int, message: bytes) -> None:
        check(shown(plan, member), closed, step, member, message)

    def vector_by(
        plan: SumPlan, closed: Closed, notes: Mapping[int, bytes], member: int, *more: Any
    ) -> Vector:
        return vector(shown(plan, member), closed, notes, member, *more)

    half.check, half.vector = check_by, vector_by


class LyingKeyHolders(KeyHolders):
    """Key holders of a run, of whom plans name those that a lie wants."""

    lie: Lie
    """Set by `main`."""

    def choose(self) -> None:
        """Let plans name the holders that the lie wants."""
        if self._key is not None:
            self._keys.use(self._key[1], self.lie.holders(self._there()))


class LyingOrchestrator(Orchestrator):
    """The COS's servicer that shows each party the plan that the lie has for it."""

    async def Register(  # noqa: N802 - the contract's name
        self, request_iterator: AsyncIterator[wire.RegisterRequest], context: Any
    ) -> wire.RegisterResponse:
        """Register a party, and show it a plan with the hash of that plan."""
        response = await super().Register(request_iterator, context)
        run = self._find(response.plan.run_id)
        if isinstance(run, LyingRun | LyingDriftRun):
            response.plan.CopyFrom(run.run_plan_of(str(current_peer())))
            response.plan_hash = plan_hash(response.plan)
        return response


def _bytes(message: Any) -> bytes:
    found: bytes = message.SerializeToString(deterministic=True)
    return found


def main() -> int:
    """Serve with the lie of the command line, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("lie", choices=LIES)
    parser.add_argument("victim", help="party whose users' data the COS wants, as client/host-2")
    parser.add_argument("--thorough", action="store_true", help="plans of sums fit what each party was told")
    parser.add_argument("--introduction", type=Path, help="file in which an accomplice introduces itself")
    given, serving = parser.parse_known_args()
    lie = LIES[given.lie](given.victim, thorough=given.thorough)
    lie.introduction = given.introduction
    LyingRun.lie = LyingDriftRun.lie = LyingKeyHolders.lie = lie
    # The service finds these by name when it makes them.
    service.RoundsRun = LyingRun
    service.AsynchronousRun = LyingAsynchronousRun
    service.ShieldedRun = LyingShieldedRun
    service.Orchestrator = LyingOrchestrator

    from coterie.cli.main import invoke

    return invoke(["serve", "cos", *serving])


if __name__ == "__main__":
    sys.exit(main())
