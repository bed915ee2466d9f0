r"""Local step of FedMVMF and FCF: a host solves for many of its users as one batched tensor program.

Users whose items are padded to the same number go through the program together; how far they are padded depends on
the user alone, so on the same kind of machine a user's update has the same bits whichever users share its batch.

Under SemiALS a user first solves for :math:`p_i` at the version that it fetched (8), and forms its contribution with
that :math:`p_i`.  Under SGD it forms the contribution with the :math:`p_i` that it kept, and then moves :math:`p_i`
along its gradient (9): all factors step from the same point.

The unrated items that get a weight (36) are drawn from the user's own number, which fixes a random order of all items
for the whole run, popular items more likely first.  The first unrated items of that order are taken, as many as fill
the rated ones up to a power of two.  So a contribution does not show the number of rated items, a newly rated item
replaces a sampled one, and nothing has to be stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coterie.errors import DataError
from coterie.secure_sum.contribution import Contribution
from coterie.systems.shared.biases import ITEM, moving, scaled
from coterie.systems.shared.factor_settings import FactorSettings
from coterie.systems.shared.factors import solved
from coterie.systems.shared.stacks import padded, stacks

__all__ = [
    "FactorUpdate",
    "UserData",
    "check_user",
    "contribute",
    "generators",
    "local_step",
    "sample",
    "user_factors",
]

_SAMPLE, _LOCAL = 4, 5
"""First element of the key of the draws; `coterie.systems.shared.factors` has the lower ones."""

_LEAST_WEIGHT = 0.5
"""Weight of an item that nobody rated, in the drawing of unrated items; an item that one user rated has 1."""

_NONE: NDArray[np.int64] = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class UserData:
    """One user's data at a client: ratings, attributes, sampled items.

    Parameters
    ----------
    items : ndarray of int, shape (n,)
        Rated items, none twice; none at all is possible.
    ratings : ndarray of float, shape (n,)
    attributes : ndarray of float, shape (n_attributes,)
        NaN where missing.
    sampled : ndarray of int, shape (s,)
        Unrated items that have a weight, from `sample`.

    Raises
    ------
    DataError
        Shapes that do not fit, an item below 0 or twice, a rating that is no number, an infinite attribute.  Errors
        tell no value.
    """

    items: NDArray[np.integer]
    ratings: NDArray[np.floating]
    attributes: NDArray[np.floating] = field(default_factory=lambda: np.empty(0, np.float32))
    sampled: NDArray[np.integer] = field(default_factory=lambda: _NONE)
    touched: NDArray[np.int64] = field(init=False, repr=False)
    """Rated items, then sampled ones, int64 (n + s,)."""
    ascending: NDArray[np.intp] = field(init=False, repr=False)
    """Permutation that sorts ``touched``, int64 (n + s,)."""
    last: int = field(init=False, repr=False)
    """Largest of ``touched``; -1 where it is empty."""
    span: tuple[float, float] = field(init=False, repr=False)
    """Lowest and highest rating; without ratings (inf, -inf), which passes every check of a range."""

    def __post_init__(self) -> None:
        for name, value in (
            ("items", self.items),
            ("attributes", self.attributes),
            ("sampled", self.sampled),
        ):
            if value.ndim != 1:
                raise DataError(f"a user's {name} have shape {value.shape}; expected one dimension")
        if self.items.shape != self.ratings.shape:
            raise DataError(
                f"a user has {self.items.shape} items and {self.ratings.shape} ratings; expected one for each"
            )
        if not np.isfinite(self.ratings).all():
            raise DataError("a user's rating is not a finite number")
        if np.isinf(self.attributes).any():
            raise DataError(
                "a user's attribute is infinite; expected a finite number, or NaN where it is missing"
            )
        touched = np.concatenate([self.items, self.sampled]).astype(np.int64)
        ascending = np.argsort(touched)
        ordered = touched[ascending]
        if len(ordered) and ordered[0] < 0:
            raise DataError("a user has an item below 0; expected positions in the list of items")
        if (ordered[1:] == ordered[:-1]).any():
            raise DataError(
                "a user has an item twice, among the rated or the sampled ones; expected each once"
            )
        found = {
            "touched": touched,
            "ascending": ascending,
            "last": int(ordered[-1]) if len(ordered) else -1,
            "span": (float(self.ratings.min(initial=np.inf)), float(self.ratings.max(initial=-np.inf))),
        }
        for field_, made in found.items():
            object.__setattr__(self, field_, made)


@dataclass(frozen=True, eq=False)
class FactorUpdate:
    r"""One user's contribution to a round, and the factor that the user keeps.

    Parameters
    ----------
    index : int
        Position of the user.
    rows : ndarray of int32, shape (t,)
        Open items with a weight, ascending.
    errors : ndarray of float32, shape (t,)
        :math:`c_{ij} (r_{ij} - p_i q_j)` of these.
    attribute_errors : ndarray of float32, shape (n_attributes,)
        :math:`x_{id} - p_i u_d`; zero where the attribute is missing.
    factor : ndarray of float32, shape (K,)
        :math:`p_i`, with which the contribution is formed.
    sent : ndarray of float64, shape (K,)
        1 for values of a row that move, else 0.
    kept : ndarray of float32, shape (K,)
        :math:`p_i` that the user keeps; with SemiALS the same.
    loss : float
        The user's part of :math:`J`: its ratings, its attributes and :math:`\lambda_2 |p_i|^2`.
    rng : Generator
        For the rounding of the contribution.
    """

    index: int
    rows: NDArray[np.int32]
    errors: NDArray[np.float32]
    attribute_errors: NDArray[np.float32]
    factor: NDArray[np.float32]
    sent: NDArray[np.float64]
    kept: NDArray[np.float32]
    loss: float
    rng: np.random.Generator

    @property
    def item_gradients(self) -> NDArray[np.float32]:
        """:math:`f(i, j)` of the rows, float32 (t, K)."""
        found: NDArray[np.float32] = self.errors[:, None] * (self.factor * self.sent).astype(np.float32)
        return found

    @property
    def attribute_gradients(self) -> NDArray[np.float32]:
        """:math:`f(i, d)`, float32 (n_attributes, K)."""
        return self.attribute_errors[:, None] * self.factor


def contribute(update: FactorUpdate, contribution: Contribution) -> None:
    """Add a user's update to the contribution of its member: the user itself, or its host.

    Segments beyond those of `coterie.systems.shared.factors.layout` are the caller's, and so is `Contribution.count`.
    They may use ``update.rng`` afterwards.

    Raises
    ------
    UnboundedValueError
        The local step diverged: a value is NaN or infinite.
    """
    contribution.add("items", update.item_gradients, update.rng, rows=update.rows)
    if len(update.attribute_errors):
        contribution.add("attributes", update.attribute_gradients, update.rng)


def sample(
    users: Sequence[UserData],
    keys: Sequence[int] | NDArray[np.integer],
    settings: FactorSettings,
    n_items: int,
    *,
    seed: int,
    popularity: NDArray[np.floating] | None = None,
    allowed: NDArray[np.bool_] | None = None,
    round_: int = 0,
) -> list[UserData]:
    r"""Draw the unrated items that have a weight.

    Rated and sampled items together are the smallest power of two that is at least :math:`1 + \rho` times the number of
    rated ones (or all open items, where there are fewer).  Within a run the same user and ratings give the same items,
    and one rating more changes as few of them as possible.  If ``settings.resample``, there are :math:`\rho` per rated
    item, uniform and drawn anew in each round.

    Parameters
    ----------
    users : sequence of UserData
    keys : sequence of int
        Each user's own number, at least 0, which nobody else knows.
    settings : FactorSettings
        Nothing is drawn for weights other than ``sampled``.
    n_items : int
    seed : int
        Seed of the run, at least 0.
    popularity : ndarray of float, shape (n_items,), optional
        Public number of raters of each item, by which sampled items look like rated ones; the same during a run.
        Uniform if left out.
    allowed : ndarray of bool, shape (n_items,), optional
        Open items; others are never sampled.
    round_ : int
        Round to draw for; used with ``settings.resample`` only.

    Returns
    -------
    list of UserData
        Copies with new ``sampled``, which is empty for a user without open rated items.

    Raises
    ------
    DataError
        Data that `local_step` would refuse, or a popularity of another shape, negative or not finite.
    """
    if settings.weights != "sampled":
        return [dataclasses.replace(user, sampled=_NONE) for user in users]
    weight = np.ones(n_items)
    if popularity is not None and not settings.resample:
        if popularity.shape != (n_items,) or not (np.isfinite(popularity) & (popularity >= 0)).all():
            raise DataError(
                f"popularity is of shape {popularity.shape}; expected {n_items} numbers of at least 0"
            )
        weight = np.maximum(popularity, _LEAST_WEIGHT)
    logarithm = np.log(weight)
    closed = np.zeros(n_items, np.bool_) if allowed is None else ~allowed
    logarithm[closed] = -np.inf
    n_open = n_items - int(np.count_nonzero(closed))
    again = (round_,) if settings.resample else ()
    found = []
    for position, (user, key) in enumerate(zip(users, keys, strict=True)):
        check_user(user, position, settings, n_items, len(user.attributes))
        rated = int(np.count_nonzero(~closed[user.items]))
        together = _together(rated, n_open, settings)
        sequence = np.random.SeedSequence(int(key), spawn_key=(_SAMPLE, seed, *again))
        # The largest of log weight + Gumbel noise are a weighted sample without replacement, in the order drawn.
        order = logarithm + np.random.default_rng(sequence).gumbel(size=n_items)
        order[user.items] = -np.inf
        wanted = together - rated
        drawn = np.argpartition(-order, wanted - 1)[:wanted] if wanted else _NONE
        found.append(dataclasses.replace(user, sampled=np.sort(drawn)))
    return found


def _together(rated: int, n_open: int, settings: FactorSettings) -> int:
    """Return the number of items of a user that have a weight, rated and sampled together."""
    if not rated:
        return 0
    # Subtract a little, as 1.1 * 10 is 11.000000000000002.
    least = int(np.ceil((1 + settings.samples) * rated - 1e-9))
    return min(least if settings.resample else 1 << (least - 1).bit_length(), n_open)


def local_step(
    model: Mapping[str, NDArray[np.float32]],
    users: Sequence[UserData],
    settings: FactorSettings,
    keys: Sequence[int] | NDArray[np.integer],
    *,
    seed: int,
    round_: int,
    factors: NDArray[np.float32] | None = None,
    allowed: NDArray[np.bool_] | None = None,
) -> Iterator[FactorUpdate]:
    """Run the local step of a round for some users, each on its own data.

    Parameters
    ----------
    model : mapping
        Version of the model that the users fetched.
    users : sequence of UserData
    settings : FactorSettings
    keys : sequence of int
        Each user's own number, at least 0, which nobody else knows.
    seed, round_ : int
        Seed of the run, and number of the round; at least 0.
    factors : ndarray of float32, shape (users, K), optional
        Factors that the users kept from their last round; needed with SGD.
    allowed : ndarray of bool, shape (n_items,), optional
        Open items.  A rated item that is closed trains the user's factor only, and its row is not sent; an unrated item
        that is closed has no weight.

    Yields
    ------
    UserUpdate
        One for each user, in no particular order: those of similar size come together.

    Raises
    ------
    DataError
        A user's data does not fit the model: an item that does not exist, a rating out of range, another number of
        attributes, sampled items that the weights do not want.  Errors name the user's position and no value.
    ValueError
        SGD without the factors that users kept.
    """
    if settings.update == "sgd" and (factors is None or factors.shape != (len(users), settings.width)):
        raise ValueError("with update 'sgd' the factors that users kept are needed, one row for each")
    program = _Program(model, settings, allowed)
    stepped = factors if settings.update == "sgd" else None
    for stack in program.stacks(users):
        rngs = generators([keys[u] for u in stack], _LOCAL, seed, round_)
        yield from program.run(
            stack, [users[u] for u in stack], None if stepped is None else stepped[stack], rngs
        )


def generators(keys: Sequence[int] | NDArray[np.integer], *draws: int) -> list[np.random.Generator]:
    """Return random numbers for each of some users, from the users' own numbers and the key of what is drawn."""
    return [np.random.default_rng(np.random.SeedSequence(int(key), spawn_key=draws)) for key in keys]


def user_factors(
    model: Mapping[str, NDArray[np.float32]],
    users: Sequence[UserData],
    settings: FactorSettings,
    *,
    allowed: NDArray[np.bool_] | None = None,
) -> NDArray[np.float32]:
    """Solve for the users' factors at a version of the model (8), to score items with it.

    Parameters
    ----------
    model, users, settings, allowed
        As in `local_step`.

    Returns
    -------
    ndarray of float32, shape (users, K)
        A user without ratings gets the factors of its attributes alone, as
        `coterie.systems.shared.factors.from_attributes`; zero without attributes.

    Raises
    ------
    DataError
        As in `local_step`.
    """
    program = _Program(model, settings, allowed)
    found = np.zeros((len(users), settings.width), np.float32)
    for stack in program.stacks(users):
        found[stack] = program.equations([users[u] for u in stack]).solved()
    return found


def check_user(
    user: UserData, position: int, settings: FactorSettings, n_items: int, n_attributes: int
) -> None:
    """Check that a user's data fits the model.

    Parameters
    ----------
    user : UserData
    position : int
        Position of the user, for the error.
    settings : FactorSettings
    n_items, n_attributes : int
        Numbers of items and of user attributes of the model.

    Raises
    ------
    DataError
        The data does not fit; the error tells no value.
    """
    if user.last >= n_items:
        raise DataError(f"user {position} has an item beyond the {n_items} of the model")
    if user.span[0] < settings.lowest or user.span[1] > settings.highest:
        raise DataError(
            f"user {position} has a rating out of range; expected {settings.lowest:g} to {settings.highest:g}"
        )
    if len(user.sampled) and settings.weights != "sampled":
        raise DataError(f"user {position} has sampled items; with weights {settings.weights!r} expected none")
    if len(user.attributes) != n_attributes:
        raise DataError(
            f"user {position} has {len(user.attributes)} attributes; the model has {n_attributes}"
        )


@dataclass(frozen=True, eq=False)
class _Equations:
    """Normal equations of a stack of users: the derivative of J by p is 2 (normal p - right)."""

    normal: NDArray[np.float64]
    """(n, K, K)"""
    right: NDArray[np.float64]
    """(n, K)"""
    items: NDArray[np.int64]
    """Items with factors in the stack, (n, w), padded with item 0."""
    rows: NDArray[np.float64]
    """Factors of these, (n, w, K)."""
    ratings: NDArray[np.float64]
    weights: NDArray[np.float64]
    """(n, w); weights are 0 where there is padding."""
    known: NDArray[np.bool_]
    attributes: NDArray[np.float64]
    """(n, n_attributes), zero where missing."""
    one: int | None
    """Value of p that is 1; None where all are solved for."""

    def solved(self) -> NDArray[np.float32]:
        """Return p, float32 (n, K)."""
        return solved(self.normal, self.right, self.one)


class _Program:
    """Batched tensor program of the local step, at one version of the model.

    Products run over stacks of matrices, one for each user, so that no user's bits depend on another's.
    """

    def __init__(
        self,
        model: Mapping[str, NDArray[np.float32]],
        settings: FactorSettings,
        allowed: NDArray[np.bool_] | None,
    ) -> None:
        self.settings = settings
        self.q = model["items"].astype(np.float64)
        self.u = model["attributes"].astype(np.float64)
        k = settings.width
        self.one = ITEM if settings.biases else None
        self.of_users, self.of_items = moving(settings)
        self.outer = (self.u[:, :, None] * self.u[:, None, :]).reshape(len(self.u), k * k)
        self.allowed = np.ones(len(self.q), np.bool_) if allowed is None else allowed
        self.every = settings.weights == "incl-unc"
        if self.every:
            self.open = np.flatnonzero(self.allowed).astype(np.int32)
            shown = self.q[self.open]
            self.unrated = settings.uncertainty * (shown.T @ shown)

    def stacks(self, users: Sequence[UserData]) -> Iterator[list[int]]:
        """Check the users and yield the positions of those that go through the program together."""
        for position, user in enumerate(users):
            check_user(user, position, self.settings, len(self.q), len(self.u))
        sizes = [len(user.touched) for user in users]
        return stacks(sizes, self.settings.width, len(self.q) if self.every else 0)

    def equations(self, users: Sequence[UserData]) -> _Equations:
        """Set up the normal equations of users whose items are padded to the same number."""
        settings, n, k = self.settings, len(users), self.settings.width
        width = padded(len(users[0].touched))
        items = np.zeros((n, width), np.int64)
        ratings, weights = np.zeros((n, width)), np.zeros((n, width))
        attributes = np.empty((n, len(self.u)))
        for row, user in enumerate(users):
            rated, touched = len(user.items), len(user.touched)
            items[row, :touched] = user.touched
            ratings[row, :rated] = scaled(settings, user.ratings)
            weights[row, :rated] = 1.0
            weights[row, rated:touched] = self._sampled(user)
            attributes[row] = user.attributes
        known = ~np.isnan(attributes)
        attributes = np.where(known, attributes, 0.0)
        rows = self.q[items]
        beyond = weights
        if self.every:
            # Weights beyond those of unrated items, which are in the sum over all open items.
            beyond = weights * np.where(self.allowed[items], 1 - settings.uncertainty, 1.0)
        normal = (rows * beyond[:, :, None]).transpose(0, 2, 1) @ rows
        if self.every:
            normal += self.unrated
        normal += settings.side * (known.astype(np.float64)[:, None, :] @ self.outer).reshape(n, k, k)
        normal += settings.ridge * np.eye(k)
        right = (ratings * weights)[:, None, :] @ rows + settings.side * (attributes[:, None, :] @ self.u)
        return _Equations(normal, right[:, 0], items, rows, ratings, weights, known, attributes, self.one)

    def _sampled(self, user: UserData) -> NDArray[np.float64]:
        r"""Return the weights of a user's sampled items, in total at most :math:`\alpha \rho` per rated item."""
        shown = self.allowed[user.sampled]
        rated, sampled = np.count_nonzero(self.allowed[user.items]), np.count_nonzero(shown)
        share = min(1.0, self.settings.samples * rated / sampled) if sampled else 0.0
        return np.where(shown, share * self.settings.uncertainty, 0.0)

    def run(
        self,
        stack: Sequence[int],
        users: Sequence[UserData],
        factors: NDArray[np.float32] | None,
        rngs: Sequence[np.random.Generator],
    ) -> Iterator[FactorUpdate]:
        """Solve, or step from the given factors, and yield the updates of the users of a stack."""
        settings = self.settings
        given = self.equations(users)
        p = given.solved() if factors is None else factors
        kept, wide = p, p.astype(np.float64)
        if factors is not None:
            slope = 2 * ((given.normal @ wide[:, :, None])[:, :, 0] - given.right)
            kept = (wide - settings.private_rate * (self.of_users * slope)).astype(np.float32)
        missed = given.ratings - (given.rows @ wide[:, :, None])[:, :, 0]
        errors = given.weights * missed
        missing = np.where(given.known, given.attributes - (wide[:, None, :] @ self.u.T)[:, 0], 0.0)
        loss = (errors * missed).sum(axis=1) + settings.side * (missing * missing).sum(axis=1)
        loss += settings.ridge * (wide * wide).sum(axis=1)
        everywhere = -settings.uncertainty * (wide[:, None, :] @ self.q.T)[:, 0] if self.every else None
        for row, (position, user) in enumerate(zip(stack, users, strict=True)):
            touched = user.touched
            shown = self.allowed[touched]
            if everywhere is None:
                order = user.ascending[shown[user.ascending]]
                rows, values = touched[order].astype(np.int32), errors[row, order]
            else:
                every = everywhere[row]
                # The loss of unrated items: the sum over all open items, less that over rated ones.
                unrated = (every[self.open] ** 2).sum() - (every[touched[shown]] ** 2).sum()
                loss[row] += unrated / settings.uncertainty
                every[touched] = errors[row, : len(touched)]
                rows, values = self.open, every[self.open]
            yield FactorUpdate(
                index=position,
                rows=rows,
                errors=values.astype(np.float32),
                attribute_errors=missing[row].astype(np.float32),
                factor=p[row],
                sent=self.of_items,
                kept=kept[row],
                loss=float(loss[row]),
                rng=rngs[row],
            )
