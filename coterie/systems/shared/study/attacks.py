"""Attacks on a run of FedMVMF, FedMF or FCF, by the server's transcript: sums received, models sent.

A contribution of one user is used to reconstruct that user's ratings.  A sum over the users of a host or of a cohort is
attacked as if it came from one user, whose reconstruction is then taken for each user of the sum; and it is taken apart
into profiles.  ``docs/systems/mvmf-attacks.md`` explains the attacks.

FCF is FedMVMF with other settings.  A contribution of FedMF is converted into one of FedMVMF first: a row's change
without the part of the ridge is twice the rate times :math:`f(i, j)`, exactly so with one local epoch.  Systems that
learn biases bring an attack of their own, for which a user's first contribution is kept as well as its last ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.errors import DataError
from coterie.privacy.attacks import differencing, disaggregate, intersect
from coterie.privacy.attacks.rounds_view import RoundView, view_of_sum
from coterie.privacy.attacks.scoring import Truth, mean_auc
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import ImpossibleSumError
from coterie.secure_sum.plan import SumPlan
from coterie.studies.replay import Received, Replay
from coterie.studies.study import Recorded
from coterie.systems.shared.factor_settings import FactorSettings
from coterie.systems.shared.rated_server import Layouts
from coterie.systems.shared.study import profiles
from coterie.systems.shared.study.reconstruction import (
    Marginals,
    Reconstruction,
    Seen,
    reconstruct,
    seen_in_sum,
)
from coterie.systems.shared.study.reconstruction_accuracy import Held
from coterie.systems.shared.study.reconstruction_accuracy import report as accuracy

__all__ = ["OwnAttack", "RatedTruth", "report"]

_USERS = 100
"""Most users who are attacked one by one, spread evenly over all."""

_SUMS = 8
"""Most sums that are attacked: the last ones, over different sets of users."""

_ROUNDS = 5
"""Most rounds of a user that are intersected."""


class OwnAttack(Protocol):
    """Attack of one system on a contribution; ``first`` says whether it is the first one of its users."""

    def __call__(self, seen: Seen, /, marginals: Marginals, *, first: bool) -> Reconstruction:
        """Return the ratings that the contribution tells, as if one user had sent it."""


@dataclass(frozen=True, eq=False)
class RatedTruth:
    """Ground truth of an attack: training ratings and attributes of the users of a run.

    Attributes
    ----------
    pairs : Truth
        Pairs of user and item that have a rating.
    ratings : ndarray, shape (p,)
        Ratings of the same pairs.
    attributes : ndarray, shape (n_users, l)
        Attributes by slot, NaN where missing.

    Raises
    ------
    DataError
        Arrays that do not fit each other.
    """

    pairs: Truth
    ratings: NDArray[np.floating]
    attributes: NDArray[np.floating]

    def __post_init__(self) -> None:
        if len(self.ratings) != len(self.pairs.users) or len(self.attributes) != self.pairs.n_users:
            raise DataError(
                f"{len(self.ratings)} ratings of {len(self.pairs.users)} pairs, attributes of "
                f"{len(self.attributes)} of {self.pairs.n_users} users; expected as many"
            )

    def held(self, slot: int) -> Held:
        """Return the true ratings and attributes of one user."""
        ratings = np.zeros(self.pairs.n_items)
        own = self.pairs.users == slot
        ratings[self.pairs.items[own]] = self.ratings[own]
        return Held(ratings, self.attributes[slot])

    def marginals(self) -> Marginals:
        """Return the attacker's public knowledge: ratings and attributes counted over all users."""
        users = self.attributes[np.unique(self.pairs.users)]
        stars = np.unique(self.ratings).tolist()
        return Marginals.of(self.pairs.items, self.ratings, users, stars, self.pairs.n_items)


def report(
    recorded: Recorded,
    layouts: Layouts,
    settings: FactorSettings,
    turned: Callable[[Seen], Seen] | None = None,
    own: OwnAttack | None = None,
    trains: Callable[[SumPlan], bool] = lambda plan: True,
) -> dict[str, dict[str, Any]]:
    """Run all attacks on the server's transcript of a run of FedMVMF, FedMF or FCF.

    Parameters
    ----------
    recorded : Recorded
    layouts : Layouts
        Layouts of the contributions.
    settings : FactorSettings
        Public settings of the run, in FedMVMF's terms.
    turned : callable, optional
        Converts a contribution into one of FedMVMF, for systems whose users take steps of their own.
    own : OwnAttack, optional
        Reconstructs ratings from a contribution, instead of FedMVMF's attack.
    trains : callable
        Says of the plan of a sum of training whether it changes rows of items; others are not attacked.

    Returns
    -------
    dict
        ``reconstruction``: figures of `coterie.systems.shared.study.reconstruction_accuracy`, with ``auc``,
        ``auc_with_popularity`` and ``popularity_auc`` of guessing the rated items; ``sums``, the number of sums that
        were attacked, and ``smallest_sum``, the fewest users in one.  ``intersection`` where contributions cover one
        user, ``profiles`` where they cover several, and
        ``lengths``.  ``places`` for sparse contributions of single users: the
        intersection attack, with all items of a ciphertext that was sent.  ``disaggregate`` and ``differencing`` as for
        FedNCF.
    """
    truth = RatedTruth(recorded.truth, recorded.ratings, recorded.attributes)
    pairs = truth.pairs
    replay = Replay(recorded.transcripts, recorded.plan, models=True)
    views: list[RoundView] = []
    alone: dict[int, list[Seen]] = defaultdict(list)
    sums: dict[tuple[int, ...], Seen] = {}
    begun: dict[tuple[int, ...], Seen] = {}
    watched = set(_spread(np.unique(pairs.users), _USERS))
    for one in replay.received(layouts.layout):
        if not one.slots or max(one.slots) >= pairs.n_users:
            continue
        single = len(one.slots) == 1
        training = one.plan.purpose == Purpose.TRAIN.value
        if training and not trains(one.plan):
            continue
        if not training or not single:
            try:
                views.append(view_of_sum(one.layout, one.codes, one.slots, one.version, touched="supports"))
            except ImpossibleSumError:
                continue
        if not training or (single and one.slots[0] not in watched):
            continue
        seen = _seen(one, replay.model(one.plan))
        if seen is None:
            continue
        if turned is not None:
            seen = turned(seen)
        if own is not None and (single or len(begun) < _USERS + _SUMS):
            begun.setdefault(one.slots, seen)
        if single:
            kept = alone[one.slots[0]]
            kept[:] = [*kept[-(_ROUNDS - 1) :], seen]
        else:
            sums.pop(one.slots, None)
            sums[one.slots] = seen
            if len(sums) > _SUMS:
                del sums[next(iter(sums))]
    marginals = truth.marginals()
    taken: dict[int, Reconstruction] = {}
    if own is not None:
        # A single user's contribution decides before a sum over several.
        for users, seen in sorted(begun.items(), key=lambda one: -len(one[0])):
            taken.update(dict.fromkeys(users, own(seen, marginals, first=True)))
    for users, seen in sums.items() if own is None else ():
        # The last sum that covers a user decides.
        taken.update(dict.fromkeys(users, reconstruct(seen, settings, marginals)))
    for user, rounds in alone.items() if own is None else ():
        # Under SGD a factor steps from one contribution to the next; under SemiALS each is solved for anew.  FedMF's
        # steps differ from these.
        if settings.update == "sgd" and len(rounds) > 1 and turned is None:
            taken[user] = reconstruct(rounds[-2], settings, marginals, second=rounds[-1])
        else:
            taken[user] = reconstruct(rounds[-1], settings, marginals)
    sizes = [*map(len, sums), *([1] * len(alone))]
    found = {"reconstruction": _reconstruction(taken, truth, marginals, sizes)}
    if alone:
        found["intersection"] = _intersection(
            {user: _touched(rounds) for user, rounds in alone.items()}, truth
        )
        found["lengths"] = _lengths(alone, truth)
    if sent := _sent(replay, layouts, watched):
        found["places"] = _intersection(sent, truth)
    if sums:
        found["profiles"] = _profiles(sums, truth, settings, marginals, own)
    found["disaggregate"] = dict(disaggregate.report(views, pairs))
    found["differencing"] = dict(differencing.report(views, pairs))
    return found


def _spread(users: NDArray[np.integer], most: int) -> list[int]:
    chosen = np.unique(np.linspace(0, len(users) - 1, min(most, len(users))).astype(np.intp))
    return [int(user) for user in users[chosen]]


def _seen(one: Received, model: Mapping[str, NDArray[np.float32]] | None) -> Seen | None:
    """Return a contribution with the version that its members were sent; None where that is unknown."""
    if model is None:
        return None
    items = model["items"]
    attributes = model.get("attributes", np.zeros((0, items.shape[1]), np.float32))
    try:
        return seen_in_sum(one.codes, one.layout, items, attributes, users=len(one.slots))
    except (ImpossibleSumError, DataError):
        # The server refuses these, too: no possible sum, or a sum over another catalogue.
        return None


def _reconstruction(
    taken: Mapping[int, Reconstruction], truth: RatedTruth, marginals: Marginals, sizes: Sequence[int]
) -> dict[str, Any]:
    slots = sorted(taken)
    figures: dict[str, Any] = dict(
        accuracy([taken[slot] for slot in slots], [truth.held(slot) for slot in slots], marginals)
    )
    popularity = truth.pairs.popularity()
    between = popularity / (2 * max(float(popularity.max(initial=0)), 1.0))
    areas = []
    for slot in slots:
        # Log-odds may be infinite: by their order, popularity between equals.
        order = np.unique(taken[slot].rated, return_inverse=True)[1]
        areas.append(mean_auc(order + between, (truth.held(slot).ratings > 0)[None])[0])
    known = [area for area in areas if area is not None]
    return {
        "auc": figures.pop("existence_auc"),
        "auc_with_popularity": float(np.mean(known)) if known else None,
        "popularity_auc": figures.pop("popularity_auc"),
        "sums": len(sizes),
        "smallest_sum": min(sizes, default=None),
        **figures,
    }


def _lengths(alone: Mapping[int, Sequence[Seen]], truth: RatedTruth) -> dict[str, Any]:
    """Guess each user's rated items by the lengths of their rows in the user's contributions.

    Rows of items that a user has not rated are zero without noise, and noise alone with it.
    """
    slots = sorted(alone)
    rated = np.stack([truth.held(slot).ratings > 0 for slot in slots])
    scores = np.stack(
        [np.sum([np.square(one.items).sum(axis=1) for one in alone[slot]], axis=0) for slot in slots]
    )
    return {
        "users": len(slots),
        "auc": mean_auc(scores, rated)[0],
        "popularity_auc": mean_auc(truth.pairs.popularity().astype(np.float64), rated)[0],
    }


def _touched(rounds: Sequence[Seen]) -> list[NDArray[np.bool_]]:
    return [one.touched for one in rounds]


def _sent(replay: Replay, layouts: Layouts, watched: Collection[int]) -> dict[int, list[NDArray[np.bool_]]]:
    """Return which items a sparse contribution may touch, by the ciphertexts sent: bool (n_items,) a round."""
    layout, n_items = layouts.training, layouts.n_items
    first, width = layout.places["items"].start, layout["items"].size // n_items
    begins = first + width * np.arange(n_items)
    found: dict[int, list[NDArray[np.bool_]]] = defaultdict(list)
    for slots, sent, each in replay.places(layout):
        if len(slots) == 1 and slots[0] in watched:
            # A row may lie in several ciphertexts: a user with the item has sent the first and the last of them.
            kept = found[slots[0]]
            kept[:] = [*kept[-(_ROUNDS - 1) :], sent[begins // each] & sent[(begins + width - 1) // each]]
    return found


def _intersection(touched: Mapping[int, Sequence[NDArray[np.bool_]]], truth: RatedTruth) -> dict[str, Any]:
    """Report the intersection attack over as many rounds as every user was seen in."""
    users = sorted(touched)
    rounds = min(len(touched[user]) for user in users)
    rated = np.stack([truth.held(user).ratings > 0 for user in users])
    seen = [np.stack([touched[user][-at] for user in users]) for at in range(rounds, 0, -1)]
    return dict(intersect.report(seen, rated, truth.pairs.popularity())[-1])


def _profiles(
    sums: Mapping[tuple[int, ...], Seen],
    truth: RatedTruth,
    settings: FactorSettings,
    marginals: Marginals,
    own: OwnAttack | None,
) -> dict[str, Any]:
    """Report the profiles found in each sum, as means over sums."""
    found = []
    one_user = None if own is None else partial(own, marginals=marginals, first=False)
    for users, seen in sums.items():
        named = profiles.profiles(seen, settings, marginals, users=len(users), one_user=one_user)
        found.append(profiles.report(named, np.stack([truth.held(user).ratings for user in users])))

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if known else None

    return {
        "sums": len(found),
        "smallest_sum": min(one["users"] for one in found),
        "profiles": mean([one["profiles"] for one in found]),
        "right": mean([one["right"] for one in found]),
        "found": mean([one["found"] for one in found]),
        "exposed": mean([one["exposed"] for one in found]),
    }
