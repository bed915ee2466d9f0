"""Provide a host's members with what a local step needs: the system's host side, the model, the open items."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import structlog
from numpy.typing import NDArray

from coterie.crypto.explicit import encode
from coterie.crypto.keyfile import read_private_file, write_private_file
from coterie.data.attributes import in_order
from coterie.errors import CertificateError, ConfigError, PeerError, RunError, StoreError
from coterie.parties.kept_latents import KeptLatents
from coterie.parties.stored_host import user_keys
from coterie.parties.sum_tasks import StaleError
from coterie.rounds.conductor import aggregation_of, model_from_bytes
from coterie.rounds.inputs import CATALOGUE, OPEN_ITEMS
from coterie.rounds.plan_hash import keys_hash, plan_hash
from coterie.rounds.sides import Arrays, HostSide, combining
from coterie.secure_sum.aggregation import check_aggregation
from coterie.secure_sum.protocol import Declined
from coterie.store.user_records import RECORDS, RecordFile, no_records
from coterie.systems.private_sides import planned_host_side
from coterie.systems.shared.host_data import HostData, LargeHostData
from coterie.wire.tensor import from_wire
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import Tensor
from coterie_client.history import Catalogued
from coterie_client.host import Host, catalogued, read
from coterie_client.journals import Journals
from coterie_client.private import PrivateFiles

if TYPE_CHECKING:
    from coterie.parties.shared_model import SharedModels

__all__ = ["HighestVersion", "Learner", "Model"]

_log = structlog.get_logger("coterie.rounds")

_TRAINED = "trained.json"


@dataclass(frozen=True)
class Model:
    """A version of the model, as a host trains or recommends by it.

    Parameters
    ----------
    version : int
    sha256 : bytes
        Hash of its payload.
    arrays : dict of str to ndarray of float32
    opened : ndarray of bool, shape (groups, items), optional
        Items that each group may train, where the version itself carries them.
    made_in : int, optional
        Round that made a sealed version, as its seal authenticates it; 0 for the first version and in open runs.
    """

    version: int
    sha256: bytes
    arrays: dict[str, NDArray[np.float32]]
    opened: NDArray[np.bool_] | None = None
    made_in: int = 0


class HighestVersion:
    """The latest round of a run on whose sealed version a host trained, in a file.

    Parameters
    ----------
    path : Path
        Made by the first call of `raise_to` with a round above 0; what it says of another run counts no more.
    run : str

    Raises
    ------
    CertificateError
        When the file is damaged, or readable by others.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._path = path
        self._run = run
        self._round = 0
        if path.exists():
            try:
                content = json.loads(read_private_file(path))
                self._round = int(content["round"]) if content["run"] == run else 0
            except (ValueError, TypeError, KeyError):
                raise CertificateError(
                    f"{path} is damaged: it does not say which version of the model this host trained on last"
                ) from None

    def raise_to(self, made_in: int) -> None:
        """Take the version of a round, the same one again or a later one.

        Raises
        ------
        Declined
            When it is an earlier one.
        """
        if made_in < self._round:
            raise Declined(
                f"the server went back to the model that round {made_in} made; this host trained on that of round "
                f"{self._round} already"
            )
        if made_in > self._round:
            write_private_file(self._path, json.dumps({"run": self._run, "round": made_in}).encode())
            self._round = made_in


class Learner:
    """A host's side of a rounds-based system, with its model and private arrays; used by `Rounds` and `HostMembers`.

    Parameters
    ----------
    host : Host
        Registered.
    journals : Journals
        Journals of its members, as loaded at the start.
    """

    def __init__(self, host: Host, journals: Journals) -> None:
        self._host = host
        self._journals = journals
        self._plan = host.party.plan
        self._files = PrivateFiles(host.settings.state / "private", plan_hash(self._plan))
        self._private: Arrays | None = None
        self._side: HostSide | None = None
        self._built_from = (0, 0)
        self._building = asyncio.Lock()
        self._keeps_records = False
        self._model: Model | None = None
        self._newest: Model | None = None
        self._opened_sha256 = b""
        self._opened: NDArray[np.bool_] | None = None
        self._shared: SharedModels | None = None
        self._trained: HighestVersion | None = None
        if self._plan.secure_sum == "shared-key":
            if host.custody is None:
                raise ConfigError(
                    "the participants of this run share its key, and this host does not hold it",
                    hint="encryption.holds_key, and a place on the operator's roster",
                )
            from coterie.parties.shared_model import SharedModels

            self._shared = SharedModels(self._plan, host.custody.secrets)
            self._trained = HighestVersion(host.settings.state / _TRAINED, self._plan.run_id)
        self.catalogue: Catalogued | None = None
        """The catalogue at the time when the population was fixed."""
        self.items: list[str] = []
        self._items_sha256 = b""

    async def side(self) -> HostSide:
        """Return the host's side, rebuilt when users have recorded new interactions or changed their preferences."""
        async with self._building:
            now = len(self._host.histories), self._host.preferences.changes
            if self.catalogue is None:
                message = await self._host.fetch_catalogue()
                self.items = list(message.items)
                self._items_sha256 = await asyncio.to_thread(keys_hash, self.items)
                self.catalogue = catalogued(message, ())
            if self._side is None or self._built_from != now:
                self._built_from = now
                self._side = await self._host.writer.files_when_possible(
                    "make the files of this host's users", partial(self._build, self.catalogue)
                )
                await self._take_latents(self._side)
            return self._side

    async def _take_latents(self, side: HostSide) -> None:
        """Give a new side the pseudo meta-latents that the host has read: also after the run, which reads none."""
        combines = combining(side)
        if combines is None:
            return
        settings = self._host.settings
        try:
            kept = await asyncio.to_thread(KeptLatents(settings.state, settings.run).load)
        except CertificateError as error:
            _log.warning("no pseudo meta-latents", run=settings.run, reason=error.message)
            return
        if kept is not None:
            combines.take_latents(kept.latents)

    def _build(self, catalogue: Catalogued) -> HostSide:
        histories = self._host.histories
        names = histories.names
        told = self._host.told
        attributes = None if told is None else in_order(names, *told)
        preferred = self._host.preferences.table(self._plan.system, len(names))
        data = (
            LargeHostData(
                names, self.items, histories.blocks(catalogue), self._keep_records, attributes, preferred
            )
            if histories.in_blocks
            else HostData(names, self.items, *histories.interactions(catalogue), attributes, preferred)
        )
        keys = user_keys(self._host.settings.state, names, self._host.settings.seed)
        self._keeps_records = False

        def keep(initial: Arrays) -> Arrays:
            if self._private is None:
                self._private = self._files.take_up(
                    initial, self._journals.private, expected=self._journals.joined > 0
                )
            return self._private

        plan = self._plan
        check_aggregation(aggregation_of(plan.rounds), plan.secure_sum)
        try:
            side = planned_host_side(plan, data, keys, keep)
        except ValueError as error:
            raise RunError(f"the histories do not fit this system: {error}") from error
        if not self._keeps_records:
            # Of a run of another system, or of users of whom some are gone.
            no_records(self._host.settings.state)
        return side

    def _keep_records(self, users: int, records: Iterable[bytes]) -> RecordFile:
        """Return the file of users' records, made anew unless it is of this run, catalogue and history."""
        self._keeps_records = True
        path = self._host.settings.state / RECORDS
        made_of = (plan_hash(self._plan), self._items_sha256, users, len(self._host.histories))
        label = hashlib.sha256(encode("user-records", *made_of)).digest()
        if path.exists():
            try:
                held = RecordFile(path)
                damaged = held.check() if held.label == label else 0
            except StoreError as error:
                _log.error("users' records are made again", reason=error.message)
            else:
                if held.label == label and not damaged:
                    return held
                held.close()
                if damaged:
                    _log.error("users' records are damaged, and made again", file=str(path), users=damaged)
        # Before the next one, which needs the room.
        no_records(self._host.settings.state)
        return RecordFile.made(path, label, users, records)

    def rows(self, users: NDArray[np.integer]) -> bytes:
        """Return the private state of some users, packed for the journal."""
        return self._files.rows(users)

    def save(self, users: NDArray[np.integer]) -> None:
        """Write the private state of some users through to the disk."""
        self._files.save(users)

    def evaluated(self, version: int, best: int) -> None:
        """Keep a copy of users' private arrays for a version under evaluation."""
        self._files.evaluated(version, best)

    async def adopt(self, version: int) -> None:
        """Restore users' private arrays as they were at the chosen version."""
        await self.side()
        await asyncio.to_thread(self._files.adopt, version)

    async def model(self, version: int, sha256: bytes) -> Model:
        """Return the version on which a round trains.

        Raises
        ------
        Declined
            When the model that the COS sends does not have the hash that the round's plan names.
        StaleError
            When the COS has gone on to another version.
        VerificationError
            When a sealed version does not open.
        """
        held = self._model if self._model and self._model.sha256 == sha256 else self._newest
        if held is None or held.sha256 != sha256:
            held = await self._fetch(version)
            if held.version != version:
                raise StaleError
            if held.sha256 != sha256:
                raise Declined("the model that the server sent is not the one of the round's plan")
        self._model = held
        if self._newest is None or held.version > self._newest.version:
            self._newest = held
        return held

    async def train_on(self, model: Model) -> None:
        """Note durably that this host trains on a version; in a run whose participants share the key.

        Raises
        ------
        Declined
            When this host trained on a sealed version of a later round before: with a further sum over a version that
            was replaced, over other members, the server would have a difference of two sums.
        """
        if self._trained is not None:
            await self._host.writer.files_when_possible(
                "keep which version this host trained on", partial(self._trained.raise_to, model.made_in)
            )

    async def newest(self) -> Model:
        """Return the newest version or, after the run, the chosen one; fetched only when it is not held."""
        self._newest = await self._fetch(0, self._newest)
        return self._newest

    async def _fetch(self, version: int, held: Model | None = None) -> Model:
        found, payload = await self._host.party.fetch(
            wire.FetchKind.FETCH_KIND_MODEL, version=version, held_sha256=held.sha256 if held else b""
        )
        if payload is None:
            if held is None:
                raise PeerError("the COS says that an unknown model is current")
            return held

        if self._shared is not None:
            # Opening a sealed version needs the number of items.
            await self.side()
        return await asyncio.to_thread(self._decode, found, payload)

    def _decode(self, version: int, payload: bytes) -> Model:
        digest = hashlib.sha256(payload).digest()
        if self._shared is None:
            return Model(version, digest, model_from_bytes(payload))
        # The first version is not sealed and has no list of open items for any group.
        arrays, made_in = self._shared.opened(payload, len(self.items), 1)
        side = self._shared.side(len(self.items), 1)
        return Model(version, digest, side.model(arrays), side.opened(arrays), made_in)

    async def opened(self, model: Model) -> NDArray[np.bool_]:
        """Return which items each group may train, bool (groups, I), from the model's version or the COS's list.

        Raises
        ------
        Declined
            When the COS has no such list, without which a system that opens items by group cannot be trained.
        """
        if model.opened is not None:
            return model.opened
        _, payload = await self._host.party.fetch(
            wire.FetchKind.FETCH_KIND_OPEN_ITEMS, held_sha256=self._opened_sha256
        )
        if payload is not None:
            self._opened_sha256 = hashlib.sha256(payload).digest()
            self._opened = None
            if payload:
                width = -(-len(self.items) // 8)
                packed = from_wire(read(Tensor, payload), np.uint8, (None, width), field="open items")
                bits = np.unpackbits(packed, axis=1, count=len(self.items), bitorder="little")
                self._opened = bits.astype(np.bool_)
        if self._opened is None:
            raise Declined("the server has no list of items that are open for training")
        return self._opened

    def inputs(self, model: Model) -> dict[str, bytes]:
        """Return the hashes of what this host was told and uses beside the model, by name."""
        found = {CATALOGUE: self._items_sha256}
        if model.opened is None and self._opened is not None:
            found[OPEN_ITEMS] = self._opened_sha256
        return found

    def close(self) -> None:
        """Close the files."""
        self._files.close()
