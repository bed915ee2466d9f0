"""Attacks on a run of EASE: what the sum of pairs in the server's transcript tells of single users."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.privacy.attacks import differencing, disaggregate
from coterie.privacy.attacks.rounds_view import RoundView, view_of_sum
from coterie.privacy.attacks.scoring import Truth, mean_auc, with_popularity
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import ImpossibleSumError
from coterie.studies.replay import Received, Replay
from coterie.studies.study import Recorded
from coterie.systems.ease.mathematics import pairs_of, symmetric
from coterie.systems.ease.settings import EaseSettings

__all__ = ["attack", "attack_pairs"]


def attack(recorded: Recorded) -> dict[str, dict[str, Any]]:
    """Run all attacks on the server's transcript of a run of EASE.

    Returns
    -------
    dict
        ``pairs`` and ``singles`` as `attack_pairs` returns them; ``disaggregate`` and ``differencing`` as for other
        systems in rounds.
    """
    settings, truth = EaseSettings.from_json(recorded.plan.settings), recorded.truth
    received = list(
        Replay(recorded.transcripts, recorded.plan).received(
            lambda purpose: settings.layout(purpose, truth.n_items)
        )
    )
    views = list(_views(received))
    return {
        **attack_pairs(list(_grams(received, settings, truth.n_items)), truth),
        "disaggregate": dict(disaggregate.report(views, truth)),
        "differencing": dict(differencing.report(views, truth)),
    }


def _views(received: Iterable[Received]) -> Iterator[RoundView]:
    for one in received:
        if one.plan.purpose == Purpose.SUPPORTS.value:
            try:
                yield view_of_sum(one.layout, one.codes, one.slots, one.version, touched="supports")
            except ImpossibleSumError:
                continue


def _grams(
    received: Iterable[Received], settings: EaseSettings, n_items: int
) -> Iterator[tuple[tuple[int, ...], NDArray[np.floating]]]:
    """Yield each sum of pairs: its users, and its counts as a matrix."""
    for one in received:
        if one.plan.purpose != Purpose.TRAIN.value:
            continue
        try:
            codes = one.layout.decode(one.codes, len(one.slots))["pairs"]
        except ImpossibleSumError:
            continue
        yield one.slots, symmetric(settings.packing.counts(codes, pairs_of(n_items)))


def attack_pairs(
    sums: Iterable[tuple[tuple[int, ...], NDArray[np.floating]]], truth: Truth
) -> dict[str, dict[str, Any]]:
    """Guess users' items by sums of pairs.

    Parameters
    ----------
    sums : iterable of (tuple of int, ndarray of float, shape (I, I))
        Slots of the users of each sum, and its counts.  The last sum that covers a user decides.
    truth : Truth

    Returns
    -------
    dict
        ``pairs``: the attacker knows one item of each user, that with the smallest count in the sum, and ranks the
        others by their counts with it; ``auc``, ``auc_with_popularity`` and ``popularity_auc``, over all items but the
        known one, and ``users``.  ``singles``: items whose count is 1 have one user, whose history is their row;
        ``precision`` and ``recall`` of the pairs of user and item that are named so, if the attacker knows who has the
        item, and ``histories``, the share of users of whom all items are named and no others.
    """
    consumed, popularity = truth.consumed(), truth.popularity()
    guesses: dict[int, tuple[int, NDArray[np.floating]]] = {}
    named = np.zeros_like(consumed)
    for slots, gram in sums:
        own = np.rint(np.diag(gram))
        users = [slot for slot in slots if slot < truth.n_users and consumed[slot].any()]
        for user in users:
            items = np.flatnonzero(consumed[user])
            # Closed items have a count of 0: nothing is known of who has them.
            counted = items[own[items] > 0] if (own[items] > 0).any() else items
            rarest = int(counted[np.argmin(own[counted])])
            guesses[user] = rarest, gram[rarest]
            for item in items[own[items] == 1]:
                named[user] |= np.rint(gram[item]) == 1
    users = sorted(guesses)
    areas: dict[str, list[float]] = {"auc": [], "auc_with_popularity": [], "popularity_auc": []}
    for user in users:
        rarest, row = guesses[user]
        others = np.arange(truth.n_items) != rarest
        true = consumed[user, others][None]
        for name, guess in (
            ("auc", row[others]),
            ("auc_with_popularity", with_popularity(row[others][None], popularity[others])[0]),
            ("popularity_auc", popularity[others]),
        ):
            area, _ = mean_auc(guess, true)
            if area is not None:
                areas[name].append(area)
    right, read = consumed[users], named[users]
    hits = int((right & read).sum())
    return {
        "pairs": {
            **{name: float(np.mean(found)) if found else None for name, found in areas.items()},
            "users": len(users),
        },
        "singles": {
            "users": len(users),
            "precision": hits / int(read.sum()) if read.any() else None,
            "recall": hits / int(right.sum()) if right.any() else None,
            "histories": float((right == read).all(axis=1).mean()) if users else None,
        },
    }
