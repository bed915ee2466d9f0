"""Differencing attack: the difference of two sums whose participants differ by one is that participant's contribution.

It is exact when everybody else contributed the same both times; otherwise the others' changes in between remain, which
the attacker averages over the pairs that it finds.  A COS can ask for such pairs, and dropouts make them anyway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from coterie.privacy.attacks.rounds_view import RoundView, known_slots
from coterie.privacy.attacks.scoring import Truth, mean_auc

__all__ = ["Difference", "DifferencingReport", "differences", "report"]

_PAIRS_EACH = 8
"""Most pairs taken for each participant and sum: enough to average over, whatever the number of rounds."""


@dataclass(frozen=True, eq=False)
class Difference:
    """One participant's contribution, as the difference of two sums.

    Attributes
    ----------
    slot : int
        The participant.
    versions : tuple of int
        Versions of the model of the sum with the participant and of the sum without it.
    rows : ndarray of float32, shape (I, d), optional
    touched : ndarray of float32, shape (I,), optional
    """

    slot: int
    versions: tuple[int, int]
    rows: npt.NDArray[np.float32] | None
    touched: npt.NDArray[np.float32] | None


class DifferencingReport(TypedDict):
    """AUC over the items of participants that pairs of sums single out; None where there is no such participant.

    ``exposed`` is the share of these participants among all, ``pairs`` the number of pairs, ``same_version`` the number
    of pairs of one version of the model, where the difference may be exact.
    """

    auc: float | None
    popularity_auc: float | None
    exposed: float
    pairs: int
    same_version: int


def differences(views: Sequence[RoundView], n_users: int) -> Iterator[Difference]:
    """Find the pairs of sums that differ by one participant.

    Parameters
    ----------
    views : sequence of RoundView
    n_users : int
        Slots are below.

    Yields
    ------
    Difference
        For each sum and each of its participants, over sums of all the others: those of the nearest versions.
    """
    # Equal sets have equal sums of random numbers; others do once in 2^63.
    rng = np.random.default_rng(0)
    mark = rng.integers(0, 2**63, n_users, dtype=np.uint64)
    names = [int(np.bitwise_xor.reduce(mark[view.slots])) for view in views]
    by_name: dict[int, list[RoundView]] = defaultdict(list)
    for name, view in zip(names, views, strict=True):
        by_name[name].append(view)
    for name, view in zip(names, views, strict=True):
        for slot in view.slots.tolist():
            others = by_name.get(name ^ int(mark[slot]), [])
            near = sorted(others, key=lambda other: abs(other.version - view.version))[:_PAIRS_EACH]
            for other in near:
                yield Difference(
                    slot,
                    (view.version, other.version),
                    None if view.rows is None or other.rows is None else view.rows - other.rows,
                    None if view.touched is None or other.touched is None else view.touched - other.touched,
                )


def report(views: Iterable[RoundView], truth: Truth) -> DifferencingReport:
    """Attack the participants that pairs of sums single out.

    Parameters
    ----------
    views : iterable of RoundView
        All sums of the run.
    truth : Truth
        The users' true interactions.
    """
    counts = np.zeros((truth.n_users, truth.n_items), np.float32)
    moves = np.zeros_like(counts)
    seen = np.zeros(truth.n_users, np.bool_)
    pairs = same = 0
    for found in differences(known_slots(views, truth.n_users), truth.n_users):
        pairs += 1
        same += found.versions[0] == found.versions[1]
        seen[found.slot] = True
        if found.touched is not None:
            counts[found.slot] += found.touched
        if found.rows is not None:
            moves[found.slot] += _along_line(found.rows)
    consumed = truth.consumed()[seen]
    # Counts cannot tell what was sampled from what the participant has; the direction of a row's change can.
    scores = moves[seen] if moves.any() else counts[seen]
    return DifferencingReport(
        auc=mean_auc(scores, consumed)[0],
        popularity_auc=mean_auc(truth.popularity(), consumed)[0],
        exposed=float(seen.mean()) if len(seen) else 0.0,
        pairs=pairs,
        same_version=same,
    )


def _along_line(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return how far each row moved along the line of one participant, float32 (I,); at most 1, its own items above 0.

    In a product model all rows of a participant move along one line, and more items are sampled than are its own.
    """
    axis = np.linalg.eigh(rows.T.astype(np.float64) @ rows)[1][:, -1]
    moved = rows @ axis.astype(np.float32)
    largest = float(np.abs(moved).max(initial=0))
    if not largest:
        return moved
    clear = moved[np.abs(moved) > 0.01 * largest]
    forwards = -1 if 2 * np.count_nonzero(clear > 0) > len(clear) else 1
    return np.asarray(moved * np.float32(forwards / largest))
