"""Answer users' applications: record interactions, recommend items, show disclosure receipts."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import sqlalchemy as sa

from coterie.errors import DataError
from coterie.evaluation.holdout import TRAIN
from coterie.store import client as store
from coterie.telemetry.experiment import EXPERIMENT
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import client_pb2 as wire
from coterie.wire.v1.client_pb2_grpc import UserAgentServicer
from coterie_client.history import Histories
from coterie_client.host import Recommended
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
} | {
    f"{what} ({how})": protection
    for what in CONTRIBUTIONS.values()
    for how, protection in (
        ("clear", "in clear"),
        ("masked", "masked: only the sum over the cohort"),
        ("encrypted", "encrypted: key holders open only the sum over the cohort"),
        (
            "shared-key",
            "encrypted under a key that participants share: they open only the sum over the cohort",
        ),
    )
}
"""Protection under which each kind of datum leaves the host, in words."""


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
    """

    def __init__(
        self,
        histories: Histories,
        engine: sa.Engine,
        recommend: Callable[[int, int], Awaitable[Recommended]],
        recorded: Callable[[str], int],
        ratings: Callable[[], tuple[float, float] | None],
        experiment: Callable[[], bool] = lambda: False,
    ) -> None:
        self._histories = histories
        self._engine = engine
        self._recommend = recommend
        self._recorded = recorded
        self._ratings = ratings
        self._experiment = experiment

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
        summed = kind.rpartition(" (")[0] in CONTRIBUTIONS.values()
        return f"{protection}; an experiment: {EXPERIMENT}" if summed and self._experiment() else protection

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
