"""Attacks of the COS on DRIFT's published form: both leaks, measured on its transcript of a run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

import numpy as np

from coterie.privacy.attacks.scoring import Truth, flag_accuracies, mean_auc, with_popularity
from coterie.systems.drift.study.exchanges import Exchange, read_exchanges
from coterie.systems.drift.study.gradient_sign import GradientSign
from coterie.systems.drift.study.requested_rows import RequestedRows
from coterie.wire.v1.orchestrator_pb2 import RunPlan

__all__ = ["AttackReport", "GradientSignReport", "RequestedRowsReport", "report"]


class RequestedRowsReport(TypedDict):
    """Accuracy of guessing which items users interacted with, from the rows named in requests.

    ``auc`` uses the transcript alone, ``auc_with_popularity`` breaks ties by popularity, ``popularity_auc``
    uses popularity alone.
    """

    auc: float | None
    auc_with_popularity: float | None
    popularity_auc: float | None
    users: int
    pairs: int
    exchanges: int


class GradientSignReport(TypedDict):
    """Accuracy of guessing which items users interacted with, and which they liked, from item gradients.

    The attacker is sure of ``attributed`` pairs; ``precision`` of them are true, and these are ``coverage``
    of all ``pairs``.  Flag accuracies are over the true pairs that the attacker is sure of, and with ``_all``
    over all pairs: a leak under noise shows there.
    """

    auc: float | None
    auc_with_popularity: float | None
    popularity_auc: float | None
    users: int
    pairs: int
    attributed: int
    precision: float | None
    coverage: float | None
    flag_accuracy: float | None
    majority_accuracy: float | None
    item_majority_accuracy: float | None
    flag_accuracy_all: float | None
    majority_accuracy_all: float | None
    item_majority_accuracy_all: float | None
    gradients: int
    unsolved: int


class AttackReport(TypedDict):
    """Report of both attacks, ready for JSON; None where there was nothing to measure."""

    requested_rows: RequestedRowsReport
    gradient_sign: GradientSignReport


def report(transcripts: Iterable[Path | str], truth: Truth, plan: RunPlan) -> AttackReport:
    """Attack a run by the messages that the COS received and sent.

    Parameters
    ----------
    transcripts : iterable of Path
        Transcripts of the COS, oldest first.
    truth : Truth
        Interactions of users, by slot and by index in the catalogue; used to judge the guesses only.
        Records that never became part of a block leave no trace: without them the AUCs cover the training
        data only, with them all records.
    plan : RunPlan
        The run's plan: its name, its step size, and whether the loss has a ridge.

    Returns
    -------
    AttackReport
        AUCs are means over users, with that of an attacker who knows only item popularity.
    """
    rows = RequestedRows(truth.n_users, truth.n_items)
    sign = GradientSign(truth.n_users, truth.n_items, ridge=plan.ridge > 0)
    for exchange in read_exchanges(transcripts, plan.run_id, plan.rate):
        if not _within(exchange, truth):
            # The request names ids that do not exist: the COS refused it.
            continue
        rows.add(exchange)
        if exchange.carried:
            sign.add(exchange.gradient)

    consumed = truth.consumed()
    pairs = int(consumed.sum())
    popularity_auc, users = mean_auc(truth.popularity(), consumed)
    return AttackReport(
        requested_rows=RequestedRowsReport(
            auc=mean_auc(rows.scores, consumed)[0],
            auc_with_popularity=mean_auc(with_popularity(rows.scores, truth.popularity()), consumed)[0],
            popularity_auc=popularity_auc,
            users=users,
            pairs=pairs,
            exchanges=rows.exchanges,
        ),
        gradient_sign=_sign_report(sign, truth, popularity_auc, users, pairs),
    )


def _within(exchange: Exchange, truth: Truth) -> bool:
    seen = exchange.gradient
    users, items = [exchange.users], [exchange.items]
    if seen is not None:
        users.append(seen.users)
        items.append(seen.items)
    return all(
        int(ids.max(initial=0)) < limit
        for named, limit in ((users, truth.n_users), (items, truth.n_items))
        for ids in named
    )


def _sign_report(
    sign: GradientSign, truth: Truth, popularity_auc: float | None, users: int, pairs: int
) -> GradientSignReport:
    attributed = sign.attributed()
    named = int(attributed.sum())
    found = attributed[truth.users, truth.items]
    right = int(found.sum())
    votes = sign.votes[truth.users, truth.items]
    sure = flag_accuracies(truth, votes, found)
    everywhere = flag_accuracies(truth, votes, np.ones_like(found))
    return GradientSignReport(
        auc=mean_auc(sign.scores, truth.consumed())[0],
        auc_with_popularity=mean_auc(with_popularity(sign.scores, truth.popularity()), truth.consumed())[0],
        popularity_auc=popularity_auc,
        users=users,
        pairs=pairs,
        attributed=named,
        precision=right / named if named else None,
        coverage=right / pairs if pairs else None,
        flag_accuracy=sure.votes,
        majority_accuracy=sure.majority,
        item_majority_accuracy=sure.item_majority,
        flag_accuracy_all=everywhere.votes,
        majority_accuracy_all=everywhere.majority,
        item_majority_accuracy_all=everywhere.item_majority,
        gradients=sign.gradients,
        unsolved=sign.unsolved,
    )
