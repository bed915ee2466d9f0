"""Attacks on a run of FPL, by the updates of items' biases in the server's transcript.

In a contribution the bias of an item that the user has moves up and that of a sampled item down, by the same amount in
a triple: its sign says which is which.  Below a share of 1 a user keeps some of its own updates to itself; but sampled
items are drawn anew in each round, from all items that it has not, so that after many rounds the items of which it
never sent anything are its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.privacy.attacks import differencing, disaggregate
from coterie.privacy.attacks.rounds_view import RoundView, known_slots, view_of_sum
from coterie.privacy.attacks.scoring import Truth, mean_auc, with_popularity
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import ImpossibleSumError
from coterie.studies.replay import Replay
from coterie.studies.study import Recorded
from coterie.systems.fpl.host import FplHost
from coterie.systems.fpl.server import layouts
from coterie.systems.fpl.settings import FplSettings
from coterie.systems.shared.rated_server import open_anywhere

__all__ = ["BiasMoves", "attack", "attack_biases", "signs_of_a_round"]

_ATTACKED = 200
"""Most users of whom `signs_of_a_round` guesses the items."""


@dataclass(frozen=True, eq=False)
class BiasMoves:
    """One received sum of updates of items' biases.

    Attributes
    ----------
    slots : ndarray of int, shape (n,)
        Slots of the users whom the sum covers.
    moves : ndarray of float, shape (I,)
    """

    slots: NDArray[np.integer]
    moves: NDArray[np.floating]


def attack(recorded: Recorded) -> dict[str, dict[str, Any]]:
    """Run all attacks on the server's transcript of a run of FPL.

    Returns
    -------
    dict
        ``signs`` and ``absence`` as `attack_biases` returns them; ``disaggregate`` and ``differencing`` as for other
        systems in rounds.
    """
    settings, truth = FplSettings.from_json(recorded.plan.settings), recorded.truth
    layout = layouts(settings, truth.n_items).layout
    kept: list[RoundView] = []
    moves: list[BiasMoves] = []
    for one in Replay(recorded.transcripts, recorded.plan).received(layout):
        try:
            view = view_of_sum(one.layout, one.codes, one.slots, one.version, touched="supports")
        except ImpossibleSumError:
            # The server refuses these, too.
            continue
        for known in known_slots([view], truth.n_users):
            if known.rows is not None:
                moves.append(BiasMoves(known.slots, known.rows[:, 0].copy()))
            # Contributions of single users need no taking apart, and there are many.
            if one.plan.purpose != Purpose.TRAIN.value or len(one.slots) > 1:
                kept.append(known)
    return {
        **attack_biases(moves, truth),
        "disaggregate": dict(disaggregate.report(kept, truth)),
        "differencing": dict(differencing.report(kept, truth)),
    }


def attack_biases(received: Iterable[BiasMoves], truth: Truth) -> dict[str, dict[str, Any]]:
    """Guess users' items by how the biases of items move.

    Of a sum over several users the same is guessed for each of them.

    Parameters
    ----------
    received : iterable of BiasMoves
        Sums of rounds of training, oldest first.
    truth : Truth

    Returns
    -------
    dict
        ``signs``, by the last sum that covers a user, whose items with a move above 0 are named; ``absence``, by all
        of them added up, where items are named that were never moved down, moved or not.  Each has ``auc``,
        ``auc_with_popularity`` and ``popularity_auc``; ``precision`` and ``recall`` of the pairs of user and item that
        are named; ``users``, and ``rounds``, the number of sums over a user that were used at most.
    """
    consumed, popularity = truth.consumed(), truth.popularity()
    last = np.zeros(consumed.shape, np.float32)
    total = np.zeros(consumed.shape, np.float32)
    fallen = np.zeros(consumed.shape, np.bool_)
    rounds = np.zeros(truth.n_users, np.int64)
    for one in received:
        last[one.slots] = one.moves
        total[one.slots] += one.moves.astype(np.float32)
        fallen[one.slots] |= one.moves < 0
        rounds[one.slots] += 1
    users = np.flatnonzero((rounds > 0) & consumed.any(axis=1))
    own = consumed[users]

    def judged(scores: NDArray[np.float32], named: NDArray[np.bool_], most: int) -> dict[str, Any]:
        hits = int((named & own).sum())
        return {
            "auc": mean_auc(scores, own)[0],
            "auc_with_popularity": mean_auc(with_popularity(scores, popularity), own)[0],
            "popularity_auc": mean_auc(popularity, own)[0],
            "precision": hits / int(named.sum()) if named.any() else None,
            "recall": hits / int(own.sum()) if own.any() else None,
            "users": len(users),
            "rounds": most,
        }

    most = int(rounds.max(initial=0))
    return {
        "signs": judged(last[users], last[users] > 0, min(most, 1)),
        "absence": judged(total[users], ~fallen[users], most),
    }


def signs_of_a_round(
    sides: Sequence[FplHost], model: Mapping[str, NDArray[np.float32]], round_: int
) -> dict[str, float]:
    """Guess users' items by sign and size of what one more round of training would move the biases of items.

    The attacker knows the model and takes off its ridge, once for each row that a user sends.  Nothing is trained:
    hosts compute what they would contribute.

    Parameters
    ----------
    sides : sequence of FplHost
        Hosts, with the factors that users keep.
    model : mapping
        The version that the round would train.
    round_ : int
        Number of the round.

    Returns
    -------
    dict
        Mean AUC over up to 200 users, absent where no user can be judged: ``signs_auc``, from each user's contribution
        in clear; ``signs_auc_sum``, from the sum over all users, as a masked sum reveals it; ``popularity_auc``, from
        how many of all users have an item.
    """
    ridge = sides[0].settings.ridge * model["items"][:, 0].astype(np.float64)
    allowed = open_anywhere(model)
    alone: list[NDArray[np.float64]] = []
    owned: list[NDArray[np.bool_]] = []
    together, popularity = np.zeros(len(ridge)), np.zeros(len(ridge))
    for side in sides:
        everybody = np.arange(len(side.keys))
        updates = side.updates(model, everybody, allowed, round_=round_)
        for update in sorted(updates, key=lambda one: one.index):
            moves, own = np.zeros(len(ridge)), np.zeros(len(ridge), np.bool_)
            moves[update.rows] = update.change[:, 0] + ridge[update.rows]
            own[side.items_of(update.index)] = True
            together += moves
            popularity += own
            if len(alone) < _ATTACKED and own.any():
                alone.append(moves)
                owned.append(own)
    consumed = np.array(owned)
    guesses = {"signs_auc": np.array(alone), "signs_auc_sum": together, "popularity_auc": popularity}
    areas = {name: mean_auc(scores, consumed)[0] for name, scores in guesses.items()} if owned else {}
    return {name: area for name, area in areas.items() if area is not None}
