r"""Attack on FedRec in clear: tells rated from sampled rows of a user's contribution by what the rows say.

A contribution of one user is nearly a matrix of rank one, errors times :math:`p_u`.  All sampled items count as rated
with the same value, so :math:`e_j + p_u q_j` is one number for all of them, and for rated items one of the stars.  With
predictions as filling it is simpler: the errors of sampled items are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.privacy.attacks.scoring import Truth, mean_auc
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import ImpossibleSumError
from coterie.studies.replay import Replay
from coterie.studies.study import Recorded
from coterie.systems.fedmf.mathematics import moving
from coterie.systems.fedmf.server import layouts
from coterie.systems.fedmf.settings import FedMfSettings
from coterie.systems.shared.biases import ITEM

__all__ = ["attack_values", "judged", "own_direction", "suspicion"]

_SHORTEST, _LONGEST, _SCANNED = 0.05, 20.0, 400
"""Range and number of lengths of p that are tried where no bias gives the length."""

_SURE = 0.9
"""Share of the expected sampled items that must have one value: some are closed, or rounded away."""


def attack_values(recorded: Recorded, settings: FedMfSettings) -> dict[str, Any] | None:
    """Guess who rated what by the values of each user's last contribution.

    Returns
    -------
    dict or None
        ``auc`` over all items, those that were not touched last; ``auc_touched`` among those touched; beside them
        ``popularity_auc`` and ``popularity_auc_touched``; ``users``.  None where no contribution of one user came in
        clear.
    """
    truth: Truth = recorded.truth
    replay = Replay(recorded.transcripts, recorded.plan, models=True)
    last: dict[int, tuple[NDArray[np.float64], NDArray[np.float32], int]] = {}
    for one in replay.received(layouts(settings, truth.n_items).layout):
        model = replay.model(one.plan)
        if one.plan.purpose != Purpose.TRAIN.value or len(one.slots) != 1 or model is None:
            continue
        try:
            change = one.layout.decode(one.codes, 1)["items"]
        except ImpossibleSumError:
            continue
        if one.slots[0] < truth.n_users:
            last[one.slots[0]] = change, model["items"], one.plan.pass_number
    if not last:
        return None
    return judged(
        {
            user: suspicion(change, items, settings, predicts=settings.predicts(passed))
            for user, (change, items, passed) in last.items()
        },
        truth,
    )


def suspicion(
    change: NDArray[np.float64],
    items: NDArray[np.floating],
    settings: FedMfSettings,
    *,
    predicts: bool,
) -> NDArray[np.float64]:
    """Return how unlike a sampled item each item's row is, float64 (I,); -1 for rows that are zero.

    Parameters
    ----------
    change : ndarray of float, shape (I, K)
        A user's contribution.
    items : ndarray of float, shape (I, K)
        Version of the model that the user fetched.
    settings : FedMfSettings
    predicts : bool
        Whether sampled items counted as rated with predictions.
    """
    touched = change.any(axis=1)
    found = np.full(len(change), -1.0)
    if not touched.any():
        return found
    q = items[touched].astype(np.float64)
    rate, epochs = settings.rate, settings.local_epochs
    rows, direction = own_direction(change[touched], q, settings)
    along, products = rows @ direction, q @ direction
    if predicts:
        found[touched] = np.abs(along)
        return found
    many = max(int(_SURE * settings.samples / (1 + settings.samples) * len(q)), 1)

    def values(length: float) -> NDArray[np.float64]:
        # One epoch after the other an error shrinks by the step that it caused.
        shrunk = 1 - 2 * rate * length**2
        added = float(sum(shrunk**epoch for epoch in range(epochs)))
        return np.asarray(along / (2 * rate * length * (added or 1.0)) + length * products)

    def closest(length: float) -> tuple[float, float]:
        ordered = np.sort(values(length))
        widths = ordered[many - 1 :] - ordered[: len(ordered) - many + 1]
        at = int(widths.argmin())
        return float(widths[at]) / (float(ordered.std()) or 1.0), float(ordered[at + many // 2])

    if settings.biases:
        lengths = np.array([1 / direction[ITEM] if direction[ITEM] else 1.0])
    else:
        scanned = np.geomspace(_SHORTEST, _LONGEST, _SCANNED)
        lengths = np.concatenate([scanned, -scanned])
    best = min(lengths.tolist(), key=lambda length: closest(length)[0])
    if not settings.biases:
        near = best * np.linspace(0.98, 1.02, _SCANNED)
        best = min(near.tolist(), key=lambda length: closest(length)[0])
    found[touched] = np.abs(values(best) - closest(best)[1])
    return found


def own_direction(
    change: NDArray[np.float64], q: NDArray[np.float64], settings: FedMfSettings
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what one user's changes of rows tell of its own factor.

    Parameters
    ----------
    change : ndarray of float64, shape (t, width)
        Changes of some rows, of rated items, sampled ones or both.
    q : ndarray of float64, shape (t, width)
        These rows, as the user fetched them.
    settings : FedMfSettings

    Returns
    -------
    rows : ndarray of float64, shape (t, width)
        The changes without the part of the ridge: errors times the factor, added up over epochs.
    direction : ndarray of float64, shape (width,)
        Unit vector along the factor, or against it, over the values that rows move by.
    """
    moves = moving(settings)[1]
    rows = change + 2 * settings.rate * settings.ridge * settings.local_epochs * moves * q
    return rows, np.linalg.eigh(rows.T @ rows)[1][:, -1]


def judged(scores: Mapping[int, NDArray[np.float64]], truth: Truth) -> dict[str, Any]:
    """Return AUCs of each user's scores of all items, -1 for items that were not touched, and of popularity."""
    consumed, popularity = truth.consumed(), truth.popularity().astype(np.float64)
    users = [user for user in sorted(scores) if consumed[user].any()]

    def mean(areas: list[float | None]) -> float | None:
        known = [area for area in areas if area is not None]
        return float(np.mean(known)) if known else None

    def over(user: int, guess: NDArray[np.float64], among: NDArray[np.bool_]) -> float | None:
        return mean_auc(guess[among], consumed[user][among][None])[0]

    every = np.ones(truth.n_items, np.bool_)
    touched = {user: scores[user] >= 0 for user in users}
    return {
        "auc": mean([over(user, scores[user], every) for user in users]),
        "popularity_auc": mean([over(user, popularity, every) for user in users]),
        "auc_touched": mean([over(user, scores[user], touched[user]) for user in users]),
        "popularity_auc_touched": mean([over(user, popularity, touched[user]) for user in users]),
        "users": len(users),
    }
