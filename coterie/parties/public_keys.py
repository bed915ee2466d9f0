"""The Paillier public key of a run at a contributor: fetched, verified against the roster, never an older one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from coterie.crypto import clocks
from coterie.crypto.key_record import USUAL_TERMS, KeyRecord, KeyTerms, check_epoch
from coterie.crypto.keyfile import read_private_file, write_private_file
from coterie.crypto.roster import PAILLIER, Roster
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CertificateError, PeerError
from coterie.net.channel import Channel
from coterie.net.retry import Retry
from coterie.parties.paillier_directory import HOLD_S, PaillierDirectory

if TYPE_CHECKING:
    from coterie.crypto.paillier.keys import PublicKey

__all__ = ["MAY_PASS", "PublicKeys", "Trust"]

_log = structlog.get_logger("coterie.custody")


MAY_PASS = frozenset({Reason.TOO_FEW, Reason.NOT_COUNTERSIGNED})
"""Failures that may pass once this party hears of a revocation, after which fewer signatures are needed."""


def _nobody() -> Collection[bytes]:
    return frozenset()


@dataclass(frozen=True)
class Trust:
    """The roster, terms and revocations by which a party checks a run's Paillier keys; from its own configuration.

    Parameters
    ----------
    run : str
        The run.
    roster : Roster
        Participants that may hold the secret.
    roster_key : bytes
        The operator's raw Ed25519 public key for rosters, 32 bytes.
    terms : KeyTerms
        Terms that the run sets for its keys, such as their length.
    revoked : callable
        Gives the ids of all revoked participants, as known now: ``lambda: watch.participants``.
    clock : callable
        Gives Unix seconds.
    """

    run: str
    roster: Roster
    roster_key: bytes
    terms: KeyTerms = USUAL_TERMS
    revoked: Callable[[], Collection[bytes]] = _nobody
    clock: Callable[[], float] = clocks.now_s

    def verify(self, record: KeyRecord, *, complete: bool = True) -> PublicKey:
        """Check a key record, and return its key; takes some milliseconds: call it in a thread.

        Raises
        ------
        VerificationError
            As `KeyRecord.verify`.
        """
        return record.verify(
            self.roster,
            self.roster_key,
            run=self.run,
            now=int(self.clock()),
            revoked=self.revoked(),
            terms=self.terms,
            complete=complete,
        )

    def eligible(self) -> tuple[bytes, ...]:
        """Return the participants that may hold the secret now, ascending: on the roster, and not revoked."""
        return self.roster.eligible(self.revoked())


class PublicKeys:
    """The Paillier key of a run at a contributor, which encrypts under it.

    Parameters
    ----------
    channel : Channel
        To the third party.
    trust : Trust
    seen : Path, optional
        File that keeps the highest epoch seen through restarts.  Without this file a third party that was restored from
        a backup, or that lies, can make a restarted contributor encrypt under an older key.
    retry : Retry, optional
        Retries of calls to the directory.

    Raises
    ------
    CertificateError
        When the file is damaged, or readable by others.
    """

    def __init__(
        self, channel: Channel, trust: Trust, seen: Path | None = None, retry: Retry | None = None
    ) -> None:
        self._directory = PaillierDirectory(channel, retry)
        self._trust = trust
        self._file = seen
        self._seen = _read_seen(seen, trust.run)
        self._current: tuple[KeyRecord, PublicKey] | None = None

    @property
    def record(self) -> KeyRecord | None:
        """The newest key record accepted so far; None before the first."""
        return None if self._current is None else self._current[0]

    def public(self) -> PublicKey:
        """Return the key to encrypt with.

        Raises
        ------
        VerificationError
            REVOKED, NOT_LISTED or TOO_FEW when a holder may not hold the key any more; EXPIRED when the roster is.
        PeerError
            When no key was fetched yet.
        """
        if self._current is None:
            raise PeerError("no Paillier key was fetched yet", hint="wait for `newest` first")
        record, key = self._current
        self._trust.roster.verify(
            self._trust.roster_key,
            purpose=PAILLIER,
            run=self._trust.run,
            now=int(self._trust.clock()),
        )
        record.check_holders(self._trust.roster, self._trust.revoked())
        return key

    def accept(self, record: KeyRecord) -> PublicKey:
        """Verify a key record from any source, and use its key from now on.

        Raises
        ------
        VerificationError
            As `KeyRecord.verify`; OLD_EPOCH for a lower epoch than was seen, or another key of the same one.
        CertificateError
            The epoch that was seen cannot be written to its file.
        """
        if self._seen is not None:
            check_epoch(record.epoch, record.key_id, *self._seen)
        key = self._trust.verify(record)
        if self._seen != (record.epoch, record.key_id):
            self._remember(record)
            _log.info("paillier key taken", run=record.run, epoch=record.epoch, key=record.key_id.hex()[:16])
        self._current = record, key
        return key

    async def newest(self, timeout_s: float = 60.0) -> KeyRecord:
        """Fetch the newest complete key, waiting until there is a key that may be used.

        Parameters
        ----------
        timeout_s : float, optional
            Longest time to wait for the first key, or for a key without a revoked holder, seconds.

        Raises
        ------
        VerificationError
            When the directory's key does not verify.
        PeerError
            When there is no key in time, or the directory cannot be reached.
        """
        ends = time.monotonic() + timeout_s
        known = 0
        problem: VerificationError | None = None
        while True:
            left = ends - time.monotonic()
            record = await self._directory.public_key(
                self._trust.run, held_epoch=known, hold_s=min(left, HOLD_S)
            )
            if record is not None and record.epoch > known:
                try:
                    await asyncio.to_thread(self.accept, record)
                except VerificationError as error:
                    problem = error
                    if error.reason in MAY_PASS:
                        await asyncio.sleep(min(1.0, max(left, 0.0)))
                    elif error.reason is Reason.REVOKED:
                        # The holders rotate; what they publish next is newer than this one.
                        known = record.epoch
                    else:
                        raise
                else:
                    return record
            if time.monotonic() >= ends:
                raise problem or PeerError(
                    f"run {self._trust.run} has no complete Paillier key after {timeout_s:g} s",
                    hint="do the key holders run, and is the third party's roster.pub the operator's?",
                )

    async def newer(self, hold_s: float = HOLD_S) -> KeyRecord | None:
        """Wait for a newer key than the last one accepted, and accept it; return None when there is none in time.

        Raises
        ------
        VerificationError
            When the directory's key does not verify.
        PeerError
            When the directory cannot be reached.
        """
        held = 0 if self._current is None else self._current[0].epoch
        record = await self._directory.public_key(self._trust.run, held_epoch=held, hold_s=hold_s)
        if record is None or record.epoch == held:
            return None
        await asyncio.to_thread(self.accept, record)
        return record

    def _remember(self, record: KeyRecord) -> None:
        if self._file is not None:
            content = {"run": record.run, "epoch": record.epoch, "key_id": record.key_id.hex()}
            write_private_file(self._file, json.dumps(content).encode())
        self._seen = record.epoch, record.key_id


def _read_seen(file: Path | None, run: str) -> tuple[int, bytes] | None:
    if file is None or not file.exists():
        return None
    try:
        content = json.loads(read_private_file(file))
        seen = int(content["epoch"]), bytes.fromhex(content["key_id"])
        written_for = content["run"]
    except (ValueError, TypeError, KeyError):
        raise CertificateError(f"{file} is damaged: it does not say which Paillier key was seen") from None
    if written_for != run:
        raise CertificateError(
            f"{file} is of run {written_for!r}, expected {run!r}", hint="give every run a file of its own"
        )
    return seen
