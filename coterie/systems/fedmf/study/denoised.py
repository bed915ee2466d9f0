"""Attack on FedRec++ by the server: sums of noise over few users tell which of their touched items are sampled.

The server sees which items each user touches, by a rating or a sample, and of how many users of a group an item was
sampled.  An item that nobody of a group sampled was rated by all who touched it, and one that all of them sampled by
none.  In between the share is the guess.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.privacy.attacks.scoring import Truth
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import ImpossibleSumError
from coterie.studies.replay import Replay
from coterie.studies.study import Recorded
from coterie.systems.fedmf.server import layouts
from coterie.systems.fedmf.settings import FedMfSettings
from coterie.systems.fedmf.study.fillings import judged

__all__ = ["attack_noise_sums", "rated_shares"]


def attack_noise_sums(recorded: Recorded, settings: FedMfSettings) -> dict[str, Any] | None:
    """Guess who rated what by the sums of noise in SUPPORTS.

    Returns
    -------
    dict or None
        As `coterie.systems.fedmf.study.fillings.judged`, and ``certain``, the share of what users touched of which the
        sums tell for sure whether it was rated.  None where there was no sum of noise.
    """
    truth: Truth = recorded.truth
    replay = Replay(recorded.transcripts, recorded.plan)
    shape = layouts(settings, truth.n_items)
    touched: dict[int, NDArray[np.bool_]] = {}
    for one in replay.received(shape.layout):
        if one.plan.purpose != Purpose.SUPPORTS.value or len(one.slots) != 1:
            continue
        try:
            touched[one.slots[0]] = one.layout.decode(one.codes, 1)["supports"] > 0
        except ImpossibleSumError:
            continue
    scores: dict[int, NDArray[np.float64]] = {}
    for noise in replay.noise_sums():
        users = [slot for slot in noise.slots if slot in touched and slot < truth.n_users]
        # A denoiser may have sent anything.
        fits = len(noise.steps) == truth.n_items
        if noise.plan.purpose == Purpose.SUPPORTS.value and users and fits:
            scores |= rated_shares({user: touched[user] for user in users}, noise.steps)
    if not scores:
        return None
    known = np.concatenate([each[each >= 0] for each in scores.values()])
    return {**judged(scores, truth), "certain": float(np.mean((known == 0) | (known == 1)))}


def rated_shares(
    touched: dict[int, NDArray[np.bool_]], sampled: NDArray[np.integer]
) -> dict[int, NDArray[np.float64]]:
    """Return each user's scores of all items, given how many users of its group sampled each of them.

    Parameters
    ----------
    touched : dict of int to ndarray of bool, shape (I,)
        Items that each user of a group touches.
    sampled : ndarray of int, shape (I,)

    Returns
    -------
    dict of int to ndarray of float64, shape (I,)
        Share of those who touch an item that rated it; -1 where the user does not touch it.
    """
    counts = np.sum(list(touched.values()), axis=0)
    share = np.clip((counts - sampled) / np.maximum(counts, 1), 0, 1)
    return {user: np.where(own, share, -1.0) for user, own in touched.items()}
