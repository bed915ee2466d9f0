"""Answer the COS's requests for item factors in a round, computed from each owner's item features."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray
from safetensors import SafetensorError

from coterie.crypto import restored
from coterie.data.attributes import AttributeTable, in_order, read_attributes
from coterie.errors import DataError, PeerError, StoreError
from coterie.parties.party import Party
from coterie.rounds.conductor import model_from_bytes
from coterie.rounds.plan_hash import plan_hash
from coterie.rounds.sides import Arrays, OwnerSide
from coterie.store.array_file import load_arrays, save_arrays
from coterie.store.engine import Keeping, file_failure
from coterie.systems.registry import owner_side
from coterie.telemetry.accounting import Accounting
from coterie.wire.refusal import Refusal
from coterie.wire.tensor import to_wire
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie_data_owner.owner import Owner

__all__ = ["ItemFactors", "read_features"]

_log = structlog.get_logger("coterie.items")

_NOTHING: Arrays = {
    "items": np.empty(0, np.uint32),
    "pull": np.empty((0, 0), np.float32),
    "new_items": np.empty(0, np.uint32),
    "rows": np.empty((0, 0), np.float32),
}
"""Answer of an owner without features: empty, so that no round waits for it."""


def read_features(path: Path, items: Sequence[str]) -> AttributeTable:
    """Read an owner's item features from CSV: a column ``item``, then one column for each feature.

    Returns
    -------
    AttributeTable
        A row for each of the owner's items; all values of an item that the file does not name are missing.

    Raises
    ------
    DataError
        As `coterie.data.attributes.read_attributes`, or the file names none of the items.
    """
    rows, table = read_attributes(path, "item")
    if not rows.keys() & set(items):
        raise DataError(f"{path} names none of the owner's {len(items)} items")
    return in_order(items, rows, table)


class _Kept:
    """The private arrays of one owner's side, in a file.

    The COS may ask about one version twice, after a restart or when a round was abandoned.  The file therefore holds
    the arrays from before and from after the last version, and the side computes a repeated version from those before.
    """

    def __init__(self, path: Path, mark: str) -> None:
        self._path = path
        self._mark = mark

    def before(self, version: int) -> Arrays | None:
        """Return the side's arrays from before a version; None where the file holds none of this run."""
        try:
            arrays, about = load_arrays(self._path)
        except OSError:
            return None
        except StoreError as error:
            _log.error("an owner's arrays are damaged and begin anew", because=error.message, hint=error.hint)
            return None
        if about.get("plan") != self._mark:
            return None
        part = "before." if about.get("version") == str(version) else "after."
        return {name.removeprefix(part): value for name, value in arrays.items() if name.startswith(part)}

    @property
    def version(self) -> int | None:
        """Last version of the model that the file knows; None where it holds none of this run."""
        try:
            about = load_arrays(self._path)[1]
            return int(about["version"]) if about.get("plan") == self._mark else None
        except (OSError, StoreError, KeyError, ValueError):
            return None

    def save(self, version: int, before: Arrays, after: Arrays) -> None:
        """Write the side's arrays from before and after a version; the file is replaced as a whole."""
        beside = self._path.with_name(f".{self._path.name}.part")
        arrays = {f"before.{name}": value for name, value in before.items()}
        arrays |= {f"after.{name}": value for name, value in after.items()}
        try:
            save_arrays(arrays, beside, {"version": str(version), "plan": self._mark})
            beside.replace(self._path)
        except (OSError, SafetensorError) as error:
            # On a full volume a partial file would take the space that is left.
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            failed = file_failure("write item factors", error)
            raise failed from failed.__cause__


class ItemFactors:
    """Answers tasks for item factors on behalf of all owners of this process (rounds-based systems).

    Parameters
    ----------
    owners : sequence of Owner
        Registered.
    features : sequence of (AttributeTable or None)
        Each owner's item features, in the order of ``Owner.items``; None for an owner that has none.
    party : Party
        To the COS.
    state : Path
        Folder of the process.
    accounting : Accounting
    keeping : callable
        Writes files beside the process's store; on a full volume it waits for room.
    """

    def __init__(
        self,
        owners: Sequence[Owner],
        features: Sequence[AttributeTable | None],
        party: Party,
        state: Path,
        accounting: Accounting,
        keeping: Keeping,
    ) -> None:
        self._party = party
        self._accounting = accounting
        self._keeping = keeping
        self._state = state
        self._mark = plan_hash(party.plan).hex()
        self._features = {
            owner.slot: (owner, table)
            for owner, table in zip(owners, features, strict=True)
            if table is not None
        }
        self._sides: dict[int, tuple[OwnerSide, _Kept]] = {}
        self._task: wire.Task | None = None
        self._asked_at = 0.0
        self._news = asyncio.Event()
        self._sent: dict[tuple[int, int], float] = {}
        self._model: tuple[bytes, dict[str, NDArray[np.float32]]] | None = None

    def told(self, tasks: Sequence[wire.Task]) -> None:
        """Take note of the open tasks."""
        for task in tasks:
            if task.kind == wire.TaskKind.TASK_KIND_ITEM_FACTORS:
                self._task, self._asked_at = task, self._party.asked_at
                self._news.set()

    async def run(self) -> None:
        """Answer tasks until cancelled; a newer task replaces an older one."""
        while True:
            await self._news.wait()
            self._news.clear()
            task, asked_at = self._task, self._asked_at
            if task is None:
                continue
            try:
                await self._answer(task, asked_at)
            except PeerError as error:
                # The COS repeats the task for as long as the round waits for the answer.
                _log.info("items are not told of", round=task.round.round, error=error.message)

    async def _answer(self, task: wire.Task, asked_at: float) -> None:
        number = task.round.round
        slots = [slot for part in task.slots for slot in range(part.first, part.first + part.count)]
        # A task that left the COS before it took an answer names that slot again: skip it.
        slots = [slot for slot in slots if self._sent.get((number, slot), -1.0) < asked_at]
        if not slots:
            return
        model = None
        if any(slot in self._features for slot in slots):
            if not self._sides:
                await self._begin()
            model = await self._fetch(task.version)
        for slot in slots:
            found = _NOTHING
            if model is not None and slot in self._sides:
                found, save = await asyncio.to_thread(self._computed, slot, task.version, model)
                await self._keeping("write item factors", save)
            message = wire.ItemFactors(
                version=task.version, **{name: to_wire(value) for name, value in found.items()}
            )
            try:
                await self._party.submit(
                    wire.SubmitKind.SUBMIT_KIND_ITEM_FACTORS, task.round, message, slots=[slot]
                )
            except Refusal as refusal:
                _log.info("items are not told of", round=number, reason=str(refusal))
                return
            self._sent = {**self._of_round(number), (number, slot): time.monotonic()}

    async def _begin(self) -> None:
        """Fetch the items' indices and make the owners' sides; indices are fixed once the COS asks for item factors."""
        plan = self._party.plan
        _, payload = await self._party.fetch(wire.FetchKind.FETCH_KIND_CATALOGUE)
        index = {key: n for n, key in enumerate(wire.Catalogue.FromString(payload or b"").items)}
        for slot, (owner, table) in self._features.items():
            items = np.array([index[key] for key in owner.items], np.int64)
            side = owner_side(plan.system, plan.settings, items, table, plan.seed)
            kept = _Kept(self._state / f"item-factors-{owner.name}.safetensors", self._mark)
            if restored.sits_out(self._state, plan.run_id):
                _log.warning(
                    "an owner's item factors are those of a backup: later ones are lost",
                    owner=owner.name,
                    version=kept.version,
                )
            self._sides[slot] = side, kept

    def _of_round(self, number: int) -> dict[tuple[int, int], float]:
        return {key: at for key, at in self._sent.items() if key[0] == number}

    def _computed(
        self, slot: int, version: int, model: dict[str, NDArray[np.float32]]
    ) -> tuple[Arrays, Callable[[], None]]:
        """Return an owner's answer about a version, and the function that keeps its private arrays."""
        side, kept = self._sides[slot]
        with self._accounting.activity("item factors"):
            before = kept.before(version)
            if before is not None:
                side.private = before
            before = side.private
            found = side.answer(model)
        return found, partial(kept.save, version, before, side.private)

    async def _fetch(self, version: int) -> dict[str, NDArray[np.float32]] | None:
        """Fetch the model version that a round trains; raise PeerError when the COS sends another one."""
        held = self._model
        found, payload = await self._party.fetch(
            wire.FetchKind.FETCH_KIND_MODEL, version=version, held_sha256=held[0] if held else b""
        )
        if payload is not None:
            held = self._model = hashlib.sha256(payload).digest(), model_from_bytes(payload)
        if held is None or found != version:
            raise PeerError(f"the COS sent version {found} in place of {version}")
        return held[1]
