"""Keep an owner's state in DRIFT's shielded form: users' blocks, held-back gradient rows, the journal of windows.

A visit, its gradient and its reply are stored before the reply is sent.  Memory is a function of the store: it is
rebuilt from there after a restart or a failed write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import sqlalchemy as sa
import structlog
from numpy.typing import NDArray
from safetensors.numpy import load as unpack_arrays
from safetensors.numpy import save as pack_arrays

from coterie.crypto.identity import Bundle, Identity
from coterie.crypto.sealed import Decision, SequenceGate, decode_records
from coterie.errors import StoreError
from coterie.rounds.ledger import Ledger
from coterie.rounds.member_round import Journal
from coterie.secure_sum.contribution import Contribution, Layout
from coterie.secure_sum.plan import SumPlan, layout_hash
from coterie.secure_sum.protocol import Declined
from coterie.store import data_owner as store
from coterie.store.engine import Writer
from coterie.systems.drift.blocks import Block, BlockBuilder
from coterie.systems.drift.settings import MIN_MASKED, DriftSettings
from coterie.systems.drift.shielded import HeldRows, Released, visit
from coterie.systems.drift.shielded_run import ShieldedPurpose
from coterie.systems.drift.unseen import UnseenItems
from coterie.telemetry.accounting import Accounting
from coterie.wire.v1.orchestrator_pb2 import RunPlan
from coterie.wire.visit import Reply, Visit
from coterie_data_owner.drift.learning_owner import LearningOwner

__all__ = ["Answer", "Arrival", "Holdings", "ItemRows"]

_log = structlog.get_logger("coterie.holdings")

_NEVER = 2**62
"""Number of a round that never comes."""

_ROUNDING = 5
"""First element of the key under which an owner's vector is rounded; `coterie.systems.drift` has lower ones."""


@dataclass(frozen=True, eq=False)
class ItemRows:
    """A version of the item rows that an owner trains on.

    Parameters
    ----------
    version : int
    sha256 : bytes
        Hash of its payload.
    items : ndarray of float32, shape (I, d)
    """

    version: int
    sha256: bytes
    items: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Arrival:
    """A user's visit, opened and checked by the intake.

    Parameters
    ----------
    user : bytes
    slot : int
        Slot of the user.
    visit : Visit
    first, length : int
        Sequence number of the first record that the visit brings, and their number.
    records : bytes
    """

    user: bytes
    slot: int
    visit: Visit
    first: int = 0
    length: int = 0
    records: bytes = b""


@dataclass(frozen=True)
class Answer:
    """The outcome of a visit: its reply, the same for a repeated visit, or else the visit number that was expected."""

    reply: bytes = b""
    duplicate: bool = False
    expected: int = 0


@dataclass
class _Visitor:
    """An owner's state for one user: its blocks, how many ran in the epoch, the last visit and its reply."""

    blocks: list[Block] = field(default_factory=list)
    visit: int = 0
    reply: bytes = b""
    epoch: int = 0
    done: int = 0
    durable: int = 0


class Holdings:
    """One owner's state in DRIFT's shielded form, and its part as a member of windows.

    Parameters
    ----------
    owner : LearningOwner
        Registered.
    plan : RunPlan
    writer : Writer
        The store's writer.
    accounting : Accounting
        Counts CPU time by activity.
    refresh : callable
        Fetches the newest model and hands it to `told`.
    """

    def __init__(
        self,
        owner: LearningOwner,
        plan: RunPlan,
        writer: Writer,
        accounting: Accounting,
        refresh: Callable[[], Awaitable[None]],
    ) -> None:
        self._refresh = refresh
        self._owner = owner
        self._plan = plan
        self._writer = writer
        self._accounting = accounting
        self._settings = DriftSettings.from_plan(plan)
        self.owner_id = owner.id
        self.identity: Identity = owner.identity
        self.bundle: Bundle = owner.bundle
        self.slots: Sequence[int] = (owner.slot,)
        self.model = ItemRows(-1, b"", np.zeros((0, plan.dim), np.float32))
        self.changed = asyncio.Event()
        """Set when there is something new to report."""
        self.visits = 0
        self._builder = BlockBuilder(keep_all=self._settings.pairs_unseen)
        self._unseen = UnseenItems(self._settings, plan.seed, owner.slot)
        self._visitors: dict[int, _Visitor] = {}
        self._held = HeldRows(0, plan.dim)
        self._window = store.WindowRow()
        self._offered: Released | None = None
        self._since = 0
        self._closed = 0
        self.sits_out = False
        """Whether the owner takes part in no window any more, because its journal was restored from a backup."""
        self._room = asyncio.Event()
        self._room.set()

    # --- durable state -----------------------------------------------------------------------------------------

    def rebuild(self, connection: sa.Connection) -> None:
        """Restore memory from the store.

        Raises
        ------
        StoreError
            When the store holds visits of a user that the run does not know.
        """
        self._builder = BlockBuilder(keep_all=self._settings.pairs_unseen)
        self._unseen = UnseenItems(self._settings, self._plan.seed, self._owner.slot)
        self._visitors, self.visits = {}, 0
        for row in store.load_visits(connection, self._owner.id):
            slot = self._owner.slot_of(row.user)
            if slot is None:
                raise StoreError(
                    f"the store of owner {self._owner.name} holds visits of a user who is not in this run",
                    hint="give each run a state folder of its own",
                )
            one = self._visitors.setdefault(slot, _Visitor())
            self._take_records(slot, one, row.records, row.length, row.complete)
            one.visit, one.reply = row.visit, row.reply
            one.epoch, one.done = row.epoch, len(one.blocks)
            self.visits += 1
        packed = store.load_held(connection, self._owner.id)
        n_items = len(self.model.items)
        self._held = HeldRows(n_items, self._plan.dim)
        if packed is not None:
            self._put(_unpacked(packed))
        for row in store.load_gradients(connection, self._owner.id):
            items = np.frombuffer(row.items, "<i4")
            self._held.grow(int(items.max()) + 1)
            gradient = np.frombuffer(row.gradient, "<f4").reshape(len(items), -1)
            self._held.add(row.slot, items, gradient, self._unseen.recorded(row.slot, items))
        self._window = store.load_window(connection, self._owner.id)
        self._offered = _unpacked(self._window.rows) if self._window.offered else None

    def _put(self, released: Released) -> None:
        if len(released.items):
            self._held.grow(int(released.items[-1]) + 1)
        self._held.put_back(released)

    def _take_records(self, slot: int, one: _Visitor, records: bytes, length: int, complete: bool) -> None:
        if length:
            items, positive = decode_records(records, length)
            self._unseen.see(slot, items.tolist())
            one.blocks += self._builder.extend(slot, items, positive)
            one.durable += length
        if complete:
            one.blocks += self._builder.close(slot)

    def durable(self, slot: int) -> int:
        """Return how many records of a user are durable."""
        one = self._visitors.get(slot)
        return 0 if one is None else one.durable

    @property
    def held(self) -> int:
        """Number of gradient rows that are held back."""
        return len(self._held)

    # --- visits ------------------------------------------------------------------------------------------------

    async def room(self) -> None:
        """Wait until another visit is allowed: their number between two windows is limited, to keep the model fresh."""
        while self._since >= self._settings.window:
            self._room.clear()
            await self._room.wait()

    async def take(self, arrivals: Sequence[Arrival]) -> list[Answer]:
        """Take and store visits, and return an answer to each; all of them train on the same version of the model.

        Raises
        ------
        StoreError
            When the store cannot be written; then no visit of this call is kept.
        """
        async with self._owner.intake:
            taken: list[store.Taken] = []
            try:
                answers = await asyncio.to_thread(self._take, arrivals, taken)
                if taken:
                    await self._writer.run(
                        lambda connection: store.add_visits(connection, self._owner.id, taken)
                    )
            except BaseException:
                # Memory is ahead of the store: rebuild it.
                await self._writer.run_when_possible(self.rebuild)
                raise
            self._since += len(taken)
            self.visits += len(taken)
        if taken:
            self.changed.set()
        return answers

    def _take(self, arrivals: Sequence[Arrival], taken: list[store.Taken]) -> list[Answer]:
        with self._accounting.activity("gradients", len(arrivals)):
            return [self._one(arrival, taken) for arrival in arrivals]

    def _one(self, arrival: Arrival, taken: list[store.Taken]) -> Answer:
        one = self._visitors.setdefault(arrival.slot, _Visitor())
        said = arrival.visit
        if said.number == one.visit:
            return Answer(one.reply, duplicate=True)
        fits = (
            not arrival.length
            or SequenceGate(one.durable).judge(arrival.first, arrival.first + arrival.length - 1)
            is Decision.ACCEPT
        )
        if said.number != one.visit + 1 or not fits:
            return Answer(expected=one.visit + 1)
        before = len(one.blocks)
        self._take_records(arrival.slot, one, arrival.records, arrival.length, said.complete)
        # Each block runs once in an epoch; a visit for an epoch that is over runs its new blocks only.
        done = one.done if said.epoch == one.epoch else (0 if said.epoch > one.epoch else before)
        blocks = [self._unseen.draw(block, self._pool(), said.epoch) for block in one.blocks[done:]]
        made = visit(blocks, said.row, self.model.items, self._settings)
        if len(made.items):
            self._held.grow(len(self.model.items))
            self._held.add(arrival.slot, made.items, made.gradient, made.recorded)
        reply = Reply(said.number, made.blocks, len(one.blocks), made.loss, made.step).to_bytes()
        one.visit, one.reply = said.number, reply
        one.epoch, one.done = max(said.epoch, one.epoch), len(one.blocks)
        taken.append(
            store.Taken(
                arrival.user,
                arrival.slot,
                said.number,
                one.epoch,
                said.complete,
                arrival.length,
                arrival.records,
                reply,
                made.items.astype("<i4").tobytes(),
                made.gradient.astype("<f4").tobytes(),
            )
        )
        return Answer(reply)

    def _pool(self) -> NDArray[np.integer]:
        """Return the items from which unseen ones are drawn."""
        if self._settings.unseen == "all":
            return np.arange(len(self.model.items))
        return self._owner.held_items

    # --- what the COS says -------------------------------------------------------------------------------------

    async def told(self, model: ItemRows, closed: int, summed: int) -> None:
        """Take a newer model and the outcome of the last window.

        Parameters
        ----------
        model : ItemRows
        closed, summed : int
            Numbers of the last window that is over, and of the last window whose sum has this owner's vector.
        """
        async with self._owner.intake:
            offered = self._window.offered
            if offered and (summed >= offered or closed >= offered):
                await self._settle(applied=summed >= offered)
            if (model.version, len(model.items)) > (self.model.version, len(self.model.items)):
                self.model = model
            if closed > self._closed:
                self._closed, self._since = closed, 0
                self._room.set()
        self.changed.set()

    async def _settle(self, *, applied: bool) -> None:
        """Drop the rows offered to a window if it was applied or about to be revealed; else hold them back again.

        A sum that this owner helped to reveal may be known although the COS says that it was abandoned.  With the same
        rows in another window, over other owners, the COS could tell rows of one owner from the difference.
        """
        if not applied and self._revealed(self._window):
            _log.warning(
                "rows of an abandoned window are lost", owner=self._owner.name, round=self._window.offered
            )
            applied = True
        if self._offered is not None and not applied:
            _log.info("a window was abandoned", owner=self._owner.name, rows=len(self._offered.items))
            self._put(self._offered)
        self._offered = None
        window = self._window._replace(offered=0, rows=b"")
        rows = None if applied else self._packed()

        def write(connection: sa.Connection) -> None:
            store.save_window(connection, self._owner.id, window)
            if rows is not None:
                store.save_held(connection, self._owner.id, rows)

        await self._writer.run_when_possible(write)
        self._window = window

    @staticmethod
    def _revealed(window: store.WindowRow) -> bool:
        """Return whether this owner helped to reveal the window that has its rows; a window's number is its part."""
        last = Ledger.from_text(window.ledger).last(ShieldedPurpose.WINDOW.value)
        return last is not None and last.part == window.offered

    def stop(self) -> None:
        """Release callers that wait in `room`: the run has ended."""
        self._settings = self._settings.model_copy(update={"window": 2**62})
        self._room.set()
        _log.info("rows that no window had", owner=self._owner.name, rows=len(self._held))

    def _packed(self, without: Set[int] = frozenset()) -> bytes:
        items = sorted(self._held.contributors.keys() - without)
        contributors = tuple(frozenset(self._held.contributors[item]) for item in items)
        index = np.array(items, np.int32)
        return _pack(Released(index, self._held.gradient[index], contributors))

    # --- windows -----------------------------------------------------------------------------------------------

    def journal(self) -> Journal:
        """Return the journal as it stands on disk."""
        kept = self._window
        if self.sits_out:
            return Journal(_NEVER)
        return Journal(kept.joined, kept.contribution, Ledger.from_text(kept.ledger))

    def undisturbed(self) -> asyncio.Lock:
        """Return the lock under which visits, news and journals of windows change the owner's state."""
        return self._owner.intake

    def _layout(self) -> Layout:
        return self._settings.window_layout(len(self.model.items))

    async def check(self, plan: SumPlan) -> None:
        """Check the plan of a window.

        Raises
        ------
        Declined
            When the plan is not a window of this run over the model that this owner holds.
        """
        if plan.purpose != ShieldedPurpose.WINDOW.value:
            raise Declined(f"a sum for {plan.purpose!r}; owners join windows only")
        if plan.part != plan.round:
            raise Declined(f"a window with number {plan.part} in round {plan.round}; they are the same")
        if plan.secure_sum == "masked" and min(plan.min_sum, len(plan.members)) < MIN_MASKED:
            raise Declined(
                f"a masked window over {len(plan.members)} owners with a floor of {plan.min_sum}; expected at least "
                f"{MIN_MASKED} of both"
            )
        if any(one.users != 1 for one in plan.members):
            raise Declined("a member of a window stands for several owners")
        if self.model.sha256 != plan.model_sha256:
            # Another owner's items may have been added without a new version.
            await self._refresh()
        if layout_hash(self._layout()) != plan.layout_sha256:
            raise Declined("the layout of the window is not the one that this owner computes")
        if self.model.sha256 != plan.model_sha256:
            raise Declined("the window is over another model than this owner holds")

    def contribution(self, plan: SumPlan) -> tuple[NDArray[np.uint32], Released]:
        """Return the codes of the rows with enough contributors, and the rows; called within `undisturbed`.

        The rows are held until `stored` takes them as offered.

        Raises
        ------
        Declined
            When the outcome of the last window is not known.
        """
        if self._window.offered:
            raise Declined("it is not known yet what became of the last window")
        released = self._held.ready(self._settings.k_min)
        contribution = Contribution(self._layout())
        key = np.random.SeedSequence(self._plan.seed, spawn_key=(_ROUNDING, self._owner.slot, plan.round))
        contribution.add("gradient", released.gradient, np.random.default_rng(key), rows=released.items)
        contribution.count()
        if contribution.clipped:
            _log.warning(
                "values beyond the bound of a window", owner=self._owner.name, values=contribution.clipped
            )
        return contribution.codes(), released

    def write_of(self, journal: Journal, released: Released | None) -> Callable[[sa.Connection], None]:
        """Return the write that stores a journal and, with a new contribution, the rows offered to its window.

        Called within `undisturbed`, as is `stored` once the write is durable.
        """
        window = self._with(journal, released)
        rows = None if released is None else self._packed(without=set(released.items.tolist()))

        def write(connection: sa.Connection) -> None:
            store.save_window(connection, self._owner.id, window)
            if rows is not None:
                store.save_held(connection, self._owner.id, rows)

        return write

    def stored(self, journal: Journal, released: Released | None) -> None:
        """Take a journal as stored; rows that it offers to its window are not held any longer."""
        self._window = self._with(journal, released)
        if released is not None:
            self._held.drop(released)
            self._offered = released

    def _with(self, journal: Journal, released: Released | None) -> store.WindowRow:
        window = self._window._replace(
            joined=journal.joined,
            contribution=journal.contribution,
            ledger=journal.ledger.to_text(),
        )
        return window if released is None else window._replace(offered=journal.joined, rows=_pack(released))


def _pack(rows: Released) -> bytes:
    users = [sorted(one) for one in rows.contributors]
    return pack_arrays(
        {
            "items": rows.items.astype(np.int32),
            "gradient": np.ascontiguousarray(rows.gradient, np.float32),
            "counts": np.array([len(one) for one in users], np.int32),
            "users": np.array([user for one in users for user in one], np.int32),
        }
    )


def _unpacked(packed: bytes) -> Released:
    arrays = unpack_arrays(packed)
    ends = np.cumsum(arrays["counts"])
    users = np.split(arrays["users"], ends[:-1]) if len(ends) else []
    return Released(
        arrays["items"].astype(np.int32),
        arrays["gradient"].astype(np.float32),
        tuple(frozenset(one.tolist()) for one in users),
    )
