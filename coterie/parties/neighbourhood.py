"""A host's users in graph expansion: publishes what they share and asks for their neighbours before sums of training.

The host's side of the system says who is due; this module calls COS and third party for them.  When these do not
answer, training goes on with the neighbours that users have, and the same users are due again at the next sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np
import structlog
from numpy.typing import NDArray

from coterie.crypto.graph_tags import TAG_BYTES
from coterie.errors import CertificateError, CoterieError, CryptoError, PeerError
from coterie.net.status import is_away
from coterie.parties.expansion import Expansion, UserUpload
from coterie.parties.graph_keys import GraphHolding
from coterie.parties.several_users import for_each_user
from coterie.rounds.sides import Expanding
from coterie.secure_sum.plan import SumPlan
from coterie.telemetry.seldom import Seldom
from coterie.wire.refusal import ErrorReason

__all__ = ["ASKED", "NO_ENTRY", "PUBLISHED", "Neighbourhood", "Note", "seed_of_user"]

_log = structlog.get_logger("coterie.expansion")

Note = Callable[[str, int, int], Awaitable[None]]
"""Notes on receipts what is about to be sent: kind, user's position, bytes."""

PUBLISHED = "item tags and embedding"
ASKED = "question for neighbours"
"""Names on receipts of the two requests."""

_OF_ONE_USER = frozenset(
    {
        ErrorReason.ERROR_REASON_CONFLICT,
        ErrorReason.ERROR_REASON_SEQUENCE_MISMATCH,
        ErrorReason.ERROR_REASON_TOO_LARGE,
        ErrorReason.ERROR_REASON_UNKNOWN_ITEM,
        ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
    }
)
"""Refusals for what one user has published or asked before."""


async def NO_ENTRY(kind: str, user: int, size: int) -> None:  # noqa: N802 - a constant that happens to be called
    """Note nothing, as in a run in one process."""


def seed_of_user(key: int) -> bytes:
    """Return the seed of a user's secrets in graph expansion, for experiments (`UserUpload`), 32 bytes.

    Parameters
    ----------
    key : int
        The user's own number, as its randomness in learning is drawn from.
    """
    return hashlib.sha256(b"coterie graph experiment" + int(key).to_bytes(8, "little")).digest()


class Neighbourhood:
    """Publishes and asks for the users of one host in one run.

    Parameters
    ----------
    calls : Expansion
    holding : callable
        Gives the graph key of the newest epoch, at least of the given one; raises PeerError, CertificateError or
        VerificationError when there is none.
    uploads : callable
        Gives what the host keeps of a user's uploads, by the user's position.
    note : callable
        Notes on receipts what is about to be sent.
    """

    def __init__(
        self,
        calls: Expansion,
        holding: Callable[[int], Awaitable[GraphHolding]],
        uploads: Callable[[int], UserUpload],
        note: Note = NO_ENTRY,
    ) -> None:
        self._calls = calls
        self._holding = holding
        self._uploads = uploads
        self._note = note
        self._silence = Seldom(_log)
        self.failure = ""
        """Why the last sum began without new neighbours; empty where nothing failed."""
        self.away = False
        """Whether it was because the third party does not answer."""

    async def before(
        self,
        side: Expanding,
        plan: SumPlan,
        model: Mapping[str, NDArray[np.float32]],
        items: Sequence[str],
        users: Sequence[int],
    ) -> None:
        """Publish and ask for those of some users that are due before a sum of training.

        Parameters
        ----------
        side : Expanding
        plan : SumPlan
        model : mapping
            Version on which the sum is formed.
        items : sequence of str
            Keys of the catalogue's items.
        users : sequence of int
            Users of the sum, by position at the host.
        """
        self.failure, self.away = "", False
        due = side.due(plan, users)
        if not due and not side.curious(plan, users):
            return
        try:
            holding = await self._holding(side.epoch(plan))
            counts = side.sharers(model)

            async def publish(user: int) -> None:
                await self._publish(side, plan, holding, items, counts, user)

            async def ask(user: int) -> None:
                await self._ask(side, plan, holding, user)

            await self._each(due, publish)
            asking = side.curious(plan, users)
            # A key that was replaced since has no upload yet; what others publish under it is asked for next time.
            late = [user for user in asking if self._uploads(user).epoch != holding.secrets.epoch]
            await self._each(late, publish)
            await self._each([user for user in asking if user not in set(late)], ask)
            self._silence.over("new neighbours again", run=plan.run_id, round=plan.round)
        except (PeerError, CertificateError, CryptoError) as error:
            self._failed(plan, error)

    async def _each(self, users: Sequence[int], call: Callable[[int], Awaitable[None]]) -> None:
        """Call for each user, a few at a time; refusals that concern a single user stop nobody else."""
        refused = await for_each_user(users, call, _OF_ONE_USER, "a user without new neighbours")
        self.failure = refused or self.failure

    def _failed(self, plan: SumPlan, error: CoterieError) -> None:
        self.failure, self.away = error.message, is_away(error)
        self._silence.warning("no new neighbours", run=plan.run_id, round=plan.round, reason=error.message)

    async def _publish(
        self,
        side: Expanding,
        plan: SumPlan,
        holding: GraphHolding,
        items: Sequence[str],
        counts: NDArray[np.int64],
        user: int,
    ) -> None:
        shared = side.shared(user)
        named = {items[item]: int(counts[item]) for item in shared.items.tolist()}

        async def note(size: int) -> None:
            await self._note(PUBLISHED, user, size)

        await self._calls.publish(self._uploads(user), holding, named.keys(), named, shared.embedding, note)
        side.published(plan, user)

    async def _ask(self, side: Expanding, plan: SumPlan, holding: GraphHolding, user: int) -> None:
        upload = self._uploads(user)
        await self._note(ASKED, user, TAG_BYTES * len(upload.tags))
        found = await self._calls.neighbours(upload, holding)
        side.met(plan, user, [one.embedding for one in found])
