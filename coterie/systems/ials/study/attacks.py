"""Attacks on a run of iALS, on the sums in the server's transcript."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.privacy.attacks import differencing, disaggregate
from coterie.privacy.attacks.rounds_view import RoundView, view_of_sum
from coterie.privacy.attacks.scoring import Truth, mean_auc
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import ImpossibleSumError
from coterie.studies.replay import Received, Replay
from coterie.studies.study import Recorded
from coterie.systems.ials.settings import IalsSettings

__all__ = ["attack", "attack_span"]

_HIDDEN = 20
"""Items of which the attack on the span does not know whether a user has them."""
_ATTACKED = 100
"""Most users that it attacks."""


def attack(recorded: Recorded) -> dict[str, dict[str, Any]]:
    """Run all attacks on the server's transcript of a run of iALS.

    Returns
    -------
    dict
        ``span`` as `attack_span` returns it; ``disaggregate`` and ``differencing`` as for other systems in rounds,
        where rows are sums of users' factors.
    """
    settings, truth = IalsSettings.from_json(recorded.plan.settings), recorded.truth
    layouts = settings.layouts(truth.n_items)
    received = list(Replay(recorded.transcripts, recorded.plan).received(layouts.layout))
    views = [_view(one) for one in received]
    trained = [view for view in views if view.rows is not None]
    return {
        "span": attack_span(_sums(received, Purpose.TRAIN), _supports(received), settings, truth),
        "disaggregate": dict(disaggregate.report(views, truth)),
        "differencing": dict(differencing.report(trained, truth)),
    }


def _view(received: Received) -> RoundView:
    return view_of_sum(
        received.layout, received.codes, received.slots, received.version, rows="users", touched="supports"
    )


def _sums(received: Iterable[Received], purpose: Purpose) -> list[Mapping[str, NDArray[np.float64]]]:
    found: list[Mapping[str, NDArray[np.float64]]] = []
    for one in received:
        if one.plan.purpose == purpose.value:
            try:
                found.append(one.layout.decode(one.codes, len(one.slots)))
            except ImpossibleSumError:
                continue
    return found


def _supports(received: Iterable[Received]) -> NDArray[np.float64] | None:
    sums = _sums(received, Purpose.SUPPORTS)
    return np.add.reduce([one["supports"] for one in sums]) if sums else None


def attack_span(
    sums: Sequence[Mapping[str, NDArray[np.float64]]],
    supports: NDArray[np.float64] | None,
    settings: IalsSettings,
    truth: Truth,
) -> dict[str, Any]:
    r"""Complete users' histories by the space in which those of all users lie.

    Let :math:`X` be the users' histories, 0 or 1, restricted to the items of which the sums hold most.  Each value of a
    sum is :math:`X^T f` for some number of each user, :math:`f`, over the items.  Over enough rounds these columns span
    the rows of :math:`X`, up to the noise of rounding; what is orthogonal to them is orthogonal to every user's
    history.  An attacker who knows all of a history but some items solves for these.

    Parameters
    ----------
    sums : sequence of mapping
        Decoded sums of training, of all rounds.
    supports : ndarray of float, shape (n_items,), or None
        Sums of who has what; without them nothing is attacked.
    settings : IalsSettings
    truth : Truth

    Returns
    -------
    dict
        ``auc``: the attacker knows of each user which items it has, but for 20 at random, and ranks these by the
        solution; ``popularity_auc``: by popularity; ``users`` and ``rounds``, numbers of users and of sums.  The AUC is
        .5 where the sums span the whole space, as with fewer items than users.
    """
    result: dict[str, Any] = {"auc": None, "popularity_auc": None, "users": 0, "rounds": len(sums)}
    if not sums or supports is None:
        return result
    part = "products" if settings.with_products else "users"
    items = np.flatnonzero(np.any([(one[part] != 0).any(axis=1) for one in sums], axis=0))
    if len(items) <= _HIDDEN:
        return result
    null = _orthogonal(sums, items, float(supports[items].mean()), settings)
    consumed, popularity = truth.consumed()[:, items], truth.popularity()[items]
    areas: dict[str, list[float]] = {"auc": [], "popularity_auc": []}
    rng = np.random.default_rng(0)
    for user in np.flatnonzero(consumed.any(axis=1))[:_ATTACKED].tolist():
        hidden = rng.choice(len(items), _HIDDEN, replace=False)
        true = consumed[user]
        known = true.astype(np.float64)
        known[hidden] = 0
        guess = np.linalg.lstsq(null[hidden].T, -(null.T @ known), rcond=None)[0]
        for name, ranked in (("auc", guess), ("popularity_auc", popularity[hidden])):
            area, _ = mean_auc(ranked[None], true[hidden][None])
            if area is not None:
                areas[name].append(area)
    found = {name: float(np.mean(values)) if values else None for name, values in areas.items()}
    return {**result, **found, "users": len(areas["auc"])}


def _orthogonal(
    sums: Sequence[Mapping[str, NDArray[np.float64]]],
    items: NDArray[np.intp],
    support: float,
    settings: IalsSettings,
) -> NDArray[np.float64]:
    """Return a basis of what is orthogonal to the sums' columns up to the noise of rounding, float64 (items, n)."""
    steps = {
        segment.name: segment.bound / (2 ** (segment.bits - 1) - 1)
        for segment in settings.layout(Purpose.TRAIN, 1).segments
    }
    names = [name for name in ("users", "products") if name in steps]
    columns = np.concatenate([one[name][items] / steps[name] for one in sums for name in names], axis=1)
    left, values, _ = np.linalg.svd(columns, full_matrices=True)
    # Values are rounded at random, to neighbouring codes: a variance of 1/6 of a step for each user, on average.
    noise = np.sqrt(support / 6) * (np.sqrt(columns.shape[0]) + np.sqrt(columns.shape[1]))
    basis: NDArray[np.float64] = left[:, int(np.count_nonzero(values > noise)) :]
    return basis
