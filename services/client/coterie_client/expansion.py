"""Find anonymous neighbours for a host's users in runs with graph expansion; used by `HostMembers`."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.config.services import GraphSettings
from coterie.crypto.graph_key import GraphTerms
from coterie.crypto.roster import Roster, load_roster_key
from coterie.crypto.verification import VerificationError
from coterie.errors import CertificateError
from coterie.net.channel import Channel
from coterie.net.directory import Directory
from coterie.net.retry import Retry
from coterie.parties.expansion import Expansion, UserUpload
from coterie.parties.graph_keys import GraphHolding, GraphKeys, GraphTrust
from coterie.parties.neighbourhood import Neighbourhood
from coterie.rounds.sides import Expanding
from coterie.rounds.training import Purpose
from coterie.secure_sum.plan import SumPlan
from coterie_client.exchange import HostExchange
from coterie_client.host import Host
from coterie_client.learner import Model

__all__ = ["HostExpansion"]

_FOLDER = "graph"

_FIRST_S = 60.0
"""Longest wait for the run's first graph key, seconds."""

_LATER_S = 5.0
"""Longest wait before a sum of training: for an answer, and for a newer graph key, seconds."""


class HostExpansion(HostExchange):
    """A host's part in graph expansion.

    Parameters
    ----------
    host : Host
        Registered.
    """

    def __init__(self, host: Host) -> None:
        super().__init__(host, "neighbours", "graph key", _FIRST_S)
        self._neighbourhood: Neighbourhood | None = None
        self._keys: GraphKeys | None = None
        self._uploads: dict[int, UserUpload] = {}

    async def before(
        self,
        side: Expanding,
        terms: GraphTerms,
        plan: SumPlan,
        model: Model,
        items: Sequence[str],
        users: Sequence[int],
    ) -> None:
        """Publish and ask for those of some users that are due before a sum; never fails.

        Parameters
        ----------
        side : Expanding
        terms : GraphTerms
            Those of the run's graph.
        plan : SumPlan
            In whose sum the users take part; before that of items the host begins to fetch the graph key.
        model : Model
        items : sequence of str
            Keys of the catalogue's items.
        users : sequence of int
            By position at the host.
        """
        found = self._made(terms)
        if found is None:
            return
        if self._keys is not None:
            self._begin(self._keys.ensure)
        if plan.purpose != Purpose.TRAIN.value or self._away or not await self._first_tried():
            return
        await found.before(side, plan, model.arrays, items, users)
        if found.away and self._host.thirdparty is not None:
            self._try_to_reach(self._calls(self._host.thirdparty).reach)

    async def forget(self) -> int:
        """Have the uploads of the host's users deleted at the third party; return how many users had some.

        Raises as `HostExchange._forget_each`.
        """
        thirdparty = self._host.thirdparty
        if self._host.settings.expansion is None or thirdparty is None:
            return 0
        calls = self._calls(thirdparty)

        async def forget(user: int) -> bool:
            upload = self._upload(user)
            if not upload.secret and upload.older is None:
                return False
            await calls.forget(upload, self._host.settings.run)
            return True

        return await self._forget_each(forget)

    def _calls(self, thirdparty: Channel) -> Expansion:
        return Expansion(
            self._host.party.channel, thirdparty, self._host.directory_key, Retry(limit_s=_LATER_S)
        )

    def _made(self, terms: GraphTerms) -> Neighbourhood | None:
        settings, thirdparty, directory = (
            self._host.settings.expansion,
            self._host.thirdparty,
            self._host.directory,
        )
        if settings is None or thirdparty is None or directory is None:
            self._go_without("the host's configuration has no [expansion]")
            return None
        if self._neighbourhood is None:
            try:
                self._keys = self._keys_of(settings, thirdparty, directory, terms)
            except (CertificateError, VerificationError) as error:
                # Looked at again before the next sum: the file may be there then.
                self._go_without(error.message)
                return None
            self._neighbourhood = Neighbourhood(
                self._calls(thirdparty), self._holding, self._upload, self._note
            )
        return self._neighbourhood

    def _keys_of(
        self, settings: GraphSettings, thirdparty: Channel, directory: Directory, terms: GraphTerms
    ) -> GraphKeys:
        host = self._host
        return GraphKeys(
            thirdparty,
            # The first user of a host holds the key for all of them.
            host.identities[0],
            GraphTrust(
                host.settings.run,
                Roster.load(settings.roster),
                load_roster_key(settings.roster_key),
                host.revoked,
            ),
            host.settings.state / _FOLDER,
            directory.bundles,
            terms,
            timeout_s=_LATER_S,
            retry=Retry(limit_s=_LATER_S),
        )

    async def _holding(self, least: int) -> GraphHolding:
        if self._keys is None:
            raise AssertionError("a graph key is asked for before anything is made")
        return await self._keys.ensure(least)

    def _upload(self, user: int) -> UserUpload:
        """Return what the host keeps of a user's uploads."""
        if user not in self._uploads:
            settings = self._host.settings
            path = settings.state / _FOLDER / f"{settings.run}.user-{user}"
            self._uploads[user] = UserUpload(path, self._host.party.slots[user], self._seeds.of(user))
        return self._uploads[user]
