"""Attacks on a run of FedIDCF: those on FedMF's passes, and vectors of key users, read off their moments.

A key user's first contribution gives its ratings (`coterie.systems.fedmf.study.biased_reconstruction`).  In the pass
that sums moments, a contribution of one key user is its vector, so that nothing is left for the Paillier key to hide.
Both need contributions in clear: a masked sum over many users tells neither.  A sum with one key user among query
users tells a vector as well, and not whose it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import ImpossibleSumError, Layout
from coterie.studies.replay import Replay
from coterie.studies.study import Recorded
from coterie.systems.fedidcf.server import layouts
from coterie.systems.fedidcf.settings import FedIdcfSettings, Stage
from coterie.systems.fedmf.study.biased_reconstruction import reconstruct
from coterie.systems.shared.biases import scaled
from coterie.systems.shared.study.attacks import report
from coterie.systems.shared.study.reconstruction import Marginals, Reconstruction, Seen

__all__ = ["attack", "vector_of"]


def attack(recorded: Recorded) -> dict[str, dict[str, Any]]:
    """Attack the server's transcript of a run of FedIDCF.

    Returns
    -------
    dict
        As `coterie.systems.shared.study.attacks.report` for the passes of the first phase, and ``vectors``.
    """
    settings = FedIdcfSettings.from_json(recorded.plan.settings)
    shape = layouts(settings, recorded.truth.n_items)
    found = report(
        recorded,
        shape,
        settings.factor_settings(),
        own=partial(_own, settings=settings),
        trains=lambda plan: settings.stage(plan.pass_number) is Stage.FACTORS,
    )
    found["vectors"] = _vectors(recorded, settings, shape.layout)
    return found


def _own(seen: Seen, marginals: Marginals, *, first: bool, settings: FedIdcfSettings) -> Reconstruction:
    return reconstruct(seen, settings, marginals, first=first)


def vector_of(codes: NDArray[np.uint32], layout: Layout, users: int) -> NDArray[np.float64] | None:
    """Return the vector of the only key user of a contribution or sum, (K,); None where it has none or several.

    Parameters
    ----------
    codes : ndarray of uint32, shape (layout.size,)
    layout : Layout
    users : int
        Users of the sum, query users included.
    """
    try:
        sums = layout.decode(codes, users)
    except ImpossibleSumError:
        return None
    return np.asarray(sums["values"], np.float64) if round(float(sums["key_users"][0])) == 1 else None


def _vectors(recorded: Recorded, settings: FedIdcfSettings, layout: Any) -> dict[str, Any]:
    truth = recorded.truth
    replay = Replay(recorded.transcripts, recorded.plan, models=True)
    covered: set[int] = set()
    read: dict[int, float] = {}
    nameless: list[tuple[int, ...]] = []
    sums = 0
    for one in replay.received(layout):
        if one.plan.purpose != Purpose.TRAIN.value:
            continue
        if settings.stage(one.plan.pass_number) is not Stage.MOMENTS:
            continue
        sums += 1
        covered |= set(one.slots)
        vector = vector_of(one.codes, one.layout, len(one.slots))
        if vector is None:
            continue
        if len(one.slots) != 1:
            nameless.append(one.slots)
            continue
        model = replay.model(one.plan)
        if model is None:
            continue
        (user,) = one.slots
        own = truth.users == user
        items = model["items"][truth.items[own]].astype(np.float64)
        ratings = scaled(settings, recorded.ratings[own]).astype(np.float64) - items[:, 1]
        read[user] = _correlation(items[:, 2:] @ vector, ratings)
    known = [value for value in read.values() if np.isfinite(value)]
    return {
        "users": len(covered),
        "sums": sums,
        "vectors": (len(read) + _more(nameless, read)) / max(len(covered), 1),
        "correlation": float(np.mean(known)) if known else None,
    }


def _more(sums: Iterable[Collection[int]], known: Iterable[int]) -> int:
    """Return how many vectors without a name are surely of other users: sums that share no user are counted."""
    taken, found = set(known), 0
    for users in sums:
        if taken.isdisjoint(users):
            taken |= set(users)
            found += 1
    return found


def _correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    if len(one) < 3 or not one.std() or not other.std():
        return float("nan")
    return float(np.corrcoef(one, other)[0, 1])
