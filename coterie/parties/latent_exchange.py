"""A host's users in a set of meta-latents: publishes vectors of key users and reads combinations before sums.

The host's side of the system says who is a key user; this module calls COS and third party.  When these do not answer,
training goes on without, and the same is tried before the next sum.  A set that is void, because a key user was
forgotten, is followed by that of a new epoch of the Paillier key, in which all others publish anew.  Hosts that have
read combinations look before each sum of training whether their set still stands, and use those of the new one once
they are there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from coterie.crypto.latent_terms import FRACTION_BITS, LatentTerms
from coterie.errors import CertificateError, CryptoError, PeerError
from coterie.net.status import is_away
from coterie.parties.kept_latents import KeptLatents
from coterie.parties.several_users import for_each_user
from coterie.rounds.sides import Combining
from coterie.rounds.training import Purpose
from coterie.secure_sum.plan import SumPlan
from coterie.telemetry.seldom import Seldom
from coterie.wire.refusal import ErrorReason

if TYPE_CHECKING:
    from coterie.crypto.paillier import Obfuscators
    from coterie.parties.custody import Holding
    from coterie.parties.latents import LatentSet, LatentUpload

__all__ = ["VECTOR", "KeyCustody", "LatentExchange", "SetCalls"]

_log = structlog.get_logger("coterie.expansion")

VECTOR = "encrypted latent vector"
"""Name on receipts of a key user's vector."""

_READY_S = 30.0
"""Longest wait for combinations before a sum, seconds, where all key users may have published."""

_OPEN_S = 10 * 60
"""Time for which a set takes vectors, unless all key users have published before, seconds."""

_LOOK_AGAIN_S = 5.0
_LONGEST_PAUSE_S = 60.0
"""Shortest and longest time without looking for a set after that failed, seconds; it doubles with each failure.

Sums do not wait for it each time.
"""

_VALID_S = 30 * 24 * 3600

_OF_ONE_USER = frozenset(
    {
        ErrorReason.ERROR_REASON_CONFLICT,
        ErrorReason.ERROR_REASON_STALE,
        ErrorReason.ERROR_REASON_TOO_LARGE,
        ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
    }
)
"""Refusals for what one user has published before, or of a vector that comes too late."""


class KeyCustody(Protocol):
    """The Paillier key as the exchange needs it: `coterie.parties.custody.Custody`."""

    async def ensure(self) -> Holding:
        """Hold the newest key."""
        ...

    async def rotate(self) -> Holding:
        """Hold a key of a higher epoch."""
        ...


class SetCalls(Protocol):
    """Calls about sets as the exchange needs them: `coterie.parties.latents.LatentCalls`."""

    async def open(self, holding: Holding, *, open_s: int, valid_s: int) -> LatentSet:
        """Open the set of a key's epoch."""
        ...

    async def look(self, holding: Holding, hold_s: float = 0.0, *, ready: bool = False) -> LatentSet | None:
        """Return the set of a key's epoch."""
        ...

    async def stands(self, run: str, epoch: int) -> bool:
        """Return whether the set of an epoch is neither void nor followed by another."""
        ...

    async def publish(
        self, user: LatentUpload, opened: LatentSet, latent: NDArray[np.floating], obfuscators: Obfuscators
    ) -> None:
        """Publish a vector."""
        ...

    async def read(self, opened: LatentSet, holding: Holding) -> NDArray[np.float64]:
        """Return the combinations."""
        ...


class LatentExchange:
    """Publishes and reads for the users of one host in one run.

    Parameters
    ----------
    custody : KeyCustody
        Of the run's Paillier key, which the host holds with others.
    calls : callable
        Makes the calls about a set of given terms.
    uploads : callable
        Gives what the host keeps of a user's upload, by the user's position.
    obfuscators : callable
        Makes the source of obfuscators of a key; takes seconds.
    note : callable
        Notes on receipts what is about to be sent: kind, user's position, bytes.
    kept : KeptLatents, optional
        File of what was read, from which the exchange goes on after a start; none unless given.

    Raises
    ------
    CertificateError
        The file is damaged.
    """

    def __init__(
        self,
        custody: KeyCustody,
        calls: Callable[[LatentTerms], SetCalls],
        uploads: Callable[[int], LatentUpload],
        obfuscators: Callable[[Holding], Obfuscators],
        note: Callable[[str, int, int], Awaitable[None]],
        kept: KeptLatents | None = None,
    ) -> None:
        self._custody = custody
        self._calls = calls
        self._uploads = uploads
        self._make = obfuscators
        self._note = note
        self._made: tuple[bytes, Obfuscators] | None = None
        self._kept = kept
        before = None if kept is None else kept.load()
        self._latents: NDArray[np.float64] | None = None if before is None else before.latents
        self._epoch = 0 if before is None else before.epoch
        """Epoch of the set that was read."""
        self._look_at, self._pause_s = 0.0, _LOOK_AGAIN_S
        self._silence = Seldom(_log)
        self.failure = ""
        """Why the last sum began without what it should have had; empty where nothing failed."""
        self.away = False
        """Whether it was because the third party does not answer."""

    async def before(
        self,
        side: Combining,
        plan: SumPlan,
        model: Mapping[str, NDArray[np.float32]],
        users: Sequence[int],
    ) -> None:
        """Publish vectors of some users that are to have published before a sum, and read what is needed.

        Parameters
        ----------
        side : Combining
        plan : SumPlan
        model : mapping
            Version on which the sum is formed.
        users : sequence of int
            Users of the sum, by position at the host.
        """
        self.failure, self.away = "", False
        terms = side.latent_terms(model)
        if terms is None:
            return
        trains = plan.purpose == Purpose.TRAIN.value
        if self._latents is not None:
            self.give(side, plan)
            if not trains or await self._stands(terms, plan):
                return
        due = side.key_users(plan, users) if trains else []
        # Hosts without key users follow a set that stands no more, too: all holders confirm the key of the next.
        if not due and not side.lacks_latents(plan) and self._latents is None:
            return
        try:
            await self._up_to_date(side, terms, plan, model, due)
            self._pause_s = _LOOK_AGAIN_S
        except (PeerError, CertificateError, CryptoError) as error:
            self.failure, self.away = error.message, is_away(error)
            self._wait()
            self._silence.warning(
                "no pseudo meta-latents", run=plan.run_id, round=plan.round, reason=error.message
            )
        else:
            self._silence.over("pseudo meta-latents again", run=plan.run_id, round=plan.round)

    def give(self, side: Combining, plan: SumPlan) -> None:
        """Give a side what was read, if it lacks it: it is built anew when a user changes something."""
        if self._latents is not None and side.lacks_latents(plan):
            side.take_latents(self._latents)

    async def _stands(self, terms: LatentTerms, plan: SumPlan) -> bool:
        """Return whether the set that was read still stands, as far as is known: nobody was forgotten."""
        if time.monotonic() < self._look_at:
            return True
        try:
            return await self._calls(terms).stands(plan.run_id, self._epoch)
        except (PeerError, CertificateError, CryptoError) as error:
            self._wait()
            self.away = is_away(error)
            _log.info("set of meta-latents not looked at", run=plan.run_id, reason=error.message)
            return True

    def _wait(self) -> None:
        """Do not look for a while, longer each time; who has no combinations yet tries before each sum."""
        self._look_at, self._pause_s = (
            time.monotonic() + self._pause_s,
            min(2 * self._pause_s, _LONGEST_PAUSE_S),
        )

    async def _up_to_date(
        self,
        side: Combining,
        terms: LatentTerms,
        plan: SumPlan,
        model: Mapping[str, NDArray[np.float32]],
        due: Sequence[int],
    ) -> None:
        calls, holding = self._calls(terms), await self._custody.ensure()
        opened = await calls.look(holding)
        if opened is not None and opened.void:
            holding = await self._custody.rotate()
            opened = await calls.look(holding)
        if opened is None:
            opened = await calls.open(holding, open_s=_OPEN_S, valid_s=_VALID_S)
        if not opened.ready:
            await self._publish(calls, side, model, opened, holding, due)
        lacks = side.lacks_latents(plan)
        if lacks or self._latents is not None:
            # Who has combinations of a set before does not wait.
            opened = await calls.look(holding, _READY_S if lacks else 0.0, ready=True) or opened
            if not opened.ready and not lacks:
                return
            if not opened.ready:
                raise PeerError(
                    f"the set of meta-latents of epoch {opened.record.epoch} has {opened.key_users} of "
                    f"{opened.record.terms.most} key users and is not combined yet"
                )
            self._latents, self._epoch = await calls.read(opened, holding), opened.record.epoch
            if self._kept is not None:
                await asyncio.to_thread(self._kept.save, self._epoch, self._latents)
            side.take_latents(self._latents)

    async def _publish(
        self,
        calls: SetCalls,
        side: Combining,
        model: Mapping[str, NDArray[np.float32]],
        opened: LatentSet,
        holding: Holding,
        due: Sequence[int],
    ) -> None:
        """Publish those of some users that have not, a few at a time; a refusal for one stops nobody else."""
        record = opened.record
        uploads = {user: self._uploads(user) for user in due}
        late = [
            user
            for user, one in uploads.items()
            if not one.forgotten and (one.epoch != record.epoch or not one.published)
        ]
        if not late:
            return
        key = holding.record.key_id
        if self._made is None or self._made[0] != key:
            self._made = key, await asyncio.to_thread(self._make, holding)
        obfuscators = self._made[1]
        size = record.terms.dimension * (record.terms.bits + FRACTION_BITS) // 8

        async def publish(user: int) -> None:
            await self._note(VECTOR, user, size)
            await calls.publish(uploads[user], opened, side.latent(model, user), obfuscators)

        words = "a key user without a vector at the third party"
        self.failure = await for_each_user(late, publish, _OF_ONE_USER, words)
