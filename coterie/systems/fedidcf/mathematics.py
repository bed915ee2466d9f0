"""Mathematics of FedIDCF beside FedMF's: layout of contributions, moments of key users, the vector that one publishes.

``coterie.systems.fedidcf.attention`` has the attention, ``coterie.systems.fedmf.mathematics`` the first phase.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.crypto.latent_codes import Moments
from coterie.crypto.latent_terms import LatentTerms
from coterie.secure_sum.contribution import Layout, Segment
from coterie.systems.fedidcf.settings import FedIdcfSettings
from coterie.systems.fedmf import mathematics as fedmf
from coterie.systems.shared.optimisers import Arrays

__all__ = [
    "LEAST_KEY_USERS",
    "KeyMoments",
    "capped",
    "initial",
    "is_query",
    "layout",
    "moments_of",
    "no_moments",
    "terms_of",
    "told_moments",
]

LEAST_KEY_USERS = 20
"""Fewest key users of a set of pseudo meta-latents."""

_ATTENTION, _QUERY = 13, 14
"""First elements of the keys of draws; other systems' are lower."""

_BITS = 16

_LIKED_BOUND = 0.1
"""Largest mean square of the values of a direction; ratings are at most 1, rows of items mostly short."""


class KeyMoments(NamedTuple):
    """Moments of key users, as participants fetch them."""

    users: int
    unit: float
    """Root mean square of the values of directions (`coterie.systems.fedidcf.attention`)."""
    moments: Moments

    @property
    def length(self) -> float:
        """Root mean square of the lengths of vectors."""
        return math.sqrt(float((self.moments.mean**2 + self.moments.variance).sum()))

    @property
    def spread(self) -> float:
        """Root of the sum of the variances, above 0."""
        return max(math.sqrt(float(self.moments.variance.sum())), 1e-12)


def initial(settings: FedIdcfSettings, n_items: int, seed: int) -> Arrays:
    """Return version 0 of the shared model: FedMF's, and the attention ``query`` and ``key``, (K, h) each."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_ATTENTION,)))
    shape = settings.factors, settings.hidden
    query, key = (rng.normal(0, settings.factors**-0.5, shape).astype(np.float32) for _ in range(2))
    return {**fedmf.initial(settings, n_items, seed), "query": query, "key": key}


def layout(settings: FedIdcfSettings, n_items: int) -> Layout:
    """Return the segments of a contribution in every pass: parts of other stages are 0.

    ``items`` as FedMF's; sums over key users of ``values`` (K), ``squares`` (K), and ``liked``, the mean square of a
    direction's values; gradients ``query`` and ``key`` (K, h); ``key_users`` and ``learners``, counts of the users
    behind these.
    """
    k, h, bound = settings.factors, settings.hidden, settings.vector_bound
    extra = (
        Segment("values", (k,), bound, _BITS),
        Segment("squares", (k,), bound**2, _BITS),
        Segment("liked", (1,), _LIKED_BOUND, _BITS),
        Segment("query", (k, h), settings.gradient_bound, _BITS),
        Segment("key", (k, h), settings.gradient_bound, _BITS),
        Segment.whole("key_users", (1,), 1),
        Segment.whole("learners", (1,), 1),
    )
    return fedmf.layout(settings, n_items, extra)


def is_query(settings: FedIdcfSettings, keys: NDArray[np.integer], seed: int) -> NDArray[np.bool_]:
    """Return which users are query users, bool (users,), each drawn by its own number."""
    drawn = [
        np.random.default_rng(np.random.SeedSequence(int(key), spawn_key=(_QUERY, seed))).random()
        for key in keys
    ]
    found: NDArray[np.bool_] = np.array(drawn, np.float64) < settings.query
    return found


def no_moments(settings: FedIdcfSettings) -> NDArray[np.float64]:
    """Return the sums of moments before any: number, squares of directions, values, squares; (2 K + 2,)."""
    return np.zeros(2 * settings.factors + 2)


def moments_of(sums: NDArray[np.floating]) -> KeyMoments | None:
    """Return moments from their sums (2 K + 2,), in the order of `no_moments`; None without key users."""
    users, k = round(float(sums[0])), (len(sums) - 2) // 2
    if users < 1:
        return None
    wide = sums.astype(np.float64)
    unit = math.sqrt(max(float(wide[1]) / users, 1e-12))
    return KeyMoments(users, unit, Moments.of_sums(wide[2 : 2 + k], wide[2 + k :], users))


def terms_of(settings: FedIdcfSettings, known: KeyMoments | None) -> LatentTerms | None:
    """Return the terms of the set of pseudo meta-latents; None without moments, or with too few key users."""
    if known is None or known.users < max(LEAST_KEY_USERS, 2 * settings.members):
        return None
    longest = min(settings.cap * known.length or math.inf, settings.vector_bound)
    # Of few key users a fifth may be lost before they publish.
    count = min(settings.latents, max(LEAST_KEY_USERS, known.users * 4 // 5))
    least = max(LEAST_KEY_USERS, 2 * settings.members, count)
    bound = max(1, math.ceil(1000 * longest))
    return LatentTerms(settings.factors, count, least, known.users, bound, settings.members)


def capped(settings: FedIdcfSettings, known: KeyMoments, vector: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the vector that a key user publishes, (K,): its own one, shortened to the cap."""
    wide = vector.astype(np.float64)
    length = math.sqrt(float(np.einsum("k,k->", wide, wide)))
    longest = settings.cap * known.length
    return wide * (longest / length) if settings.cap and length > longest else wide


def told_moments(model: Mapping[str, NDArray[np.float32]]) -> KeyMoments | None:
    """Return the moments in a fetched model; None before they are summed."""
    return moments_of(model["moments"])
