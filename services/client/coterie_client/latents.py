"""Publish vectors of a host's key users and read pseudo meta-latents, in runs that have them; used by `HostMembers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from coterie.config.services import KeySettings
from coterie.crypto.identity import Identity
from coterie.crypto.latent_terms import LatentTerms
from coterie.crypto.verification import VerificationError
from coterie.errors import CertificateError
from coterie.net.channel import Channel
from coterie.net.directory import Directory
from coterie.net.enrolment import HOLDER, identities
from coterie.net.retry import Retry
from coterie.parties.kept_latents import KeptLatents
from coterie.parties.latent_exchange import KeyCustody, LatentExchange
from coterie.process.key_trust import key_trust
from coterie.rounds.sides import Combining
from coterie.secure_sum.plan import SumPlan
from coterie_client.exchange import HostExchange
from coterie_client.host import Host
from coterie_client.learner import Model

if TYPE_CHECKING:
    from coterie.crypto.paillier import Obfuscators
    from coterie.parties.custody import Custody, Holding
    from coterie.parties.latents import LatentCalls, LatentUpload

__all__ = ["HostLatents"]

_FOLDER = "latents"

_FIRST_S = 120.0
"""Longest wait for the run's first Paillier key, seconds."""

_LATER_S = 5.0
"""Longest wait before a sum: for an answer, and for a newer key, seconds."""


class HostLatents(HostExchange):
    """A host's part in pseudo meta-latents: it holds the run's Paillier key with the other hosts.

    Parameters
    ----------
    host : Host
        Registered.
    """

    def __init__(self, host: Host) -> None:
        super().__init__(host, "pseudo meta-latents", "paillier key", _FIRST_S)
        self._custody: KeyCustody | None = None
        self._exchange: LatentExchange | None = None
        self._uploads: dict[int, LatentUpload] = {}

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
        found = self._made()
        if found is None:
            return
        if self._custody is not None:
            self._begin(self._custody.ensure)
        terms = side.latent_terms(model.arrays)
        if terms is None:
            return
        if self._away or not await self._first_tried():
            found.give(side, plan)
            return
        await found.before(side, plan, model.arrays, users)
        if found.away:
            self._try_to_reach(lambda: self._calls(terms).stands(plan.run_id, 0))

    async def forget(self) -> int:
        """Have the vectors of the host's users deleted at the third party; return how many there were.

        Raises as `HostExchange._forget_each`.
        """
        host = self._host
        if host.settings.latents is None or host.thirdparty is None:
            return 0
        # Only now: hosts of other runs need no gmpy2.
        from coterie.parties.latents import LatentUploads

        calls = LatentUploads(
            host.party.channel, host.thirdparty, host.directory_key, Retry(limit_s=_LATER_S)
        )

        async def forget(user: int) -> bool:
            upload = self._upload(user)
            if not upload.secret and upload.older is None:
                return False
            await calls.forget(upload, host.settings.run)
            return True

        return await self._forget_each(forget)

    def _made(self) -> LatentExchange | None:
        host = self._host
        if host.settings.latents is None or host.thirdparty is None or host.directory is None:
            self._go_without("the host's configuration has no [latents]")
            return None
        if self._exchange is None:
            try:
                self._custody = self._holds(host.settings.latents, host.thirdparty, host.directory)
                kept = KeptLatents(host.settings.state, host.settings.run)
                self._exchange = LatentExchange(
                    self._custody, self._calls, self._upload, _obfuscators, self._note, kept
                )
            except (CertificateError, VerificationError) as error:
                # Looked at again before the next sum: the file may be there then.
                self._go_without(error.message)
                return None
        return self._exchange

    def _holds(self, settings: KeySettings, thirdparty: Channel, directory: Directory) -> KeyCustody:
        """Return the custody of the run's key: that of the sums, where hosts share the key of these."""
        host = self._host
        if host.custody is not None:
            return _OfSums(host.custody)
        # Only now: hosts of other runs need no gmpy2.
        from coterie.parties.custody import Custody

        return Custody(
            thirdparty,
            self._holder,
            key_trust(host.settings.run, settings, host.revoked),
            host.settings.state / _FOLDER,
            directory.bundles,
            timeout_s=_LATER_S,
            retry=Retry(limit_s=_LATER_S),
        )

    @property
    def _holder(self) -> Identity:
        """The participant that holds the key for all users of this host: the first of them, or that of the sums."""
        if self._host.custody is None:
            return self._host.identities[0]
        (found,) = identities(self._host.settings.state / HOLDER, 1)
        return found

    def _calls(self, terms: LatentTerms) -> LatentCalls:
        # Only now: hosts of other runs need no gmpy2.
        from coterie.parties.latents import LatentCalls as Calls

        host = self._host
        if host.thirdparty is None:
            raise AssertionError("calls are made once there is a connection")
        return Calls(
            host.party.channel,
            host.thirdparty,
            host.directory_key,
            self._holder,
            terms,
            Retry(limit_s=_LATER_S),
        )

    def _upload(self, user: int) -> LatentUpload:
        """Return what the host keeps of a user's upload."""
        from coterie.parties.latents import LatentUpload

        if user not in self._uploads:
            settings = self._host.settings
            folder = settings.state / _FOLDER
            folder.mkdir(mode=0o700, exist_ok=True)
            path = folder / f"{settings.run}.user-{user}"
            self._uploads[user] = LatentUpload(path, self._host.party.slots[user], self._seeds.of(user))
        return self._uploads[user]


class _OfSums:
    """Custody of the key of sums, which the host's part as a key holder keeps up to date."""

    def __init__(self, custody: Custody) -> None:
        self._custody = custody

    async def ensure(self) -> Holding:
        """Return the newest key that is held, without asking the directory where there is one."""
        return self._custody.current or await self._custody.ensure()

    async def rotate(self) -> Holding:
        """Hold a key of a higher epoch."""
        return await self._custody.rotate()


def _obfuscators(holding: Holding) -> Obfuscators:
    from coterie.secure_sum.obfuscators import holder_obfuscators

    return holder_obfuscators(holding.secrets.secret)
