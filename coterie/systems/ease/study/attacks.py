"""Attacks on a run of EASE: what sums of pairs, or of a sketch, in the server's transcript tell of single users."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
from coterie.systems.ease.sketch import directions, factors_of, signs
from coterie.systems.ease.study.recovery import prior, recovered

__all__ = ["Sketched", "attack", "attack_pairs", "attack_sketch"]


@dataclass(frozen=True)
class Sketched:
    """What the server learned of a sketch over the same users.

    Attributes
    ----------
    slots : tuple of int
        Slots of the users.
    opened : ndarray of bool, shape (I,)
        Open items, of which there are n.
    supports : ndarray of float, shape (n,)
        How many of the users have each open item.
    probes, products : ndarray of float, shape (n, c)
        Columns of all sums, and what the sums add up to.
    step : float
        Step to which users round values; 0 for none.
    """

    slots: tuple[int, ...]
    opened: NDArray[np.bool_]
    supports: NDArray[np.floating]
    probes: NDArray[np.floating]
    products: NDArray[np.floating]
    step: float = 0.0


def attack(recorded: Recorded) -> dict[str, dict[str, Any]]:
    """Run all attacks on the server's transcript of a run of EASE.

    Returns
    -------
    dict
        ``pairs`` and ``singles`` as `attack_pairs` or `attack_sketch` returns them; ``disaggregate`` and
        ``differencing`` as for other systems in rounds.
    """
    settings, truth = EaseSettings.from_json(recorded.plan.settings), recorded.truth
    replay = Replay(recorded.transcripts, recorded.plan, models=bool(settings.sketch))
    received = list(replay.received(lambda purpose: settings.layout(purpose, truth.n_items)))
    views = list(_views(received))
    own = (
        attack_sketch(_sketches(replay, received, recorded.plan.seed, settings), truth)
        if settings.sketch
        else attack_pairs(list(_grams(received, settings, truth.n_items)), truth)
    )
    return {
        **own,
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


def _sketches(
    replay: Replay, received: Iterable[Received], seed: int, settings: EaseSettings
) -> Iterator[Sketched]:
    """Yield what the sums over the same users tell together, in clear also what each member's contributions do."""
    supports: dict[tuple[int, ...], NDArray[np.float64]] = {}
    opened = np.zeros(0, np.bool_)
    found: dict[tuple[int, ...], list[tuple[NDArray[np.float32], NDArray[np.float64]]]] = defaultdict(list)
    step = 0.0
    for one in received:
        try:
            sums = one.layout.decode(one.codes, len(one.slots))
        except ImpossibleSumError:
            continue
        if one.plan.purpose == Purpose.SUPPORTS.value:
            supports[one.slots] = sums["supports"]
            continue
        model = replay.model(one.plan)
        if one.plan.purpose != Purpose.TRAIN.value or model is None:
            continue
        opened, step = model["open"] > 0, one.layout["sketch"].step
        told = (
            directions(model) if one.plan.pass_number else signs(seed, len(opened), settings.sketch)[opened]
        )
        if told is not None:
            found[one.slots].append((told, sums["sketch"][opened]))
    for slots, parts in found.items():
        counted = supports.get(slots)
        if counted is None:
            counted = np.sum([value for own, value in supports.items() if set(slots) & set(own)], axis=0)
        probes, products = (np.hstack(each) for each in zip(*parts, strict=True))
        yield Sketched(slots, opened, counted[opened], probes, products, step)


def attack_sketch(sketches: Iterable[Sketched], truth: Truth) -> dict[str, dict[str, Any]]:
    """Guess users' items by the sums of a sketch.

    Parameters
    ----------
    sketches : iterable of Sketched
        The last one that covers a user decides.
    truth : Truth

    Returns
    -------
    dict
        ``pairs`` as `attack_pairs` returns it, by the counts that the sketch stands in for.  ``singles``: the row of an
        item that a single user has is the products of that user's history with all columns; the likeliest history is
        searched for (`coterie.systems.ease.study.recovery`).
    """
    consumed = truth.consumed()
    named = np.zeros_like(consumed)
    guesses: dict[int, tuple[int, NDArray[np.floating]]] = {}
    for one in sketches:
        own = np.zeros(truth.n_items)
        own[one.opened] = np.rint(one.supports)
        rows = _counts(one, truth.n_items)
        rarest = _rarest(own, one.slots, consumed)
        guesses |= {user: (item, rows(item)) for user, item in rarest.items()}
        _name_single(one, own, consumed, named)
    return _figures(guesses, named, truth)


def _counts(one: Sketched, n_items: int) -> Callable[[int], NDArray[np.floating]]:
    """Return a function from an item to the counts of pairs with it that a sketch stands in for."""
    factors = np.zeros((n_items, one.products.shape[1]))
    most = int(one.supports.max(initial=0))
    factors[one.opened] = factors_of(one.probes, one.products, one.products.shape[1], one.step, most)
    return lambda item: factors @ factors[item]


def _name_single(
    one: Sketched, own: NDArray[np.floating], consumed: NDArray[np.bool_], named: NDArray[np.bool_]
) -> None:
    """Name the items of users who alone have an item, given which of them has it."""
    place = np.cumsum(one.opened) - 1
    columns, odds = np.asarray(one.probes, np.float64), prior(one.supports, len(one.slots))
    for user in _known(one.slots, consumed):
        # Rows of several such items of a user are equal but for rounding: the attacker sees that they are of one user.
        single = np.flatnonzero(consumed[user] & (own == 1))
        if not len(single):
            continue
        products = one.products[place[single]].mean(axis=0)
        items, _ = recovered(columns, products, odds, place[single], max(one.step, 1.0))
        named[user, np.flatnonzero(one.opened)[items]] = True


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
    consumed = truth.consumed()
    guesses: dict[int, tuple[int, NDArray[np.floating]]] = {}
    named = np.zeros_like(consumed)
    for slots, gram in sums:
        own = np.rint(np.diag(gram))
        for user, rarest in _rarest(own, slots, consumed).items():
            guesses[user] = rarest, gram[rarest]
            for item in np.flatnonzero(consumed[user] & (own == 1)):
                named[user] |= np.rint(gram[item]) == 1
    return _figures(guesses, named, truth)


def _known(slots: Iterable[int], consumed: NDArray[np.bool_]) -> list[int]:
    """Return the slots of users of whom the truth has items."""
    return [slot for slot in slots if slot < len(consumed) and consumed[slot].any()]


def _rarest(own: NDArray[np.floating], slots: Iterable[int], consumed: NDArray[np.bool_]) -> dict[int, int]:
    """Return the item of each user that fewest others have, by how many users of a sum have each."""
    found = {}
    for user in _known(slots, consumed):
        items = np.flatnonzero(consumed[user])
        # Closed items have a count of 0: nothing is known of who has them.
        counted = items[own[items] > 0] if (own[items] > 0).any() else items
        found[user] = int(counted[np.argmin(own[counted])])
    return found


def _figures(
    guesses: Mapping[int, tuple[int, NDArray[np.floating]]], named: NDArray[np.bool_], truth: Truth
) -> dict[str, dict[str, Any]]:
    """Return the figures of both attacks, given each user's known item with scores of all items, and named items."""
    consumed, popularity = truth.consumed(), truth.popularity()
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
