"""Custody of a run's Paillier keys at one key holder: make or receive the key, store, countersign and rotate it.

The first holder on the roster that is not revoked makes the key of an epoch; if it publishes none in time the second
holder may, and so on.  The first key published is the key of the epoch.  A holder's folder has, for each epoch::

    RUN.EPOCH.key           the secrets, mode 0600
    RUN.EPOCH.publication   the request that this holder is about to publish; written before the secrets
    RUN.EPOCH.published     the same request, once the directory has acknowledged it

The secrets are on disk before the key is published or countersigned: a holder that restarts goes on with these files,
and publishes the same bytes again.  A holder makes another key of the same epoch only if the directory never took the
first one.

Needs ``gmpy2``; services import this module only where they hold keys.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

import structlog

from coterie.crypto.custody import HeldKey, countersign_record, open_sealed, seal_for, sign_record
from coterie.crypto.identity import Bundle, Identity
from coterie.crypto.key_record import KeyRecord, check_epoch
from coterie.crypto.keyfile import destroy_private_file, read_private_file, write_private_file
from coterie.crypto.roster import PAILLIER
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CertificateError, CryptoError, PeerError
from coterie.net.channel import Channel
from coterie.net.retry import Retry
from coterie.parties.key_records import record_from_wire, record_to_wire, roster_to_wire
from coterie.parties.paillier_directory import PaillierDirectory
from coterie.parties.public_keys import MAY_PASS, Trust
from coterie.telemetry.seldom import Seldom
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import thirdparty_pb2 as wire

__all__ = ["Custody", "Holding"]

_log = structlog.get_logger("coterie.custody")

_ROLES = ("client", "decrypting-client")
"""Roles of parties whose participants may hold the secret key."""

_LOOK_S = 5.0
"""Longest time that a call is held before revocations and the time are checked again, seconds."""


_LONGEST_PAUSE_S = 30.0


class Holding(NamedTuple):
    """The present key of a run, with its secrets, as one of its holders has it."""

    record: KeyRecord
    """Record of the key, complete and verified."""
    secrets: HeldKey


class Custody:
    """Makes, receives, stores and rotates a run's Paillier keys for one key holder.

    Parameters
    ----------
    channel : Channel
        To the third party, with a certificate of the party that speaks for the holder.
    identity : Identity
        Keys of the holder, which is on the roster.
    trust : Trust
        Roster, terms and revocations by which the holder checks keys.
    folder : Path
        Folder of this holder alone; made when absent, mode 0700.
    bundles : callable
        Gives verified bundles of participants, without unknown ones: ``Directory.bundles``.
    patience_s : float, optional
        Time that the first holder has to publish, seconds; then the second one takes over, after twice as long the
        third.
    timeout_s : float, optional
        Time after which to give up without a complete key, seconds.
    retry : Retry, optional
        Retries of calls to the directory.
    """

    def __init__(
        self,
        channel: Channel,
        identity: Identity,
        trust: Trust,
        folder: Path,
        bundles: Callable[[Iterable[bytes]], Awaitable[Mapping[bytes, Bundle]]],
        *,
        patience_s: float = 60.0,
        timeout_s: float = 600.0,
        retry: Retry | None = None,
    ) -> None:
        self._directory = PaillierDirectory(channel, retry)
        self._identity = identity
        self._trust = trust
        self._folder = folder
        self._bundles = bundles
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._pause_s = min(1.0, timeout_s / 10)
        self._held: dict[int, HeldKey] = {}
        # Holders by key id, of all keys since the start of this process.
        self._holders: dict[bytes, tuple[bytes, ...]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._making = threading.Lock()
        self.current: Holding | None = None
        """The newest complete key; None before `ensure`."""

    async def ensure(self) -> Holding:
        """Hold the newest key of the run: make and publish it, or fetch, check, save and countersign it.

        Call it at the start, and again after a holder was revoked: then a new key is made without that holder.

        Raises
        ------
        VerificationError
            When the directory's key does not verify, or is not for this holder.
        CertificateError
            When this holder is not on the roster, or its files cannot be used.
        PeerError
            When there is no complete key in time, or the directory cannot be reached; `Refusal` when it refuses.
        """
        return await self._reach(1)

    async def rotate(self) -> Holding:
        """Hold a key of a higher epoch than any held so far.

        The first holder publishes the key at once, the next one if the first does not within ``patience_s``.  All
        other holders must rotate too, or `follow`.  The old secrets stay until `destroy_below`.

        Raises
        ------
        VerificationError, CertificateError, PeerError
            As `ensure`.
        """
        return await self._reach(self._highest() + 1)

    async def follow(self, on_key: Callable[[Holding], None]) -> NoReturn:
        """Hold the newest key until cancelled: call `ensure` now, and again when the key changes or is outdated.

        So it is enough that the first holder rotates, and a key with a revoked holder is replaced.  Errors are logged,
        and the call is tried again.

        Parameters
        ----------
        on_key : callable
            Called with each new key that this holder has.
        """
        told: bytes | None = None
        pause, silence = self._pause_s, Seldom(_log)
        while True:
            try:
                holding = await self.ensure()
                pause = self._pause_s
                silence.over("a paillier key again", run=self._trust.run)
                if holding.record.key_id != told:
                    told = holding.record.key_id
                    on_key(holding)
                await self._until_outdated(holding.record)
            except (CertificateError, CryptoError, PeerError) as error:
                silence.warning("no paillier key", run=self._trust.run, reason=str(error))
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _until_outdated(self, record: KeyRecord) -> None:
        own = self._identity.participant_id
        while not self._outdated(record):
            newest, _ = await self._directory.envelope(
                self._trust.run, own, held_epoch=record.epoch, hold_s=_LOOK_S
            )
            if newest is None or newest.epoch != record.epoch:
                return

    def secrets(self, key_id: bytes) -> HeldKey:
        """Return the secrets of a key that is still held, by the key's id (32 bytes).

        Raises
        ------
        VerificationError
            WRONG_KEY when no such key is held.
        """
        for epoch in sorted(self._epochs(), reverse=True):
            held = self._load(epoch)
            if held.key_id == key_id:
                return held
        raise VerificationError(
            Reason.WRONG_KEY, f"the secret of Paillier key {key_id.hex()[:16]} is not held, or no longer"
        )

    def holders(self, key_id: bytes) -> tuple[bytes, ...]:
        """Return the participants that hold a key's secret, as its verified record names them.

        Raises
        ------
        VerificationError
            WRONG_KEY when this process has verified no record of such a key.
        """
        found = self._holders.get(key_id)
        if found is None:
            raise VerificationError(
                Reason.WRONG_KEY,
                f"no record of Paillier key {key_id.hex()[:16]} was verified since the start",
            )
        return found

    def destroy_below(self, epoch: int) -> list[int]:
        """Destroy the secrets of lower epochs; ciphertexts under those keys cannot be decrypted any more.

        Returns
        -------
        list of int
            The epochs whose secrets were held until now.

        Raises
        ------
        CertificateError
            When a file cannot be removed.
        """
        gone = sorted(one for one in self._epochs() if one < epoch)
        for one in gone:
            self._destroy(one)
            _log.info("paillier key destroyed", run=self._trust.run, epoch=one)
        return gone

    # --- reaching an epoch -----------------------------------------------------------------------------------------

    async def _reach(self, least: int) -> Holding:
        async with self._one_at_a_time:
            self._prepare_folder()
            started = time.monotonic()
            while True:
                self._check_eligible()
                record, sealed = await self._directory.envelope(
                    self._trust.run, self._identity.participant_id
                )
                newest = 0 if record is None else record.epoch
                await self._settle(newest)
                problem = None
                # Never go back to an older key; the holder that published the newer one publishes it again.
                wanted = max(least, self._highest())
                if record is not None and newest >= wanted and not self._outdated(record):
                    try:
                        holding = await self._join(record, sealed, started)
                    except VerificationError as error:
                        if error.reason not in MAY_PASS:
                            raise
                        problem = error
                        await asyncio.sleep(self._pause_s)
                    else:
                        if holding is not None:
                            self.current = holding
                            self._holders[holding.record.key_id] = holding.record.holders
                            return holding
                else:
                    await self._succeed(newest, started)
                if time.monotonic() - started >= self._timeout_s:
                    raise problem or self._too_late(record, wanted)

    def _check_eligible(self) -> None:
        trust, own = self._trust, self._identity.participant_id
        trust.roster.verify(trust.roster_key, purpose=PAILLIER, run=trust.run, now=int(trust.clock()))
        if own not in trust.roster.members:
            raise CertificateError(
                f"participant {own.hex()[:16]} is not on the roster of key holders",
                hint="the operator signs one that names it: `coterie certs roster`",
            )
        if own not in trust.eligible():
            raise CertificateError(f"participant {own.hex()[:16]} was revoked, and holds no keys any more")

    def _outdated(self, record: KeyRecord) -> bool:
        """Return whether a holder of the key was revoked since."""
        record.check_signatures()
        revoked = self._trust.revoked()
        return any(holder in revoked for holder in record.holders)

    # --- as one of the others --------------------------------------------------------------------------------------

    async def _join(self, record: KeyRecord, sealed: bytes, started: float) -> Holding | None:
        """Take a published key and countersign it; return None while it is not complete."""
        own = self._identity.participant_id
        held = await asyncio.to_thread(self._take, record, sealed)
        if record.generator != own and own not in {one.participant for one in record.countersignatures}:
            one = countersign_record(self._identity, held, record)
            await self._directory.countersign(self._trust.run, record.epoch, one)
            _log.info("paillier key countersigned", run=self._trust.run, epoch=record.epoch)
        left = started + self._timeout_s - time.monotonic()
        complete = await self._directory.public_key(
            self._trust.run, held_epoch=record.epoch - 1, hold_s=min(left, _LOOK_S)
        )
        if complete is None or complete.epoch != record.epoch:
            return None
        check_epoch(complete.epoch, complete.key_id, record.epoch, record.key_id)
        await asyncio.to_thread(self._trust.verify, complete)
        return Holding(complete, held)

    def _take(self, record: KeyRecord, sealed: bytes) -> HeldKey:
        """Return the secrets of a published key: from this holder's folder, or from the sealed envelope."""
        self._trust.verify(record, complete=False)
        if record.epoch in self._epochs():
            held = self._load(record.epoch)
            check_epoch(record.epoch, record.key_id, held.epoch, held.key_id)
            return held
        if record.generator == self._identity.participant_id:
            raise CertificateError(
                f"this holder made the key of epoch {record.epoch}, and its secret is not in {self._folder}",
                hint="restore the folder, or rotate",
            )
        if self._identity.participant_id not in record.holders or not sealed:
            raise VerificationError(
                Reason.NOT_LISTED,
                f"the secret of the key of epoch {record.epoch} was not sealed for this holder",
                hint="rotate",
            )
        held = open_sealed(self._identity, record, sealed, self._trust.terms)
        held.save(self._path(record.epoch, "key"))
        self._held[record.epoch] = held
        _log.info(
            "paillier key received", run=self._trust.run, epoch=record.epoch, key=record.key_id.hex()[:16]
        )
        return held

    # --- as the one that makes the key -----------------------------------------------------------------------------

    async def _succeed(self, newest: int, started: float) -> None:
        """Publish a key of the epoch after the newest one if it is this holder's turn, or wait for another holder's."""
        epoch = newest + 1
        if any(self._path(epoch, kind).exists() for kind in ("publication", "published")):
            await self._publish(epoch)
            return
        highest = self._highest()
        if epoch <= highest:
            raise VerificationError(
                Reason.OLD_EPOCH,
                f"the newest key of the directory is of epoch {newest}, and this holder has one of {highest}",
                hint="the third party may have been restored from a backup: `ensure` at every holder publishes again",
            )
        rank = self._trust.eligible().index(self._identity.participant_id)
        now = time.monotonic()
        turn, ends = started + rank * self._patience_s, started + self._timeout_s
        if turn > now:
            await self._directory.envelope(
                self._trust.run,
                self._identity.participant_id,
                held_epoch=newest,
                hold_s=min(turn - now, ends - now, _LOOK_S),
            )
        elif await self._make(epoch):
            await self._publish(epoch)
        else:
            await asyncio.sleep(self._pause_s)

    async def _make(self, epoch: int) -> bool:
        """Make a key and the request to publish it; return False while another holder has no bundle yet."""
        holders = self._trust.eligible()
        others = [holder for holder in holders if holder != self._identity.participant_id]
        found = {
            holder: bundle
            for holder, bundle in (await self._bundles(others)).items()
            if bundle.role in _ROLES
        }
        if missing := [holder.hex()[:16] for holder in others if holder not in found]:
            _log.info("holders without key bundles", run=self._trust.run, holders=missing)
            return False
        await asyncio.to_thread(self._generate, epoch, holders, [found[holder] for holder in others])
        return True

    def _generate(self, epoch: int, holders: tuple[bytes, ...], others: list[Bundle]) -> None:
        with self._making:
            # The caller may have been cancelled, and have come again while the first thread made the key.
            if not self._path(epoch, "key").exists():
                self._generate_once(epoch, holders, others)

    def _generate_once(self, epoch: int, holders: tuple[bytes, ...], others: list[Bundle]) -> None:
        held = HeldKey.generate(self._trust.run, epoch, self._trust.terms)
        record = sign_record(self._identity, held, holders)
        request = wire.PublishPaillierKeyRequest(
            record=record_to_wire(record),
            envelopes=[
                wire.SealedPaillierKey(holder=bundle.participant_id, sealed=seal_for(bundle, held, record))
                for bundle in others
            ],
        )
        # The publication is written first, so that it exists whenever the secrets do.
        write_private_file(self._path(epoch, "publication"), request.SerializeToString())
        held.save(self._path(epoch, "key"))
        self._held[epoch] = held
        _log.info("paillier key made", run=self._trust.run, epoch=epoch, key=record.key_id.hex()[:16])

    async def _publish(self, epoch: int) -> None:
        """Publish the key that is on disk, for the first time or again."""
        pending, published = self._path(epoch, "publication"), self._path(epoch, "published")
        new = pending.exists()
        if not self._path(epoch, "key").exists():
            # The process ended after the publication and before the secrets were written: the key was never published.
            destroy_private_file(pending)
            return
        request = wire.PublishPaillierKeyRequest.FromString(read_private_file(pending if new else published))
        if new and self._outdated(record_from_wire(request.record)):
            self._destroy(epoch)
            return
        request.roster.CopyFrom(roster_to_wire(self._trust.roster))
        try:
            await self._directory.publish(request)
        except Refusal as refusal:
            # Another holder was first, or a holder was revoked meanwhile and this one has not heard of it yet.
            if not new or refusal.reason not in (
                ErrorReason.ERROR_REASON_CONFLICT,
                ErrorReason.ERROR_REASON_SEQUENCE_MISMATCH,
                ErrorReason.ERROR_REASON_REVOKED,
            ):
                raise
            if refusal.reason == ErrorReason.ERROR_REASON_REVOKED:
                await asyncio.sleep(self._pause_s)
            return
        if new:
            pending.rename(published)
        _log.info("paillier key published", run=self._trust.run, epoch=epoch)

    async def _settle(self, newest: int) -> None:
        """Settle keys whose publication was not acknowledged: mark those that the directory has, destroy the others."""
        for path in sorted(self._folder.glob(f"{self._trust.run}.*.publication")):
            epoch = _epoch_of(path)
            if epoch > newest:
                continue
            taken = await self._directory.public_key(self._trust.run, epoch=epoch)
            key = self._path(epoch, "key")
            if taken is not None and key.exists() and self._load(epoch).key_id == taken.key_id:
                path.rename(self._path(epoch, "published"))
            else:
                # Another holder's key has the epoch; this key was never given to anybody.
                self._destroy(epoch)

    # --- on disk ---------------------------------------------------------------------------------------------------

    def _prepare_folder(self) -> None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CertificateError(f"cannot make the folder {self._folder}: {error.strerror}") from error

    def _path(self, epoch: int, kind: str) -> Path:
        return self._folder / f"{self._trust.run}.{epoch}.{kind}"

    def _epochs(self) -> set[int]:
        return {_epoch_of(path) for path in self._folder.glob(f"{self._trust.run}.*.key")}

    def _highest(self) -> int:
        """Return the highest epoch whose secrets other holders may have too; 0 when there is none."""
        epochs = (one for one in self._epochs() if not self._path(one, "publication").exists())
        return max(epochs, default=0)

    def _load(self, epoch: int) -> HeldKey:
        held = self._held.get(epoch)
        if held is None:
            held = HeldKey.load(self._path(epoch, "key"), self._trust.terms)
            if (held.public.run, held.epoch) != (self._trust.run, epoch):
                raise CertificateError(f"{self._path(epoch, 'key')} holds the key of another run or epoch")
            self._held[epoch] = held
        return held

    def _destroy(self, epoch: int) -> None:
        self._held.pop(epoch, None)
        for kind in ("key", "publication", "published"):
            destroy_private_file(self._path(epoch, kind))

    def _too_late(self, record: KeyRecord | None, least: int) -> PeerError:
        waited = f"after {self._timeout_s:g} s"
        if record is None or record.epoch < least:
            first = self._trust.eligible()[0].hex()[:16]
            return PeerError(
                f"no holder has published a Paillier key of epoch {least} for run {self._trust.run} {waited}",
                hint=f"does the first holder run, {first}?",
            )
        signed = {one.participant for one in record.countersignatures} | {record.generator}
        missing = ", ".join(holder.hex()[:16] for holder in record.holders if holder not in signed)
        return PeerError(
            f"the Paillier key of epoch {record.epoch} is not complete {waited}",
            hint=f"these holders have not countersigned it: {missing}",
        )


def _epoch_of(path: Path) -> int:
    return int(path.stem.rpartition(".")[2])
