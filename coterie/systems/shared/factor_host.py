"""Host's side of FedMVMF and FCF: contributions, evaluation and recommendations of its users."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.rated import Rated
from coterie.rounds.sides import KeepPrivate
from coterie.secure_sum.contribution import Contribution
from coterie.secure_sum.plan import SumPlan
from coterie.systems.shared.biases import ITEM, predicted, without_biases
from coterie.systems.shared.factor_settings import FactorSettings
from coterie.systems.shared.factor_steps import (
    FactorUpdate,
    UserData,
    contribute,
    local_step,
    sample,
    user_factors,
)
from coterie.systems.shared.factors import from_attributes, initial_factors, scores
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.rated_host import RatedHost
from coterie.systems.shared.rated_server import Layouts, open_anywhere

__all__ = ["FactorHost"]

_DRAWINGS = 256
"""Lists of open items for which drawn items are remembered: more than a run has groups on one host."""


class FactorHost(RatedHost):
    """Host's side of a matrix factorisation, the base of FedMVMF's and FCF's.

    Parameters
    ----------
    settings : FactorSettings
    layouts : Layouts
        Layouts of contributions, from the same settings as at the server.
    data : HostData
        Data of the users; interactions without a rating are used neither in training nor in evaluation.
    keys : ndarray of uint64, shape (users,)
        Each user's own number, which nobody else knows.
    seed : int
        Seed of the run.
    keep : callable
        Takes initial private arrays, ``factors``, float32 (users, K); returns the stored ones, if any.  Only SGD
        reads them.
    users : sequence of UserData
        Training data of each user.

    Attributes
    ----------
    private : dict of str to ndarray
        Private arrays, a row for each user; changed in place.
    measured : dict of str to ndarray of float64, shape (users,)
        Metrics as they were last measured for a contribution.
    """

    def __init__(
        self,
        settings: FactorSettings,
        layouts: Layouts,
        data: HostData,
        keys: NDArray[np.uint64],
        seed: int,
        keep: KeepPrivate,
        users: Sequence[UserData],
    ) -> None:
        super().__init__(layouts, data, keys, seed, users)
        self.settings = settings
        self.private = keep({"factors": initial_factors(settings, keys)})
        self._rated = data.rated()
        self._drawn: dict[bytes, dict[int, UserData]] = {}

    def _stepped(
        self,
        plan: SumPlan,
        model: Mapping[str, NDArray[np.float32]],
        index: NDArray[np.intp],
        allowed: NDArray[np.bool_],
    ) -> Iterator[tuple[FactorUpdate, Callable[[Contribution], None]]]:
        for update in local_step(
            self._whole(model),
            self._sampled(index, model, allowed, plan.round),
            self.settings,
            self.keys[index],
            seed=self.seed,
            round_=plan.round,
            factors=self.private["factors"][index],
            allowed=allowed,
        ):
            yield update, partial(contribute, update)

    def item_vectors(self, model: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return the items' factors without biases, float32 (I, K)."""
        return without_biases(self.settings, model["items"])

    def _whole(self, model: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
        """Return item and attribute factors of a model; the table of attributes may be empty."""
        none = np.empty((0, self.settings.width), np.float32)
        return {"items": model["items"], "attributes": model.get("attributes", none)}

    def _sampled(
        self,
        index: NDArray[np.intp],
        model: Mapping[str, NDArray[np.float32]],
        allowed: NDArray[np.bool_],
        round_: int,
    ) -> list[UserData]:
        """Return users' data with their sampled unrated items, drawn once unless the settings say ``resample``."""
        settings = self.settings
        held: dict[int, UserData] = {}
        if settings.weights == "sampled" and not settings.resample:
            drawn_by = allowed.tobytes() + model["popularity"].tobytes()
            if drawn_by not in self._drawn and len(self._drawn) > _DRAWINGS:
                self._drawn.clear()
            held = self._drawn.setdefault(drawn_by, held)
        fresh = [user for user in index.tolist() if user not in held]
        found = sample(
            [self._users[user] for user in fresh],
            self.keys[fresh],
            settings,
            len(self._data.items),
            seed=self.seed,
            popularity=model["popularity"],
            allowed=allowed,
            round_=round_,
        )
        held.update(zip(fresh, found, strict=True))
        return [held[user] for user in index.tolist()]

    def measure(
        self, model: Mapping[str, NDArray[np.float32]], index: NDArray[np.intp], *, round_: int = 0
    ) -> dict[str, NDArray[np.float64]]:
        """Return metrics of some users, float64 (users,) by name; they do not leave the host.

        Parameters
        ----------
        model : mapping
        index : ndarray of int
            Positions of the users to measure; others have NaN.
        round_ : int
            Round for which unrated items are drawn, where the settings say ``resample``.
        """
        factors = np.zeros((len(self.keys), self.settings.width), np.float32)
        factors[index] = self.factors(model, index, round_=round_)
        return self._held_out(model).measure(lambda users: self._predicted(model, factors[users]), index)

    def _predicted(
        self, model: Mapping[str, NDArray[np.float32]], factors: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        return predicted(self.settings, scores(model, factors))

    def _held_out(self, model: Mapping[str, NDArray[np.float32]]) -> Rated:
        """Return the hold-out by which users are measured at a version of the model."""
        return self._rated

    def fold_in(self, model: Mapping[str, NDArray[np.float32]]) -> None:
        """Solve for the factors that users keep under SGD; otherwise they keep none that count.

        Steps of SGD lead a user's factor to the solution, because the model does not move any more.
        """
        index = np.flatnonzero(self._rates)
        if self.settings.update == "sgd" and len(index):
            self.private["factors"][index] = self._solved(model, index, round_=0)

    def factors(
        self, model: Mapping[str, NDArray[np.float32]], index: NDArray[np.intp], *, round_: int = 0
    ) -> NDArray[np.float32]:
        """Return factors of some users at a version, float32 (n, K); users without ratings by their attributes."""
        settings, whole = self.settings, self._whole(model)
        found = np.zeros((len(index), settings.width), np.float32)
        rates = self._rates[index]
        own, others = index[rates], index[~rates]
        if len(others):
            told = np.stack([self._users[user].attributes for user in others.tolist()])
            found[~rates] = from_attributes(
                told, whole["attributes"], settings, row_by_row=True, one=ITEM if settings.biases else None
            )
        if settings.update == "sgd":
            found[rates] = self.private["factors"][own]
        elif len(own):
            found[rates] = self._solved(model, own, round_=round_)
        return found

    def _solved(
        self, model: Mapping[str, NDArray[np.float32]], index: NDArray[np.intp], *, round_: int
    ) -> NDArray[np.float32]:
        """Solve for the factors of users with ratings at a version, float32 (n, K)."""
        # Evaluation and recommendation use all items that are open to any group, not only to the user's.
        allowed = open_anywhere(model)
        users = self._sampled(index, model, allowed, round_)
        return user_factors(self._whole(model), users, self.settings, allowed=allowed)
