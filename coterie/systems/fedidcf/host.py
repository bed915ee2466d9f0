"""Host's side of FedIDCF: key users train factors and the attention; query users are described by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from coterie.crypto.latent_codes import rescaled
from coterie.crypto.latent_terms import LatentTerms
from coterie.evaluation.holdout import TEST, VALIDATION
from coterie.rounds.sides import KeepPrivate, User
from coterie.secure_sum.contribution import Contribution
from coterie.secure_sum.plan import SumPlan
from coterie.systems.fedidcf.attention import Attention, Told, gradients_of, told
from coterie.systems.fedidcf.mathematics import KeyMoments, capped, is_query, terms_of, told_moments
from coterie.systems.fedidcf.server import MOST_SPREAD, QUERY_USERS, VECTORS, layouts
from coterie.systems.fedidcf.settings import ERRORS, WITH_LATENTS, FedIdcfSettings, Stage
from coterie.systems.fedmf.fold_in import folded_factors
from coterie.systems.fedmf.host import FedMfHost
from coterie.systems.shared.biases import ITEM, USER, scaled
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.members_of_host import Added
from coterie.systems.shared.rated_host import add_nothing

__all__ = ["FedIdcfHost"]

Model = Mapping[str, NDArray[np.float32]]

_HALVES, _ROUNDED, _SPREAD_ROUNDED = 15, 16, 17
"""First elements of the keys of draws."""

_VECTOR = slice(2, None)
"""Place of the vector in a row; the biases' columns come first."""


class FedIdcfHost(FedMfHost):
    """Host's side of FedIDCF.

    Parameters
    ----------
    settings : FedIdcfSettings
    data, keys, seed, keep
        As for `FedMfHost`.  ``factors`` of a query user is the row by which it was served at the last evaluation.
    """

    table = "fedidcf"
    settings: FedIdcfSettings

    def __init__(
        self,
        settings: FedIdcfSettings,
        data: HostData,
        keys: NDArray[np.uint64],
        seed: int,
        keep: KeepPrivate,
    ) -> None:
        super().__init__(settings, data, keys, seed, keep, layouts(settings, len(data.items)))
        self._query = is_query(settings, keys, seed)
        self._latents: NDArray[np.float64] | None = None
        self._stage = Stage.FACTORS
        self._folded = False
        self._served: dict[int, NDArray[np.float64]] = {}

    # --- pseudo meta-latents ---------------------------------------------------------------------------------------

    @property
    def combines(self) -> bool:
        """True: the run has pseudo meta-latents."""
        return self.settings.combines

    def latent_terms(self, model: Model) -> LatentTerms | None:
        """Return the terms of the run's set; None before moments are known, or with too few key users."""
        return terms_of(self.settings, told_moments(model))

    def key_users(self, plan: SumPlan, users: Sequence[int]) -> Sequence[int]:
        """Return which of some users are to have published: key users with ratings, once moments are known."""
        if self.settings.stage(plan.pass_number) in (Stage.FACTORS, Stage.MOMENTS):
            return []
        return [user for user in users if self._rates[user] and not self._query[user]]

    def latent(self, model: Model, user: int) -> NDArray[np.float64]:
        """Return the vector that a key user publishes, (K,)."""
        known = told_moments(model)
        if known is None:
            raise AssertionError("a vector is published before moments are known")
        return capped(self.settings, known, self.private["factors"][user, _VECTOR])

    def lacks_latents(self, plan: SumPlan) -> bool:
        """Return whether pseudo meta-latents are needed and unknown."""
        return self._latents is None and self.settings.stage(plan.pass_number) is Stage.ATTENTION

    def take_latents(self, latents: NDArray[np.float64]) -> None:
        """Take the pseudo meta-latents, (count, K)."""
        self._latents = latents

    def _attention(self, model: Model) -> tuple[Attention, KeyMoments] | None:
        known = told_moments(model)
        if self._latents is None or known is None:
            return None
        return Attention(model, rescaled(self._latents, known.moments), known.unit), known

    # --- rounds ----------------------------------------------------------------------------------------------------

    def _supports(self, pairs: Sequence[tuple[int, User]]) -> Iterator[Added]:
        yield from ((member, add_nothing) for member, user in pairs if self._query[user.index])
        yield from super()._supports(self._of_keys(pairs))

    def _trained(
        self,
        plan: SumPlan,
        model: Model,
        opened: NDArray[np.bool_] | None,
        pairs: Sequence[tuple[int, User]],
    ) -> Iterator[Added]:
        yield from ((member, add_nothing) for member, user in pairs if self._query[user.index])
        own, stage = self._of_keys(pairs), self.settings.stage(plan.pass_number)
        if stage is Stage.FACTORS:
            yield from super()._trained(plan, model, opened, own)
            return
        found = self._attention(model) if stage is Stage.ATTENTION else None
        for member, user in own:
            add = add_nothing
            if self._rates[user.index]:
                if stage is Stage.MOMENTS:
                    add = partial(self._add_moments, plan, model, user.index)
                elif found is not None:
                    add = partial(self._add_gradients, plan, model, found[0], user.index)
            yield member, add

    def _of_keys(self, pairs: Sequence[tuple[int, User]]) -> list[tuple[int, User]]:
        return [(member, user) for member, user in pairs if not self._query[user.index]]

    def _drawing(self, user: int, *key: int) -> np.random.Generator:
        """Return a user's own random numbers for a purpose."""
        return np.random.default_rng(np.random.SeedSequence(int(self.keys[user]), spawn_key=key))

    def _ratings(self, user: int) -> NDArray[np.float64]:
        return scaled(self.settings, self._users[user].ratings).astype(np.float64)

    def _told(self, model: Model, user: int) -> Told:
        return told(model["items"][self._users[user].items], self._ratings(user))

    def _add_moments(self, plan: SumPlan, model: Model, user: int, contribution: Contribution) -> None:
        bound, rng = self.settings.vector_bound, self._drawing(user, _ROUNDED, self.seed, plan.round)
        vector = np.clip(self.private["factors"][user, _VECTOR].astype(np.float64), -bound, bound)
        liked = self._told(model, user).liked
        contribution.add("values", vector, rng)
        contribution.add("squares", vector**2, rng)
        contribution.add("liked", np.array([np.einsum("k,k->", liked, liked) / len(liked)]), rng)
        contribution.add("key_users", np.ones(1), rng)

    def _add_gradients(
        self, plan: SumPlan, model: Model, attention: Attention, user: int, contribution: Contribution
    ) -> None:
        """Add the gradients by half of a user's ratings, drawn anew, for a vector that the other half gives."""
        rng = self._drawing(user, _HALVES, self.seed, plan.round)
        rows = model["items"][self._users[user].items]
        by_query, by_key = gradients_of(attention, rows, self._ratings(user), rng)
        contribution.add("query", by_query, rng)
        contribution.add("key", by_key, rng)
        contribution.add("learners", np.ones(1), rng)

    # --- evaluation ------------------------------------------------------------------------------------------------

    def _evaluated(self, plan: SumPlan, model: Model, pairs: Sequence[tuple[int, User]]) -> Iterator[Added]:
        self._stage, self._served = self.settings.stage(plan.pass_number), {}
        # The base yields users in the order of the pairs.
        for (_, user), (member, add) in zip(pairs, super()._evaluated(plan, model, pairs), strict=True):
            yield member, partial(self._add_evaluated, plan, add, user.index)

    def _add_evaluated(
        self, plan: SumPlan, add: Callable[[Contribution], None], user: int, contribution: Contribution
    ) -> None:
        add(contribution)
        apart = self._served.get(user)
        if apart is not None:
            rng = self._drawing(user, _SPREAD_ROUNDED, self.seed, plan.round)
            contribution.add(VECTORS, apart, rng)
            contribution.add(f"{VECTORS}_squares", np.array([np.einsum("k,k->", apart, apart)]), rng)
            contribution.add(QUERY_USERS, np.ones(1), rng)

    def measure(
        self, model: Model, index: NDArray[np.intp], *, round_: int = 0
    ) -> dict[str, NDArray[np.float64]]:
        """Return metrics of some users, float64 (users,) by name, and serve query users by this version."""
        found, users = self._attention(model), len(self.keys)
        biases = np.zeros((users, self.settings.width), np.float32)
        biases[:, ITEM] = 1
        attended = biases.copy()
        for user in index.tolist():
            known = self._told(model, user)
            biases[user, USER] = attended[user, USER] = known.bias
            if found is not None and self._rates[user]:
                attention, moments = found
                vector = attention.vector(known.liked)
                attended[user, _VECTOR] = vector
                if self._query[user]:
                    apart = (vector - moments.moments.mean) / moments.spread
                    self._served[user] = np.clip(apart, -MOST_SPREAD, MOST_SPREAD)
        if not self._folded:
            queries = index[self._query[index]]
            self.private["factors"][queries] = attended[queries]
        values = super().measure(model, index, round_=round_)
        if self._stage is Stage.ATTENTION:
            values[WITH_LATENTS] = np.full(users, np.nan)
            values[WITH_LATENTS][index] = float(found is not None)
            folded = biases.copy()
            rated = index[self._rates[index]]
            if len(rated):
                folded[rated] = folded_factors(
                    model, [self._users[user] for user in rated.tolist()], self.settings
                )
            tables = {"": self.private["factors"], "attention": attended, "biases": biases, "fold_in": folded}

            @cache
            def squares(prediction: str, validated: bool) -> NDArray[np.float64]:
                return self.squared_errors(model, tables[prediction], validated=validated)

            for name in ERRORS:
                values |= self._errors(squares, index, name)
        return values

    def recommend(self, model: Model, user: int) -> NDArray[np.float32]:
        """Return predicted ratings of all items, float32 (I,); a query user's by all that it has rated by now."""
        found = self._attention(model)
        if found is None or self._folded or not self._query[user] or not self._rates[user]:
            return super().recommend(model, user)
        known = self._told(model, user)
        row = np.zeros((1, self.settings.width), np.float32)
        row[0, ITEM], row[0, USER], row[0, _VECTOR] = 1, known.bias, found[0].vector(known.liked)
        predicted: NDArray[np.float32] = self._predicted(model, row)[0]
        return predicted

    def _errors(
        self, squares: Callable[[str, bool], NDArray[np.float64]], index: NDArray[np.intp], name: str
    ) -> dict[str, NDArray[np.float64]]:
        """Return sums of squared errors of a prediction, and numbers of ratings, by metric.

        Parameters
        ----------
        squares : callable
            Gives each user's sum by the name of a prediction, and whether on validation items.
        index : ndarray of int
            Users to measure.
        name : str
            Of the figure.
        """
        validated = name.startswith("validation_")
        kind = "key" if validated else name.rpartition("_")[2]
        prediction = name.removeprefix("validation_") if validated else name.rpartition("_")[0]
        measured = np.zeros(len(self.keys), np.bool_)
        measured[index] = True
        measured &= self._query if kind == "query" else ~self._query
        own = squares(prediction, validated)
        found = {f"{name}_squared_error": np.where(measured, own, np.nan)}
        if not ERRORS[name]:
            counts = np.bincount(self._data.user[self._held(validated)], minlength=len(self.keys))
            found[f"{name}_ratings"] = np.where(measured & (counts > 0), counts, np.nan)
        return found

    def _held(self, validated: bool) -> NDArray[np.bool_]:
        """Return which of the host's interactions are ratings held out for one purpose."""
        data = self._data
        found: NDArray[np.bool_] = (data.part == (VALIDATION if validated else TEST)) & np.isfinite(
            data.rating
        )
        return found

    def squared_errors(
        self, model: Model, rows: NDArray[np.floating], *, validated: bool = False
    ) -> NDArray[np.float64]:
        """Return each user's sum of squared errors on held-out ratings, (users,), NaN without any.

        Parameters
        ----------
        model : mapping
        rows : ndarray of float, shape (users, width)
            Rows by which users are served.
        validated : bool
            Whether on the validation part instead of the test part.
        """
        data, which = self._data, self._held(validated)
        user, item = data.user[which], data.item[which]
        wanted = scaled(self.settings, data.rating[which]).astype(np.float64)
        half = (self.settings.highest - self.settings.lowest) / 2
        found = np.einsum("jk,jk->j", rows[user].astype(np.float64), model["items"][item].astype(np.float64))
        sums = np.bincount(user, (half * (wanted - found)) ** 2, len(self.keys)).astype(np.float64)
        sums[np.bincount(user, minlength=len(self.keys)) == 0] = np.nan
        return sums

    def fold_in(self, model: Model) -> None:
        """Solve for the rows of all users with ratings, who know no pseudo meta-latents, at a finished model."""
        super().fold_in(model)
        self._folded = True

    # --- what studies ask ------------------------------------------------------------------------------------------

    @property
    def trains(self) -> NDArray[np.bool_]:
        """Which users are key users with ratings, bool (users,)."""
        found: NDArray[np.bool_] = ~self._query & self._rates
        return found

    @property
    def latents(self) -> NDArray[np.float64] | None:
        """Pseudo meta-latents as they were combined; None before they are known."""
        return self._latents

    def rated_items(self) -> list[tuple[NDArray[np.integer], NDArray[np.float64]]]:
        """Return each user's rated items of the training part, and the ratings on the scale from -1 to 1."""
        return [(one.items, self._ratings(user)) for user, one in enumerate(self._users)]
