"""Pseudo meta-latents of a run in one process: the sums that the third party would form under encryption, in clear.

Vectors become the same integers, members and weights are drawn in the same way, and in experiments with seeded users
they are the same: the result is that of the services to the last bit.  Encryption, the relay and limits are missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import structlog
from numpy.typing import NDArray

from coterie.crypto.graph_requests import upload_id_of
from coterie.crypto.latent_codes import encode_latent, latents_of_sums
from coterie.crypto.latent_terms import LatentTerms
from coterie.crypto.latent_weights import draw_combinations, seeded
from coterie.parties.neighbourhood import seed_of_user
from coterie.parties.upload_file import seeded_secret
from coterie.rounds.sides import HostSide, combining
from coterie.rounds.training import Purpose
from coterie.secure_sum.plan import SumPlan
from coterie.studies.local_training import Before

__all__ = ["LocalLatents"]

_log = structlog.get_logger("coterie.expansion")

_EPOCH = 1


class LocalLatents:
    """The set of pseudo meta-latents of a run in one process.

    Parameters
    ----------
    seed : int
        Seed of the run, from which all combinations follow.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._codes: dict[bytes, NDArray[np.uint32]] = {}
        self._combined: NDArray[np.float64] | None = None

    def before(self, side: HostSide, keys: NDArray[np.uint64]) -> Before | None:
        """Return what publishes and reads for a host before sums; None for other systems.

        Parameters
        ----------
        side : HostSide
        keys : ndarray of uint64, shape (users,)
            Each user's own number.
        """
        combines = combining(side)
        if combines is None:
            return None
        uploads = [upload_id_of(seeded_secret(seed_of_user(int(key)), _EPOCH)) for key in keys]

        def before(plan: SumPlan, model: Mapping[str, NDArray[np.float32]], users: Sequence[int]) -> None:
            terms = combines.latent_terms(model)
            if terms is None:
                return
            if combines.lacks_latents(plan):
                found = self._read(terms)
                if found is not None:
                    combines.take_latents(found)
            elif self._combined is None and plan.purpose == Purpose.TRAIN.value:
                for user in combines.key_users(plan, users):
                    self._codes[uploads[user]] = encode_latent(combines.latent(model, user), terms)

        return before

    def _read(self, terms: LatentTerms) -> NDArray[np.float64] | None:
        """Return the combinations, drawn when they are asked for first."""
        if self._combined is None:
            # As the store of the third party orders them.
            codes = [self._codes[upload].astype(np.int64) for upload in sorted(self._codes)]
            if len(codes) < terms.least:
                _log.warning("too few key users: no meta-latents", key_users=len(codes), least=terms.least)
                return None
            drawn = draw_combinations(
                len(codes), terms.members, terms.combinations, seeded(self._seed, _EPOCH)
            )
            sums = [
                sum(chain((weight * codes[at] for at, weight in zip(one.members, one.weights, strict=True))))
                for one in drawn
            ]
            self._combined = latents_of_sums(np.array(sums, np.int64), terms)
        return self._combined
