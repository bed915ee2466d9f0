"""Let users visit data owners with their own rows, sealed (DRIFT, shielded form).

A user is at one owner at a time: its row comes back changed before it goes to the next owner.  Users do not wait for
each other.  A visit counts when its reply is durable here.  A visit whose reply was lost is repeated under the same
number, and the owner returns the same reply.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import structlog
from numpy.typing import NDArray

from coterie.crypto.sealed import encode_records
from coterie.errors import PeerError
from coterie.net.retry import Retry
from coterie.net.status import from_rpc_error
from coterie.store import client as store
from coterie.systems.drift.settings import DriftSettings
from coterie.systems.drift.shielded import initial_row
from coterie.telemetry.seldom import Seldom
from coterie.wire.refusal import LATER, ErrorReason, Refusal, reason_name
from coterie.wire.v1 import data_owner_pb2 as wire
from coterie.wire.v1.orchestrator_pb2 import CatalogueOwner
from coterie.wire.visit import Reply, Visit
from coterie_client.choice import Choice
from coterie_client.drift.delivery import RECORDS_PER_BATCH
from coterie_client.drift.recipients import Recipient, Recipients, Session
from coterie_client.history import Catalogued
from coterie_client.host import Host, now_ms

__all__ = ["Visits", "resumed"]

_log = structlog.get_logger("coterie.visits")

_AT_ONCE = 16
"""Most users whose visits go in one message."""

_CALL_S = 120.0
_RETRY_S = 5.0
_PAUSE_S = 1.0
_ORDER = 6
"""First element of the seed of a user's order of owners; `coterie.systems.drift` uses lower ones."""


@dataclass
class _Leaving:
    """A visit that is sent and not answered yet."""

    user: int
    rows: NDArray[np.uint32]
    """History rows of the records that it brings."""
    number: int
    complete: bool
    message: wire.SealedBatch
    session: Session


class Visits:
    """The visits of a host's users to data owners, and their rows; used by `ShieldedDrift`.

    Parameters
    ----------
    host : Host
        Registered.
    settings : DriftSettings
    keys : ndarray of uint64, shape (users,)
        Each user's own seed, from which its row and its order of owners are drawn.
    choice : Choice
        What the person of the device has chosen: no visit begins while it objects.
    """

    def __init__(self, host: Host, settings: DriftSettings, keys: NDArray[np.uint64], choice: Choice) -> None:
        self._choice = choice
        self._host = host
        self._plan = host.party.plan
        self._keys = keys
        self._recipients = Recipients(host.runtime, self._plan.run_id, host.identities, host.directory_key)
        self._retry = Retry(limit_s=_RETRY_S)
        self._present: set[bytes] = set()
        self._newest = 0
        self._changed = asyncio.Event()
        self._revoked: set[int] = set()
        self.rows = np.stack([initial_row(int(key), settings) for key in keys])
        """Users' rows, float32 (users, d); they leave this host only sealed to an owner."""
        self._last: dict[tuple[int, bytes], store.LastVisit] = {}
        with host.engine.connect() as connection:
            for user, row in store.load_vectors(connection).items():
                self.rows[user - 1] = np.frombuffer(row, "<f4")
            for one in store.load_visited(connection):
                self._last[one.user, one.owner] = one

    def know(self, version: int, owners: Sequence[CatalogueOwner]) -> None:
        """Learn the owners of a catalogue; users stop waiting for owners that are not in the newest one.

        Raises
        ------
        VerificationError
            When an owner's bundle does not carry the directory's countersignature.
        """
        present, _ = self._recipients.know(owners)
        if version >= self._newest:
            self._newest, self._present = version, present
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    @property
    def records(self) -> int:
        """Number of records that owners have, over all users."""
        return sum(one.durable for one in self._last.values())

    def losses(self, epoch: int) -> NDArray[np.float64]:
        """Return each user's mean loss over its blocks in an epoch, float64 (users,); NaN where no block ran."""
        total, blocks = np.zeros(len(self.rows)), np.zeros(len(self.rows))
        for one in self._last.values():
            if one.epoch == epoch:
                total[one.user - 1] += one.loss
                blocks[one.user - 1] += one.ran
        return np.where(blocks > 0, total / np.maximum(blocks, 1), np.nan)

    # --- an epoch ----------------------------------------------------------------------------------------------

    async def make(self, epoch: int, catalogue: Catalogued) -> None:
        """Let each user visit, in its own random order, the owners that hold or await records of it in this epoch.

        Raises
        ------
        PeerError
            When an owner refuses.  An owner that cannot be reached is awaited until `know` gets a catalogue without it.
        """
        await self._host.histories.queue(catalogue)
        todo = {
            user: deque(owners)
            for user in range(1, len(self.rows) + 1)
            if (owners := self._order(user, epoch, catalogue.owners))
        }
        places: dict[bytes, deque[int]] = {owner: deque() for owner in catalogue.owners}
        news = {owner: asyncio.Event() for owner in catalogue.owners}
        left = len(todo)
        done = asyncio.Event()

        def onwards(user: int) -> None:
            nonlocal left
            owners = todo[user]
            if owners and user not in self._revoked and not self._choice.objections():
                owner = owners[0]
                places[owner].append(user)
                news[owner].set()
                return
            left -= 1
            if not left:
                done.set()

        async def serve(owner: bytes) -> None:
            while True:
                await news[owner].wait()
                news[owner].clear()
                while places[owner]:
                    users = [places[owner].popleft() for _ in range(min(_AT_ONCE, len(places[owner])))]
                    await self._visit(owner, users, epoch, catalogue)
                    for user in users:
                        if owner not in self._present or not self._needs(user, owner, epoch):
                            todo[user].popleft()
                        onwards(user)

        if not todo:
            return
        serving = [asyncio.create_task(serve(owner)) for owner in catalogue.owners]
        try:
            for user in list(todo):
                onwards(user)
            finished = asyncio.create_task(done.wait())
            await asyncio.wait([*serving, finished], return_when=asyncio.FIRST_COMPLETED)
            finished.cancel()
            for task in serving:
                if task.done():
                    task.result()
        finally:
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)

    def _order(self, user: int, epoch: int, owners: Sequence[bytes]) -> list[bytes]:
        # Sort by name: owners' keys differ between runs of an experiment.
        wanted = sorted(
            (owner for owner in owners if self._needs(user, owner, epoch)),
            key=lambda owner: self._recipients[owner].name,
        )
        key = np.random.SeedSequence(int(self._keys[user - 1]), spawn_key=(_ORDER, epoch))
        return [wanted[n] for n in np.random.default_rng(key).permutation(len(wanted))]

    def _of(self, user: int, owner: bytes) -> store.LastVisit:
        return self._last.get((user, owner)) or store.LastVisit(user, owner)

    def _queued(self, user: int, owner: bytes) -> NDArray[np.uint32]:
        return self._host.histories.outboxes[owner][user].rows

    def _needs(self, user: int, owner: bytes, epoch: int) -> bool:
        last = self._of(user, owner)
        return len(self._queued(user, owner)) > last.durable or (last.epoch < epoch and last.held > 0)

    async def _visit(self, owner: bytes, users: Sequence[int], epoch: int, catalogue: Catalogued) -> None:
        """Let some users visit an owner; return when replies are durable, the owner is gone or the person objects."""
        silence = Seldom(_log)
        # Whoever has paused or left meanwhile does not visit an owner that comes back.
        while owner in self._present and not self._choice.objections():
            recipient, changed = self._recipients[owner], self._changed
            try:
                await self._retry(lambda: self._once(self._recipients[owner], users, epoch, catalogue))
                silence.over("a data owner is back", owner=recipient.name)
                return
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error, recipient.channel.peer)
                if isinstance(failure, Refusal) and failure.reason not in LATER:
                    raise failure from error
            silence.warning("waiting for a data owner", owner=recipient.name, error=failure.message)
            try:
                async with asyncio.timeout(_PAUSE_S):
                    await changed.wait()
            except TimeoutError:
                pass

    async def _once(
        self, recipient: Recipient, users: Sequence[int], epoch: int, catalogue: Catalogued
    ) -> None:
        # A repeated attempt leaves out whose reply came before the call failed: one visit in an epoch is enough.
        users = [user for user in users if self._needs(user, recipient.owner, epoch)]
        if not users or self._choice.objections():
            return
        prekey = await self._recipients.prekey(recipient)
        sessions = self._recipients.sessions(recipient, prekey, users)
        with self._host.runtime.accounting.activity("seal", len(users)):
            leaving = [
                self._sealed(user, recipient.owner, session, epoch, catalogue)
                for user, session in zip(users, sessions, strict=True)
            ]
        bringing = [one for one in leaving if len(one.rows)]
        coming = [one for one in leaving if not len(one.rows)]
        stub, run_id = recipient.stub, self._plan.run_id
        if bringing:
            request = wire.SubmitInteractionsRequest(
                run_id=run_id, owner=recipient.owner, batches=[one.message for one in bringing]
            )
            responses = stub.SubmitInteractions(iter([request]), timeout=_CALL_S)
            async for response in responses:
                await self._answered(recipient, epoch, bringing, response)
        if coming:
            update = wire.UpdateVectorRequest(
                run_id=run_id,
                owner=recipient.owner,
                epoch=epoch,
                visits=[one.message for one in coming],
            )
            await self._answered(recipient, epoch, coming, await stub.UpdateVector(update, timeout=_CALL_S))

    def _sealed(
        self, user: int, owner: bytes, session: Session, epoch: int, catalogue: Catalogued
    ) -> _Leaving:
        last, queued = self._of(user, owner), self._queued(user, owner)
        rows = queued[last.durable : last.durable + RECORDS_PER_BATCH]
        complete = last.durable + len(rows) == len(queued)
        number = last.number + 1
        payload = encode_records(*self._host.histories.records(rows, catalogue))
        payload += Visit(number, epoch, complete, self.rows[user - 1]).to_bytes()
        sealed = session.sealing.seal(last.durable + 1, payload, len(rows))
        return _Leaving(
            user,
            rows,
            number,
            complete,
            wire.SealedBatch(
                user=self._host.bundles[user - 1].participant_id,
                header=sealed.header,
                ciphertext=sealed.ciphertext,
            ),
            session,
        )

    async def _answered(
        self,
        recipient: Recipient,
        epoch: int,
        leaving: Sequence[_Leaving],
        response: wire.SubmitInteractionsResponse | wire.UpdateVectorResponse,
    ) -> None:
        refused = {one.index: one for one in response.refused}
        if not len(response.replies) == len(response.durable) == len(leaving):
            raise PeerError(f"{recipient.name} answered another number of visits than were made")
        changed: dict[int, bytes] = {}
        made: list[store.LastVisit] = []
        sent: list[store.Sent] = []
        for index, (one, reply, durable) in enumerate(
            zip(leaving, response.replies, response.durable, strict=True)
        ):
            last = self._of(one.user, recipient.owner)
            if index in refused:
                self._refused(recipient, one, last, refused[index], durable, made)
                continue
            with self._host.runtime.accounting.activity("open"):
                said = Reply.from_bytes(
                    one.session.opening.open(reply.header, reply.ciphertext), self._plan.dim
                )
            if said.number != one.number:
                raise PeerError(f"{recipient.name} answered visit {said.number}; made was {one.number}")
            if durable > len(self._queued(one.user, recipient.owner)):
                raise _behind(recipient.name)
            self.rows[one.user - 1] += said.step
            changed[one.user] = self.rows[one.user - 1].astype("<f4").tobytes()
            same = last.epoch == epoch
            made.append(
                last._replace(
                    number=said.number,
                    # Set even with records still to come: `_needs` looks at both.
                    epoch=epoch,
                    durable=durable,
                    held=said.held,
                    ran=said.blocks + (last.ran if same else 0),
                    loss=said.loss + (last.loss if same else 0.0),
                )
            )
            sent += self._receipt(recipient, one, durable - last.durable)
        for visited in made:
            self._last[visited.user, visited.owner] = visited

        def write(connection: Any) -> None:
            store.save_visits(connection, changed, made)
            store.add_sent(connection, sent)

        # Must be durable before the next visit of any of these users.
        await self._host.writer.run_when_possible(write)

    def _refused(
        self,
        recipient: Recipient,
        one: _Leaving,
        last: store.LastVisit,
        refused: wire.RefusedBatch,
        durable: int,
        made: list[store.LastVisit],
    ) -> None:
        match refused.reason:
            case ErrorReason.ERROR_REASON_REVOKED:
                # The revoked user makes no more visits; the host's others do.
                self._revoked.add(one.user)
                _log.warning("a user was revoked", owner=recipient.name)
            case ErrorReason.ERROR_REASON_UNKNOWN_PREKEY:
                recipient.prekey = None
            case ErrorReason.ERROR_REASON_SEQUENCE_MISMATCH:
                # The entry of this user and owner, also before any visit was noted.
                place = last._replace(user=one.user, owner=recipient.owner)
                queued = len(self._queued(one.user, recipient.owner))
                _log.warning("a data owner is at another place", owner=recipient.name)
                made.append(resumed(recipient.name, place, queued, refused.expected, durable))
            case _:
                raise Refusal(
                    refused.reason,
                    f"{recipient.name} refused a visit: {reason_name(refused.reason)}",
                    field="batches",
                )

    def _receipt(self, recipient: Recipient, one: _Leaving, gained: int) -> list[store.Sent]:
        to, now = f"data-owner/{recipient.name}", now_ms()
        size = len(one.message.header) + len(one.message.ciphertext)
        found = [store.Sent(one.user, to, "user row", 1, 0 if gained else size, now)]
        if gained:
            found.append(store.Sent(one.user, to, "interaction", gained, size, now))
        return found


def resumed(owner: str, last: store.LastVisit, queued: int, expected: int, durable: int) -> store.LastVisit:
    """Return the state from which a user goes on after an owner refused its visit's sequence numbers.

    Parameters
    ----------
    owner : str
        Name of the owner.
    last : Visited
        The user's record of its last visit there.
    queued : int
        Records that the user has for the owner, in all.
    expected : int
        Number of the visit that the owner expects next.
    durable : int
        Records of the user that the owner has.

    Raises
    ------
    PeerError
        When the owner has visits or records that this host does not know of, or expects exactly what it refused.
    """
    if expected > last.number + 1 or durable > queued:
        raise _behind(owner)
    if expected <= last.number:
        # The owner was restored from a backup: send what it lost again.
        return last._replace(number=max(expected - 1, 0), epoch=0, durable=durable, ran=0, loss=0.0, held=0)
    if durable == last.durable:
        raise PeerError(f"{owner} refused visit {expected} and {durable} records, and expects the same")
    # The visit's number fits and its records do not: send again the records that the owner lacks.
    return last._replace(durable=durable)


def _behind(owner: str) -> PeerError:
    return PeerError(
        f"OUTBOX_BEHIND: {owner} has taken visits or records that this host does not know of",
        hint="this host was restored from an old backup; enrol its users anew",
    )
