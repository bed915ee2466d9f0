"""Publish vectors of a host's key users and read pseudo meta-latents, in runs that have them; used by `HostMembers`.

When COS or third party do not answer, training goes on without: hosts without pseudo meta-latents add nothing to the
attention, and say so in the metrics.  They try again before the next sum.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import structlog
from numpy.typing import NDArray

from coterie.crypto.latent_terms import LatentTerms
from coterie.errors import CertificateError, CoterieError, CryptoError, PeerError
from coterie.net.retry import Retry
from coterie.parties.neighbourhood import seed_of_user
from coterie.process.key_trust import key_trust
from coterie.rounds.sides import Combining
from coterie.rounds.training import Purpose
from coterie.secure_sum.plan import SumPlan
from coterie.wire.refusal import ErrorReason, Refusal
from coterie_client.host import Host
from coterie_client.learner import Model, user_keys

if TYPE_CHECKING:
    from coterie.crypto.paillier import Obfuscators
    from coterie.parties.custody import Custody, Holding
    from coterie.parties.latents import LatentCalls, LatentSet, LatentUpload

__all__ = ["PUBLISHED", "HostLatents"]

_log = structlog.get_logger("coterie.expansion")

_FOLDER = "latents"

PUBLISHED = "encrypted latent vector"
"""Name on receipts of a vector of a key user."""

_FIRST_S = 120.0
"""Longest wait for the run's first Paillier key, seconds."""

_LATER_S = 5.0
"""Longest wait before a sum: for an answer, and for a newer key, seconds."""

_READY_S = 30.0
"""Longest wait for pseudo meta-latents before a sum, seconds, where all key users may have published."""

_OPEN_S = 10 * 60
"""Time for which a set takes vectors, unless all key users have published before, seconds."""

_VALID_S = 30 * 24 * 3600

_AT_ONCE = 8
"""Users whose requests are under way together."""


class HostLatents:
    """A host's part in pseudo meta-latents: it holds the run's Paillier key with the other hosts.

    Parameters
    ----------
    host : Host
        Registered.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._custody: Custody | None = None
        self._first: asyncio.Task[None] | None = None
        self._uploads: dict[int, LatentUpload] = {}
        self._numbers: NDArray[np.uint64] | None = None
        self._obfuscators: tuple[bytes, Obfuscators] | None = None
        self._latents: NDArray[np.float64] | None = None
        self._absent = False
        self.failure = ""
        """Why the last sum began without pseudo meta-latents that it should have had; empty where nothing failed."""

    async def before(self, side: Combining, plan: SumPlan, model: Model, users: Sequence[int]) -> None:
        """Publish vectors of some users that are to have published before a sum, and read what is needed; never fails.

        Parameters
        ----------
        side : Combining
        plan : SumPlan
            In whose sum the users take part; before the first one the host begins to fetch the key.
        model : Model
        users : sequence of int
            By position at the host.
        """
        custody = self._made()
        if custody is None:
            return
        if self._first is None:
            self._first = asyncio.create_task(self._hold_first(custody))
        if side.lacks_latents(plan) and self._latents is not None:
            # A side that was built anew.
            side.take_latents(self._latents)
        terms = side.latent_terms(model.arrays)
        if terms is None:
            return
        due = side.key_users(plan, users) if plan.purpose == Purpose.TRAIN.value else []
        lacks = side.lacks_latents(plan)
        if not lacks and (self._latents is not None or not due):
            return
        self.failure = ""
        try:
            await self._first
            await self._up_to_date(custody, side, terms, plan, model, due, lacks=lacks)
        except (PeerError, CertificateError, CryptoError) as error:
            self._failed(plan, error)

    def _failed(self, plan: SumPlan, error: CoterieError) -> None:
        self.failure = error.message
        _log.warning("no pseudo meta-latents", run=plan.run_id, round=plan.round, reason=error.message)

    async def _up_to_date(
        self,
        custody: Custody,
        side: Combining,
        terms: LatentTerms,
        plan: SumPlan,
        model: Model,
        due: Sequence[int],
        *,
        lacks: bool,
    ) -> None:
        calls, holding = self._calls(terms), await custody.ensure()
        opened = await calls.look(holding)
        if opened is None:
            opened = await calls.open(holding, open_s=_OPEN_S, valid_s=_VALID_S)
        if opened.void:
            # Other key users need another key: whoever published has to publish anew.
            holding = await custody.rotate()
            opened = await calls.open(holding, open_s=_OPEN_S, valid_s=_VALID_S)
        if not opened.ready:
            await self._publish(calls, side, model, opened, holding, due)
        if lacks:
            opened = await calls.look(holding, _READY_S, ready=True) or opened
            if not opened.ready:
                raise PeerError(
                    f"the set of meta-latents of epoch {opened.record.epoch} has {opened.key_users} of "
                    f"{opened.record.terms.most} key users and is not combined yet"
                )
            self._latents = await calls.read(opened, holding)
            side.take_latents(self._latents)

    async def _publish(
        self,
        calls: LatentCalls,
        side: Combining,
        model: Model,
        opened: LatentSet,
        holding: Holding,
        due: Sequence[int],
    ) -> None:
        """Publish those of some users that have not, a few at a time; a refusal for one stops nobody else."""
        obfuscators = await self._tables(holding)
        size = opened.record.terms.dimension * (opened.record.terms.bits + 16) // 8

        async def publish(user: int) -> None:
            upload = self._upload(user)
            if upload.epoch == opened.record.epoch and upload.published:
                return
            await self._host.note_sent("thirdparty", PUBLISHED, 1, size, user + 1)
            await calls.publish(upload, opened, side.latent(model.arrays, user), obfuscators)

        for first in range(0, len(due), _AT_ONCE):
            batch = due[first : first + _AT_ONCE]
            for found in await asyncio.gather(*map(publish, batch), return_exceptions=True):
                if isinstance(found, Refusal) and found.reason in _OF_ONE_USER:
                    self.failure = found.message
                    _log.warning("a key user without a vector at the third party", reason=found.message)
                elif isinstance(found, BaseException):
                    raise found

    async def _tables(self, holding: Holding) -> Obfuscators:
        from coterie.secure_sum.obfuscators import holder_obfuscators

        key = holding.record.key_id
        if self._obfuscators is None or self._obfuscators[0] != key:
            self._obfuscators = key, await asyncio.to_thread(holder_obfuscators, holding.secrets.secret)
        return self._obfuscators[1]

    # --- what is made once -------------------------------------------------------------------------------------------

    def _made(self) -> Custody | None:
        host = self._host
        if host.settings.latents is None or host.thirdparty is None or host.directory is None:
            if not self._absent:
                _log.warning(
                    "no pseudo meta-latents: the host's configuration has no [latents]", run=host.settings.run
                )
            self._absent = True
            return None
        if self._custody is None:
            # Only now: hosts of other runs need no gmpy2.
            from coterie.parties.custody import Custody

            self._custody = Custody(
                host.thirdparty,
                # The first user of a host holds the key for all of them.
                host.identities[0],
                key_trust(host.settings.run, host.settings.latents, host.revoked),
                host.settings.state / _FOLDER,
                host.directory.bundles,
                timeout_s=_LATER_S,
                retry=Retry(limit_s=_LATER_S),
            )
        return self._custody

    async def _hold_first(self, custody: Custody) -> None:
        """Make or receive the run's first key, while the first phase goes on."""
        ends = asyncio.get_running_loop().time() + _FIRST_S
        while True:
            try:
                await custody.ensure()
                return
            except (PeerError, CertificateError, CryptoError) as error:
                if asyncio.get_running_loop().time() > ends:
                    _log.warning("no paillier key", run=self._host.settings.run, reason=error.message)
                    return
                await asyncio.sleep(1.0)

    def _calls(self, terms: LatentTerms) -> LatentCalls:
        from coterie.parties.latents import LatentCalls

        host = self._host
        if host.thirdparty is None:
            raise AssertionError("calls are made once there is a connection")
        return LatentCalls(
            host.party.channel,
            host.thirdparty,
            host.directory_key,
            host.identities[0],
            terms,
            Retry(limit_s=_LATER_S),
        )

    def _upload(self, user: int) -> LatentUpload:
        """Return what the host keeps of a user's upload."""
        from coterie.parties.latents import LatentUpload

        if user not in self._uploads:
            settings, seed = self._host.settings, b""
            if settings.seed is not None:
                if self._numbers is None:
                    self._numbers = user_keys(settings.state, self._host.histories.names, settings.seed)
                seed = seed_of_user(int(self._numbers[user]))
            path = settings.state / _FOLDER / f"{settings.run}.user-{user}"
            self._uploads[user] = LatentUpload(path, self._host.party.slots[user], seed)
        return self._uploads[user]


_OF_ONE_USER = frozenset(
    {ErrorReason.ERROR_REASON_CONFLICT, ErrorReason.ERROR_REASON_STALE, ErrorReason.ERROR_REASON_TOO_LARGE}
)
"""Refusals for what one user has published before, or of vectors that come too late."""
