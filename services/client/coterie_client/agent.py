"""Answer users' applications: record interactions, recommend items, show disclosure receipts."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import sqlalchemy as sa

from coterie.errors import DataError
from coterie.evaluation.holdout import TRAIN
from coterie.parties.latent_exchange import VECTOR
from coterie.parties.neighbourhood import ASKED, PUBLISHED
from coterie.rounds.privacy import epsilon
from coterie.rounds.training import Purpose
from coterie.secure_sum.privacy import EXACT, Privacy
from coterie.store import client as store
from coterie.systems.registry import preferences_of
from coterie.systems.shared.preferences import objection
from coterie.telemetry.experiment import EXPERIMENT
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import client_pb2 as wire
from coterie.wire.v1.client_pb2_grpc import UserAgentServicer
from coterie_client.history import Histories
from coterie_client.host import Recommended
from coterie_client.preferences import Preferences
from coterie_client.receipts import CONTRIBUTIONS

__all__ = ["Agent"]

_MAX_K = 1000

PROTECTIONS = {
    "interaction": "sealed to the owner",
    "user row": "sealed to the owner",
    "metric sum": "sum over the host's users",
    "record count": "sum over the host's users",
    "registration": "public keys and signatures",
    "round keys": "public keys and signatures",
    "confirmation": "a signature",
    "sealed shares": "sealed to each neighbour",
    "revealed shares": "of each neighbour one of two secrets",
    "sums of noise": "of users of other hosts, added up",
    PUBLISHED: "sealed to the third party, without the user's name; the embedding also to hosts of neighbours",
    ASKED: "sealed to the third party, without the user's name",
    VECTOR: "encrypted, and sealed to the third party, without the user's name",
} | {
    f"{what} ({how})": protection
    for what in CONTRIBUTIONS.values()
    for how, protection in (
        ("clear", "in clear"),
        ("denoised", "in clear, with noise that denoisers on other hosts take out of the sum"),
        ("masked", "masked: only the sum over the cohort"),
        ("encrypted", "encrypted: key holders open only the sum over the cohort"),
        (
            "shared-key",
            "encrypted under a key that participants share: they open only the sum over the cohort",
        ),
    )
}
"""Protection under which each kind of datum leaves the host, in words."""


def _summed(kind: str) -> bool:
    """Return whether data of a kind are contributions to sums."""
    return kind.rpartition(" (")[0] in CONTRIBUTIONS.values()


class Agent(UserAgentServicer):
    """The gRPC servicer that users' applications call.

    Parameters
    ----------
    histories : Histories
        The users' histories.
    engine : sqlalchemy.Engine
        The store, for receipts.
    recommend : callable
        ``(user, k) -> (item keys, scores, version)``, without items that the user has seen.
    recorded : callable
        Called with the item's key once a new interaction is durable; returns how many owners will be sent it.
    ratings : callable
        Returns the lowest and highest rating that the run learns from; None when it learns from no ratings.
    experiment : callable
        Returns whether floors of the run's sums count users and not devices.
    preferences : Preferences
        What the users have set for themselves.
    system : callable
        Returns the name of the run's system; empty before the host has joined.
    privacy : callable
        Returns the terms of noise in contributions to the run.
    """

    def __init__(
        self,
        histories: Histories,
        engine: sa.Engine,
        recommend: Callable[[int, int], Awaitable[Recommended]],
        recorded: Callable[[str], int],
        ratings: Callable[[], tuple[float, float] | None],
        experiment: Callable[[], bool] = lambda: False,
        *,
        preferences: Preferences,
        system: Callable[[], str],
        privacy: Callable[[], Privacy] = lambda: EXACT,
    ) -> None:
        self._histories = histories
        self._engine = engine
        self._recommend = recommend
        self._recorded = recorded
        self._ratings = ratings
        self._experiment = experiment
        self._preferences = preferences
        self._system = system
        self._privacy = privacy

    def _user(self, name: str) -> int:
        try:
            return self._histories.number(name)
        except DataError as error:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
                error.message,
                field="user",
                expected="a user of this host",
            ) from error

    async def RecordInteraction(  # noqa: N802
        self, request: wire.RecordInteractionRequest, context: Any
    ) -> wire.RecordInteractionResponse:
        """Store an interaction; it may reach the item's owners after this returns."""
        user = self._user(request.user)
        if not request.item:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD, "no item", field="item", expected="an item's key"
            )
        rating = self._rating(request.rating) if request.HasField("rating") else None
        interaction = store.Interaction(user, request.item, request.positive, int(time.time()), TRAIN, rating)
        await self._histories.take([], [interaction])
        return wire.RecordInteractionResponse(owners=self._recorded(request.item))

    def _rating(self, rating: float) -> float:
        allowed = self._ratings()
        if allowed is not None and allowed[0] <= rating <= allowed[1]:
            return rating
        raise Refusal(
            ErrorReason.ERROR_REASON_INVALID_FIELD,
            "a rating out of range, or in a run that learns from none",
            field="rating",
            expected="none" if allowed is None else f"{allowed[0]:g} to {allowed[1]:g}, or none",
        )

    async def Recommend(  # noqa: N802
        self, request: wire.UserRecommendRequest, context: Any
    ) -> wire.UserRecommendResponse:
        """Recommend items that the user has not seen."""
        if not 1 <= request.k <= _MAX_K:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                f"k is {request.k}",
                field="k",
                expected=f"1 to {_MAX_K}",
            )
        items, scores, version = await self._recommend(self._user(request.user), request.k)
        return wire.UserRecommendResponse(items=items, scores=scores, version=version)

    def _protection(self, kind: str) -> str:
        protection = PROTECTIONS.get(kind, "clear")
        said = _summed(kind) and self._experiment()
        return f"{protection}; an experiment: {EXPERIMENT}" if said else protection

    def _price(self, lines: Iterable[wire.Disclosure], rows: Iterable[sa.Row[Any]]) -> None:
        """Add to the lines of contributions what noise is in them, and what all of them cost a user so far."""
        terms = self._privacy()
        if not terms.on:
            return
        sums: dict[int, int] = {}
        for row in rows:
            if _summed(row.kind):
                sums[row.user] = sums.get(row.user, 0) + row.acknowledged
        # Those of the whole host (user 0) are in addition to a user's own.
        most = sums.pop(0, 0) + max(sums.values(), default=0)
        if terms.per_value:
            cost = "noise for each value, which protects no user as a whole"
        else:
            spent = epsilon(terms, {Purpose.TRAIN: most})
            cost = f"{terms.place} noise, epsilon {spent:.4g} at delta {terms.delta:g} in {most} sums so far"
        for line in lines:
            if _summed(line.kind):
                line.protection += f"; {cost}"

    async def DisclosureReceipt(  # noqa: N802
        self, request: wire.DisclosureReceiptRequest, context: Any
    ) -> wire.DisclosureReceiptResponse:
        """List data that have left the host, and requests that it refused."""
        wanted = self._user(request.user) if request.user else None
        with self._engine.connect() as connection:
            rows, refused = store.load_sent(connection), store.load_declined(connection)
        found: dict[tuple[str, str], wire.Disclosure] = {}
        for row in rows:
            # Messages that the host sent for all its users (user 0) concern each of them.
            if wanted is not None and row.user not in (wanted, 0):
                continue
            line = found.setdefault(
                (row.recipient, row.kind),
                wire.Disclosure(
                    recipient=row.recipient,
                    kind=row.kind,
                    protection=self._protection(row.kind),
                    first_ms=row.first_ms,
                ),
            )
            line.count += row.acknowledged
            line.bytes += row.bytes
            line.first_ms = min(line.first_ms, row.first_ms)
            line.last_ms = max(line.last_ms, row.last_ms)
        self._price(found.values(), [row for row in rows if wanted is None or row.user in (wanted, 0)])
        declined = [
            wire.Declined(
                recipient=row.recipient,
                reason=row.reason,
                count=row.times,
                first_ms=row.first_ms,
                last_ms=row.last_ms,
            )
            for row in refused
            if wanted is None or row.user in (wanted, 0)
        ]
        return wire.DisclosureReceiptResponse(
            disclosures=[found[key] for key in sorted(found)], declined=declined
        )

    async def SetPreferences(  # noqa: N802
        self, request: wire.SetPreferencesRequest, context: Any
    ) -> wire.SetPreferencesResponse:
        """Change what a user has set for itself; a round that trains already keeps what was set before."""
        user, system = self._user(request.user), self._system()
        changes = {one.name: one.value if one.HasField("value") else None for one in request.changes}
        if len(changes) < len(request.changes):
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "a preference is changed twice",
                field="changes",
                expected="each preference once",
            )
        stated = {name: value for name, value in changes.items() if value is not None}
        if stated and not system:
            raise Refusal(
                ErrorReason.ERROR_REASON_NOT_READY,
                "this host has joined no run yet, and does not know its preferences",
                field="changes",
            )
        known = preferences_of(system)
        if objection(system, known, stated):
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "a preference that the run's system does not have, or a value out of range",
                field="changes",
                expected=", ".join(f"{one.name} from {one.lowest:g} to {one.highest:g}" for one in known)
                or "none",
            )
        await self._preferences.change(user, changes)
        return wire.SetPreferencesResponse(preferences=self._shown(user))

    async def ShowPreferences(  # noqa: N802
        self, request: wire.ShowPreferencesRequest, context: Any
    ) -> wire.ShowPreferencesResponse:
        """Show what a user has set for itself, beside what the run's system lets it set."""
        return wire.ShowPreferencesResponse(preferences=self._shown(self._user(request.user)))

    def _shown(self, user: int) -> list[wire.Preference]:
        own = dict(self._preferences.of(user))
        known = [
            wire.Preference(
                name=one.name,
                value=own.pop(one.name, None),
                meaning=one.meaning,
                lowest=one.lowest,
                highest=one.highest,
            )
            for one in preferences_of(self._system())
        ]
        return known + [wire.Preference(name=name, value=value) for name, value in own.items()]
