"""Keep the model of DRIFT's published form: factors in memory, a durable log of updates, occasional snapshots.

An update is acknowledged when its log entry is durable.  After a restart the factors are restored exactly from the last
snapshot and the log after it.  Each owner's progress is written in the same transaction as its update, so that no
update is applied twice and no acknowledged one is lost.

Snapshots and versions that are evaluated are files; or rows of the database, where a standby must find them.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
import structlog
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from coterie.errors import StoreError
from coterie.store import cos as store
from coterie.store.engine import Term, file_failure
from coterie.store.versions import VersionRows
from coterie.systems.drift.mathematics import initial_item_rows, initial_user_rows
from coterie.systems.drift.settings import DriftSettings
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.tensor import from_wire, increasing_ids
from coterie.wire.v1.orchestrator_pb2 import Gradient, RunPlan

__all__ = ["Decoded", "Frozen", "PublishedModel", "kept_files"]

_log = structlog.get_logger("coterie.cos")

_KEPT_SNAPSHOTS = 3
_FILE = re.compile(r"(model|evaluated)-(\d+)\.safetensors")
_NO_USER = ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT
_NO_ITEM = ErrorReason.ERROR_REASON_UNKNOWN_ITEM


class Decoded(NamedTuple):
    """A gradient's arrays: ids, uint32 (m,) and (n,), and gradients, float32 (m, d) and (n, d)."""

    users: npt.NDArray[np.uint32]
    items: npt.NDArray[np.uint32]
    user_gradient: npt.NDArray[np.float32]
    item_gradient: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Frozen:
    """A version kept for evaluation: item factors (I, d) and user factors (U, d), float32."""

    version: int
    items: npt.NDArray[np.float32]
    users: npt.NDArray[np.float32]


@dataclass
class Staleness:
    """Age of the rows on which gradients were computed, in versions: a count by age, and the number refused."""

    applied: Counter[int] = field(default_factory=Counter)
    refused: int = 0


class PublishedModel:
    """Item factors Psi and user factors Upsilon of one run; used by `AsynchronousRun`.

    Parameters
    ----------
    plan : RunPlan
        The run's plan.
    folder : Path
        Folder of the snapshots.
    term : Term
        Writes of the present term.
    snapshot_every : int
        Updates between two snapshots.
    rows : VersionRows, optional
        Where snapshots and evaluated versions are kept in place of the folder: a snapshot under its version, an
        evaluated one under a negative number.
    """

    def __init__(
        self, plan: RunPlan, folder: Path, term: Term, snapshot_every: int, rows: VersionRows | None = None
    ) -> None:
        self._plan = plan
        self._settings = DriftSettings.from_plan(plan)
        self._rate = np.float32(plan.rate)
        self._folder = folder
        self._term = term
        self._every = snapshot_every
        self._snapshot = 0
        # Version of the last snapshot that was begun, so that one that failed is not tried again at once.
        self._tried = 0
        self._snapshotting: asyncio.Task[None] | None = None
        self.version = self.durable_version = 0
        self.items: npt.NDArray[np.float32] = np.zeros((0, plan.dim), np.float32)
        self.users: npt.NDArray[np.float32] = np.zeros((0, plan.dim), np.float32)
        self.progress: dict[int, store.Progress] = {}
        self.staleness = Staleness()
        self.blocks = 0
        self.interactions = 0
        self.loss_sum = 0.0
        self.loss_blocks = 0
        self._frozen: dict[int, Frozen] = {}
        self._rows = rows
        # Versions whose evaluation begins with the next write of the state.
        self._to_keep: list[Frozen] = []
        folder.mkdir(parents=True, exist_ok=True)

    def grow(self, n_users: int, n_items: int) -> None:
        """Add rows for more slots or items, drawn by the plan's seed; existing rows stay."""
        if n_users > len(self.users):
            fresh = initial_user_rows(n_users, self._settings, self._plan.seed)
            fresh[: len(self.users)] = self.users
            self.users = fresh
        if n_items > len(self.items):
            fresh = initial_item_rows(n_items, self._settings, self._plan.seed)
            fresh[: len(self.items)] = self.items
            self.items = fresh

    def restore(self, connection: sa.Connection, snapshot: int, n_users: int, n_items: int) -> None:
        """Restore the model from the last snapshot and the log after it."""
        self._snapshot = self._tried = snapshot
        if snapshot:
            arrays = None if self._rows is None else self._rows.load(snapshot)
            if arrays is None:
                arrays = load_file(self._path(snapshot))
            # Rows are read into memory that cannot be written.
            self.items, self.users = arrays["items"].copy(), arrays["users"].copy()
            self.version = snapshot
        self.grow(n_users, n_items)
        self.progress = store.load_progress(connection, self._plan.run_id)
        for update in store.load_updates(connection, self._plan.run_id, snapshot):
            self._add(self._decode(Gradient.FromString(update.gradient)))
            self.version = update.version
        self.durable_version = self.version

    def check(self, owner: int, gradients: Sequence[Gradient]) -> list[Decoded]:
        """Decode the gradients of an exchange, at least one, and check that all of them may be applied now.

        Raises
        ------
        Refusal
            More gradients than the plan allows, wrong shapes or ids, values that are not finite, a step in a fixed
            coordinate, rows that are too old or not the same for all, or blocks that do not continue the owner's
            progress and each other.
        """
        if len(gradients) > self._settings.local_updates:
            raise Refusal(
                ErrorReason.ERROR_REASON_TOO_LARGE,
                f"{len(gradients)} gradients in an exchange",
                field="further",
                expected=f"at most {self._settings.local_updates} with the first, the plan's local_updates",
            )
        first = gradients[0]
        at = self.progress.get(owner, store.Progress())
        blocks = at.blocks if first.epoch == at.epoch else 0
        found = []
        for number, gradient in enumerate(gradients):
            name = f"further[{number - 1}]" if number else "gradient"
            found.append(self._checked(gradient, name))
            if (gradient.epoch, gradient.rows_version) != (first.epoch, first.rows_version):
                raise Refusal(
                    ErrorReason.ERROR_REASON_INVALID_FIELD,
                    f"{name} is of epoch {gradient.epoch}, on rows of version {gradient.rows_version}",
                    field=f"{name}.rows_version",
                    expected=f"epoch {first.epoch} and version {first.rows_version}, as the exchange's first gradient",
                )
            if gradient.epoch < at.epoch or gradient.first_block != blocks or not gradient.blocks:
                raise Refusal(
                    ErrorReason.ERROR_REASON_SEQUENCE_MISMATCH,
                    f"{name} covers {gradient.blocks} blocks from {gradient.first_block} of epoch {gradient.epoch}",
                    field=f"{name}.first_block",
                    expected=(
                        f"blocks from {blocks} of epoch {first.epoch}, after the gradient before"
                        if number
                        else f"blocks from {at.blocks} of epoch {at.epoch}, or the start of a later epoch"
                    ),
                )
            blocks += gradient.blocks
        # Those of the exchange itself do not make its rows older: the owner has them in its rows.
        age = self.version - first.rows_version
        # A negative age means that the rows held another owner's update that was not durable when this process was
        # killed.  Such a version does not exist after the restart, so the gradient is refused as stale and computed
        # again.
        if not 0 <= age <= self._plan.max_staleness:
            self.staleness.refused += len(gradients)
            raise Refusal(
                ErrorReason.ERROR_REASON_STALE,
                f"the gradient was computed on rows {age} versions old",
                field="gradient.rows_version",
                expected=f"at most {self._plan.max_staleness} versions; fetch the rows again",
            )
        return found

    def _checked(self, gradient: Gradient, name: str) -> Decoded:
        """Decode a gradient and check its values; ``name`` is its field in the exchange."""
        decoded = self._decode(gradient, name)
        if not np.isfinite(gradient.loss):
            raise Refusal(
                ErrorReason.ERROR_REASON_NOT_FINITE,
                f"the loss of {name} is not a number",
                field=f"{name}.loss",
                expected="a finite loss",
            )
        if self._plan.item_bias and decoded.user_gradient[:, -1].any():
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                f"{name} moves the last coordinate of a user",
                field=f"{name}.user_gradient",
                expected="zeros there: with an item bias it is fixed to 1",
            )
        return decoded

    def apply(
        self,
        owner: int,
        gradients: Sequence[Gradient],
        decoded: Sequence[Decoded],
        packed: Sequence[bytes],
        at: store.Progress,
    ) -> list[store.OwnerUpdate]:
        """Apply checked gradients, serialised as ``packed``, in memory; return what `keep` makes durable together.

        Each is a version of its own, in the log as well.
        """
        self.staleness.applied[self.version - gradients[0].rows_version] += len(gradients)
        made = []
        for gradient, one, logged in zip(gradients, decoded, packed, strict=True):
            self._add(one)
            self.version += 1
            self.blocks += gradient.blocks
            self.interactions += gradient.interactions
            self.loss_sum += gradient.loss
            self.loss_blocks += gradient.blocks
            made.append(store.OwnerUpdate(owner, store.LoggedUpdate(self.version, logged), at))
        self.progress[owner] = at
        return made

    async def keep(self, made: Sequence[store.OwnerUpdate]) -> None:
        """Return when applied updates, and all those that were handed in before them, are durable.

        Called at once after `apply`, and without any for a repeated update, which may come before the first is durable.
        """
        run_id, version = self._plan.run_id, self.version
        await self._term.run(lambda connection: store.log_updates(connection, run_id, made))
        self.durable_version = max(self.durable_version, version)
        if self.version - self._tried >= self._every and self._snapshotting is None:
            self._snapshotting = asyncio.create_task(self.snapshot())

    def take_loss(self) -> float:
        """Return the mean block loss since the last call, and reset it; NaN when there was no block."""
        mean = self.loss_sum / self.loss_blocks if self.loss_blocks else float("nan")
        self.loss_sum, self.loss_blocks = 0.0, 0
        return mean

    async def drop(self) -> None:
        """Wait until no snapshot is being written."""
        if self._snapshotting is not None:
            if self._rows is not None:
                # A store of objects may hang.  What is written of it is fenced, or nothing names it.
                self._snapshotting.cancel()
            await asyncio.gather(self._snapshotting, return_exceptions=True)

    def freeze(self) -> Frozen:
        """Keep the present version for evaluation, durably, or in memory until `keep_frozen` is called.

        Raises
        ------
        StoreError
            When the version cannot be written.
        """
        frozen = Frozen(self.version, self.items.copy(), self.users.copy())
        if self._rows is not None:
            self._to_keep.append(frozen)
            self._frozen[frozen.version] = frozen
            return frozen
        with self._term.keeping("write a version of the model", self.items.nbytes + self.users.nbytes):
            self._save(frozen, f"evaluated-{frozen.version}.safetensors")
        self._frozen[frozen.version] = frozen
        return frozen

    def frozen_since(self) -> Sequence[Frozen]:
        """Return the versions that were frozen and are to be written with the state that opens their evaluation."""
        found, self._to_keep = self._to_keep, []
        return found

    def keep_frozen(self, connection: sa.Connection, found: Sequence[Frozen], evaluated: set[int]) -> None:
        """Write versions to rows, and delete those of others than ``evaluated``, whose evaluation is open."""
        rows = self._rows
        if rows is None or not found:
            return
        for frozen in found:
            rows.write(connection, _arrays(frozen), frozen.version, _evaluated(frozen.version))
        stay = {_evaluated(version) for version in evaluated | {frozen.version for frozen in found}}
        rows.keep_only(connection, lambda held: [made for made in held if made > 0 or made in stay])

    async def read_frozen(self, version: int) -> None:
        """Read a version that was kept for evaluation into memory, beside the event loop.

        Raises
        ------
        StoreError
            The database is away.
        """
        if self._rows is None or version in self._frozen:
            return
        arrays = await asyncio.to_thread(self._rows.load, _evaluated(version))
        if arrays is not None:
            self._frozen[version] = Frozen(version, arrays["items"], arrays["users"])

    def frozen(self, version: int) -> Frozen:
        """Return a version that was kept for evaluation.

        Raises
        ------
        Refusal
            UNKNOWN_ROUND when the version is not kept.
        """
        held = self._frozen.get(version)
        if held is None:
            path = self._folder / f"evaluated-{version}.safetensors"
            if not path.is_file():
                raise Refusal(
                    ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
                    f"version {version} is not kept",
                    field="version",
                    expected="0 for the newest, or the version of an open evaluation",
                )
            arrays = load_file(path)
            held = self._frozen[version] = Frozen(version, arrays["items"], arrays["users"])
        return held

    def thaw(self, keep: set[int]) -> None:
        """Drop evaluated versions from memory, but those in ``keep``, whose evaluation is open."""
        for version in self._frozen.keys() - keep:
            del self._frozen[version]

    async def snapshot(self) -> None:
        """Write the present version to disk and cut the log."""
        taken = Frozen(self.version, self.items.copy(), self.users.copy())
        self._tried = taken.version
        try:
            if self._rows is not None:
                await self._snapshot_in(self._rows, taken)
                return
            await asyncio.to_thread(self._save, taken, self._path(taken.version).name)
            run_id = self._plan.run_id
            await self._term.run(lambda connection: store.snapshot_taken(connection, run_id, taken.version))
            self._snapshot = taken.version
            found = sorted(self._folder.glob("model-*.safetensors"))
            # Later ones are of a log that was set back since.
            until = found.index(self._path(taken.version)) + 1
            for path in [*found[: max(until - _KEPT_SNAPSHOTS, 0)], *found[until:]]:
                path.unlink(missing_ok=True)
        except (StoreError, SafetensorError, OSError) as error:
            # No update is lost: the log still has those that the snapshot would cover.
            told = error if isinstance(error, StoreError) else file_failure("take one", error)
            _log.warning("no snapshot", run=self._plan.run_id, error=told.message)
        finally:
            self._snapshotting = None

    async def _snapshot_in(self, rows: VersionRows, taken: Frozen) -> None:
        """Write a snapshot to the database, or to a store of objects, and cut the log in the same transaction."""
        run_id, version, objects = self._plan.run_id, taken.version, rows.objects
        stored = None if objects is None else await objects.put(run_id, _arrays(taken), version, version)

        def write(connection: sa.Connection) -> list[str]:
            gone = []
            if stored is None:
                rows.write(connection, _arrays(taken), version, version)
            else:
                gone = rows.write_object(connection, stored, version, version)
            store.snapshot_taken(connection, run_id, version)
            return gone + rows.keep_only(connection, _kept_rows)

        gone = await self._term.run(write)
        self._snapshot = version
        if objects is not None:
            objects.remove(gone)

    def _path(self, version: int) -> Path:
        return self._folder / f"model-{version:012d}.safetensors"

    def _save(self, frozen: Frozen, name: str) -> None:
        # Write beside, sync and rename, so that a reader finds the whole file or none.
        beside = self._folder / f".{name}.part"
        try:
            save_file({"items": frozen.items, "users": frozen.users}, beside)
            with beside.open("rb") as written:
                os.fsync(written.fileno())
            beside.replace(self._folder / name)
        except BaseException:
            # On a full disk, a partial file would take the space that is left.
            beside.unlink(missing_ok=True)
            raise
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _decode(self, gradient: Gradient, name: str = "gradient") -> Decoded:
        dim = self._plan.dim
        users = increasing_ids(gradient.users, len(self.users), field=f"{name}.users", unknown=_NO_USER)
        items = increasing_ids(gradient.items, len(self.items), field=f"{name}.items", unknown=_NO_ITEM)
        return Decoded(
            users,
            items,
            from_wire(gradient.user_gradient, np.float32, (len(users), dim), field=f"{name}.user_gradient"),
            from_wire(gradient.item_gradient, np.float32, (len(items), dim), field=f"{name}.item_gradient"),
        )

    def _add(self, decoded: Decoded) -> None:
        # `take` copies rows in a third of the time of an index.
        self.users[decoded.users] = self.users.take(decoded.users, 0) - self._rate * decoded.user_gradient
        self.items[decoded.items] = self.items.take(decoded.items, 0) - self._rate * decoded.item_gradient


def _arrays(frozen: Frozen) -> dict[str, npt.NDArray[np.float32]]:
    return {"items": frozen.items, "users": frozen.users}


def _evaluated(version: int) -> int:
    """Return the number under which rows have a version that is evaluated; snapshots have their version."""
    return -1 - version


def _kept_rows(held: list[int]) -> list[int]:
    """Return the last snapshots, and all versions that are evaluated."""
    snapshots = [made for made in held if made > 0]
    return [*snapshots[-_KEPT_SNAPSHOTS:], *(made for made in held if made < 0)]


def kept_files(folder: Path) -> list[tuple[Path, int, int]]:
    """Return the files of a run's snapshots and evaluated versions, with the version and the number of their rows."""
    found = []
    for path in sorted(folder.iterdir()):
        if name := _FILE.fullmatch(path.name):
            version = int(name[2])
            found.append((path, version, version if name[1] == "model" else _evaluated(version)))
    return found
