r"""Weights of pseudo meta-latents: which key users are in each combination, and with what share.

Each combination has m distinct key users, drawn uniformly, and integer weights that sum to 2^16, each from half to one
and a half times the mean share: .1 to .3 of the total for m = 5.  So no key user dominates a combination, and none is
in it for nothing.  Everything is drawn from the operating system, in experiments with seeded users from their seed.

A combination that depends on those before it is drawn again, so that the weight matrix has full row rank and none is a
mixture of the others.
"""

from __future__ import annotations

import hashlib
import random
import secrets
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.crypto.latent_terms import FRACTION_BITS
from coterie.errors import CryptoError

__all__ = ["LatentCombination", "draw_combinations", "seeded", "weight_matrix", "weight_range"]

_TOTAL = 1 << FRACTION_BITS
_MOST_DRAWS = 100
"""Draws for each key user, after which independent combinations are given up."""
_DEPENDENT = 1e-9
"""Length of a combination's part outside the span of the others, relative to its own, at which it depends on them."""


class LatentCombination(NamedTuple):
    """The key users of a combination and their weights."""

    members: tuple[int, ...]
    """Positions of m distinct key users."""
    weights: tuple[int, ...]
    """Sum to 2^16."""


def weight_range(members: int) -> tuple[int, int]:
    """Return the least and the largest weight: half, and one and a half times the mean share of 2^16."""
    return -(-_TOTAL // (2 * members)), 3 * _TOTAL // (2 * members)


def seeded(seed: int, epoch: int) -> random.Random:
    """Return the random numbers of an epoch in an experiment, which protect nobody: whoever has the seed has them."""
    content = b"coterie latent experiment" + seed.to_bytes(8, "little") + epoch.to_bytes(4, "little")
    return random.Random(int.from_bytes(hashlib.sha256(content).digest(), "little"))  # noqa: S311 - it says so


def draw_combinations(
    key_users: int, members: int, count: int, source: random.Random | None = None
) -> list[LatentCombination]:
    """Draw the combinations of a set, none of which is a linear combination of the others.

    Parameters
    ----------
    key_users : int
        Number n of key users.
    members : int
        Key users m of a combination, at least 2.
    count : int
        Number of combinations, at most n: more cannot be independent.
    source : random.Random, optional
        Random numbers; the operating system's if left out.

    Raises
    ------
    CryptoError
        When there are too few key users.
    """
    if not 2 <= members <= key_users or not 1 <= count <= key_users:
        raise CryptoError(
            f"{count} combinations of {members} of {key_users} key users, expected at least 2 members, and as many key "
            "users as members and as combinations"
        )
    source = source or secrets.SystemRandom()
    drawn: list[LatentCombination] = []
    basis = np.zeros((count, key_users))
    """Orthonormal rows that span those drawn so far."""
    # A key user of whom the last combination must have a part is met every n / m draws.
    for _ in range(count + _MOST_DRAWS * key_users):
        one = _combination(source, key_users, members)
        row = weight_matrix([one], key_users)[0]
        known = basis[: len(drawn)]
        rest = row - known.T @ (known @ row)
        rest -= known.T @ (known @ rest)
        if np.linalg.norm(rest) <= _DEPENDENT * np.linalg.norm(row):
            continue
        basis[len(drawn)] = rest / np.linalg.norm(rest)
        drawn.append(one)
        if len(drawn) == count:
            return drawn
    raise CryptoError(
        f"no {count} independent combinations of {members} of {key_users} key users were found",
        hint="fewer combinations, or more key users",
    )


def weight_matrix(combinations: list[LatentCombination], key_users: int) -> NDArray[np.float64]:
    """Return the shares of key users in combinations, float64 (combinations, key users); rows sum to 1."""
    found = np.zeros((len(combinations), key_users))
    for row, one in zip(found, combinations, strict=True):
        row[list(one.members)] = np.array(one.weights) / _TOTAL
    return found


def _combination(source: random.Random, key_users: int, members: int) -> LatentCombination:
    least, most = weight_range(members)
    # Uniform among the weights of this range that sum to the total: all but the last are free, most draws are refused
    # where there are many members, and each costs little.
    while True:
        free = [source.randint(least, most) for _ in range(members - 1)]
        if least <= _TOTAL - sum(free) <= most:
            weights = (*free, _TOTAL - sum(free))
            return LatentCombination(tuple(source.sample(range(key_users), members)), weights)
