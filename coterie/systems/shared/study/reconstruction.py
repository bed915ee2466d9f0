r"""Reconstruction attack: finds a FedMVMF user's ratings and attributes from what it sent (Mai and Pang, chapter 4).

A user sends :math:`f(i, j) = c_{ij} (r_{ij} - p_i q_j) p_i` for items with a weight and
:math:`f(i, d) = (x_{id} - p_i u_d) p_i` for its attributes; the attacker has these and the version of :math:`Q` and
:math:`U` that the user fetched.  Mai and Pang write out a system of quadratic equations in all ratings and attributes
and hand it to a solver (`coterie.systems.fedmvmf.study.published_systems`).  There is no need to: what was sent is *one
matrix of rank one*, :math:`F = e\, p^T` with the errors :math:`e`. Its direction :math:`\hat p` and :math:`g = F \hat
p = s\, e` are read off, and everything else follows from one unknown number, the length :math:`s` of :math:`p` with
its sign:

.. math:: r_{ij} = g_j / (s\, c_{ij}) + s\, \hat p\, q_j, \qquad x_{id} = g_d / s + s\, \hat p\, u_d .

Three things give :math:`s`, each in closed form or by a search along one line, and one epoch is enough for all but the
second:

* Under SemiALS :math:`p` minimises the user's cost: :math:`\sum_j c_j e_j q_j + \lambda_1 \sum_d e_d u_d = \lambda_2
  p`, whatever the weights are, so :math:`s^2 = \hat p \cdot (\sum_j g_j q_j + \lambda_1 \sum_d g_d u_d) / \lambda_2`.
* Under SGD two epochs give :math:`p' = (1 - 2 \gamma \lambda_2) p + 2 \gamma (\dots) / s` in a direction that is read
  off as well: its part across that direction is zero.
* Ratings are whole stars and attributes 0 or 1: a wrong :math:`s` puts hundreds of values between the stars.  If
  all items have weights, most rows are :math:`-\alpha s^2 \hat p q_j` for :math:`\hat p`, which gives an equation for
  each.

The last decides between candidates, and refines them.  Noise of known size enters as the likelihood of each star,
together with public statistics: how often each item is rated, and with how many stars.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from coterie.errors import DataError
from coterie.secure_sum.contribution import Layout
from coterie.wire.v1.rounds_pb2 import SummedVector

__all__ = [
    "Marginals",
    "Reconstruction",
    "Rules",
    "Seen",
    "noisy",
    "reconstruct",
    "seen_in_message",
    "seen_in_sum",
]

Doubles = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

_SHORTEST, _LONGEST, _SCANNED = 0.05, 20.0, 240
"""Range and number of lengths of p that are tried where no equation gives one."""

_BLURS = (0.25, 0.08, 0.025, 0.008, 0.0025, 0.001)
"""Tolerances in stars, from the first look to the last: the likelihood has a very narrow peak at the truth."""

_SAMPLE = 400
"""Most items by which candidates are compared."""

_WINDOW, _STEPS = 0.6, 41
"""Half width of the search around a candidate, relative and per unit of blur, and its number of steps."""

_FOLLOWED = 6
"""Number of a scan's candidates that are refined."""

_WEIGHED = 3
"""Lengths for which the weight of unrated items is looked for, and weights that are then refined."""

_OUTLIER = 1e-7
"""Share of values that fit no star, such as clipped ones."""

_SETTLED = 0.05
"""Largest share of values that an accepted solution may leave unexplained."""

_VALUES = 1 << 22
"""Most values of likelihoods in memory at once."""


class Rules(Protocol):
    """The public settings of a run; `coterie.systems.shared.factor_settings.FactorSettings` has them."""

    @property
    def weights(self) -> str:
        """``obs-only``, ``incl-unc`` or ``sampled``."""

    @property
    def uncertainty(self) -> float:
        r""":math:`\\alpha`."""

    @property
    def samples(self) -> float:
        r""":math:`\\rho`."""

    @property
    def resample(self) -> bool:
        """Whether unrated items are drawn anew in each round."""

    @property
    def side(self) -> float:
        r""":math:`\\lambda_1`."""

    @property
    def ridge(self) -> float:
        r""":math:`\\lambda_2`."""

    @property
    def update(self) -> str:
        """``semi-als`` or ``sgd``."""

    @property
    def private_rate(self) -> float:
        r""":math:`\\gamma` of :math:`p_i`."""


@dataclass(frozen=True, eq=False)
class Seen:
    r"""The COS's view of one contribution: the sum that it received, and the model version that it had sent.

    Attributes
    ----------
    items : ndarray of float64, shape (m, K)
        Sum of :math:`f(i, j)`; of one user in the attacked form.
    attributes : ndarray of float64, shape (l, K)
        Sum of :math:`f(i, d)`.
    item_factors : ndarray, shape (m, K)
        :math:`Q`.
    attribute_factors : ndarray, shape (l, K)
        :math:`U`.
    noise : (float, float)
        Standard deviation of what rounding, or the user, added to one value of ``items`` and of ``attributes``.
    bounds : (float, float)
        Size at which values of the two were clipped.
    exact : bool
        Whether a row of zeros says that nothing was sent: not where noise was added to all attributes.

    Raises
    ------
    DataError
        Arrays that do not fit each other.
    """

    items: Doubles
    attributes: Doubles
    item_factors: npt.NDArray[np.floating]
    attribute_factors: npt.NDArray[np.floating]
    noise: tuple[float, float] = (0.0, 0.0)
    bounds: tuple[float, float] = (np.inf, np.inf)
    exact: bool = True

    def __post_init__(self) -> None:
        for name, sent, factors in (
            ("items", self.items, self.item_factors),
            ("attributes", self.attributes, self.attribute_factors),
        ):
            if sent.ndim != 2 or sent.shape != factors.shape:
                raise DataError(
                    f"{name} of shape {sent.shape} for factors of shape {factors.shape}; expected the same"
                )
        if self.items.shape[1] != self.attributes.shape[1]:
            raise DataError(
                f"items with {self.items.shape[1]} factors, attributes with {self.attributes.shape[1]}"
            )

    @property
    def touched(self) -> Flags:
        """Items of which something was sent, bool (m,)."""
        return np.asarray(self.items.any(axis=1))


def seen_in_message(
    message: bytes,
    layout: Layout,
    item_factors: npt.NDArray[np.floating],
    attribute_factors: npt.NDArray[np.floating],
    *,
    users: int = 1,
) -> Seen:
    """Return the COS's view of a member's message in clear, or of a revealed sum.

    Parameters
    ----------
    message : bytes
        A serialised ``SummedVector``, as the COS received it.
    layout : Layout
        Layout of the plan: ``items`` (m, K) and, where users have attributes, ``attributes`` (l, K).
    item_factors, attribute_factors : ndarray, shapes (m, K) and (l, K)
        The version that was fetched.
    users : int
        How many users it covers.

    Raises
    ------
    DataError
        The message is no vector of the layout (the COS refused it, too); or as `Seen`.
    ImpossibleSumError
        When the bounds rule the sum out.
    """
    try:
        sent = SummedVector.FromString(message).codes
    except DecodeError:
        raise DataError("a contribution that is no SummedVector") from None
    if len(sent) != 4 * layout.size:
        raise DataError(f"a contribution of {len(sent)} bytes; expected {4 * layout.size} by the layout")
    codes = np.frombuffer(sent, "<u4").astype(np.uint32)
    return seen_in_sum(codes, layout, item_factors, attribute_factors, users=users)


def seen_in_sum(
    codes: npt.NDArray[np.uint32],
    layout: Layout,
    item_factors: npt.NDArray[np.floating],
    attribute_factors: npt.NDArray[np.floating],
    *,
    users: int,
) -> Seen:
    """Return the COS's view of a vector of codes: one contribution, or a sum that a round revealed.

    Parameters
    ----------
    codes : ndarray of uint32, shape (layout.size,)
    layout, item_factors, attribute_factors, users
        As `seen_in_message`.

    Raises
    ------
    ImpossibleSumError
        When the bounds rule the sum out.
    DataError
        As `Seen`.
    """
    sums = layout.decode(codes, users)
    width = item_factors.shape[1]
    steps, bounds = [], []
    for name in ("items", "attributes"):
        present = name in sums
        # Rounding up or down at random has a variance of at most a quarter of a step squared.
        steps.append(layout[name].step / 2 * np.sqrt(users) if present else 0.0)
        # The largest code stands for everything beyond it; in a sum over several it says nothing.
        bounds.append(layout[name].bound * (1 - 1e-9) if present and users == 1 else np.inf)
    return Seen(
        sums["items"],
        sums.get("attributes", np.zeros((0, width))),
        item_factors,
        attribute_factors,
        noise=(steps[0], steps[1]),
        bounds=(bounds[0], bounds[1]),
    )


def noisy(seen: Seen, scale: float, rng: np.random.Generator) -> Seen:
    """Add Laplace noise to everything that was sent, as in Mai and Pang's figures 1 to 3.

    Parameters
    ----------
    seen : Seen
    scale : float
        :math:`b`, at least 0; 0 changes nothing.
    rng : Generator
    """
    if not scale:
        return seen
    touched = seen.touched
    items = seen.items.copy()
    items[touched] += rng.laplace(0, scale, items[touched].shape)
    spread = np.sqrt(2) * scale
    return replace(
        seen,
        items=items,
        attributes=seen.attributes + rng.laplace(0, scale, seen.attributes.shape),
        noise=(float(np.hypot(seen.noise[0], spread)), float(np.hypot(seen.noise[1], spread))),
        exact=False,
    )


@dataclass(frozen=True, eq=False)
class Marginals:
    """Public statistics of all users together.

    Attributes
    ----------
    stars : ndarray of float64, shape (v,)
        Possible ratings, ascending, above 0.
    shares : ndarray of float64, shape (m, v)
        Share of the users who rated an item that gave it so many stars; rows add up to 1.
    rated : ndarray of float64, shape (m,)
        Share of the users who rated it.
    attributes : ndarray of float64, shape (l,)
        Share of the users who have the attribute, of those of whom it is known.
    """

    stars: Doubles
    shares: Doubles
    rated: Doubles
    attributes: Doubles

    @classmethod
    def unknown(cls, stars: Sequence[float], n_items: int, n_attributes: int) -> Marginals:
        """Return the marginals of an attacker who knows none: everything is equally likely."""
        v = len(stars)
        return cls(
            np.asarray(stars, np.float64),
            np.full((n_items, v), 1 / v),
            np.full(n_items, 0.5),
            np.full(n_attributes, 0.5),
        )

    @classmethod
    def of(
        cls,
        items: npt.NDArray[np.integer],
        ratings: npt.NDArray[np.floating],
        attributes: npt.NDArray[np.floating],
        stars: Sequence[float],
        n_items: int,
    ) -> Marginals:
        """Count ratings and attributes of a population.

        Parameters
        ----------
        items, ratings : ndarray, shape (p,)
            Item and stars of each rating; stars that are not possible count as the nearest.
        attributes : ndarray, shape (n, l)
            Attributes of each user, NaN where missing.
        stars : sequence of float
        n_items : int
        """
        known = np.asarray(stars, np.float64)
        at = np.abs(np.asarray(ratings, np.float64)[:, None] - known).argmin(axis=1)
        counts = np.zeros((n_items, len(known)))
        np.add.at(counts, (items, at), 1)
        users = len(attributes)
        overall = (counts.sum(axis=0) + 1) / (counts.sum() + len(known))
        told = ~np.isnan(attributes)
        # As if one more user had rated each item as all do, and one more pair had half of each attribute.
        return cls(
            known,
            (counts + overall) / (counts.sum(axis=1, keepdims=True) + 1),
            (counts.sum(axis=1) + 0.5) / (users + 1),
            (np.where(told, attributes, 0).sum(axis=0) + 0.5) / (told.sum(axis=0) + 1),
        )


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """The attacker's guess of a user.

    Attributes
    ----------
    factor : ndarray of float64, shape (K,)
        :math:`p` of the first epoch; zero where nothing was sent.
    ratings : ndarray of float64, shape (m,)
        0 for an item that is held not to be rated.
    rated : ndarray of float64, shape (m,)
        Log-odds that the user rated it, the higher the likelier; of items of which nothing was sent the least.
    attributes : ndarray of float64, shape (l,)
        0 or 1; NaN where nothing was sent.
    likelihood : float
        Mean log-likelihood of a value that was sent; ``-inf`` where nothing was.
    """

    factor: Doubles
    ratings: Doubles
    rated: Doubles
    attributes: Doubles
    likelihood: float


def reconstruct(
    first: Seen,
    rules: Rules,
    marginals: Marginals,
    *,
    second: Seen | None = None,
) -> Reconstruction:
    """Reconstruct a user from one epoch, or with SGD from two that follow each other.

    Parameters
    ----------
    first : Seen
    rules : Rules
        Public settings of the run.
    marginals : Marginals
        Public statistics; `Marginals.unknown` for an attacker who knows none.
    second : Seen, optional
        The same user's contribution in its next epoch.  Only with SGD: SemiALS solves anew, and needs no second one.

    Returns
    -------
    Reconstruction

    Raises
    ------
    DataError
        Marginals that do not fit what was sent, or a second epoch with SemiALS.
    """
    if marginals.shares.shape[0] != len(first.items) or len(marginals.attributes) != len(first.attributes):
        raise DataError(
            f"marginals of {marginals.shares.shape[0]} items and {len(marginals.attributes)} attributes for "
            f"{len(first.items)} and {len(first.attributes)}"
        )
    if second is not None and rules.update != "sgd":
        raise DataError("a second epoch only says more with SGD; with SemiALS reconstruct each by itself")
    told: Flags = np.ones(len(first.attributes), np.bool_)
    if first.exact:
        told = np.asarray(first.attributes.any(axis=1))
    only_rated, touched = rules.weights == "obs-only", first.touched
    if second is not None and rules.weights == "sampled" and rules.resample:
        # Drawn anew: what both epochs have in common is rated.
        only_rated, touched = True, touched & second.touched
    elif second is not None:
        # An error may be so small that it is rounded to nothing.
        touched = touched | second.touched
    at = np.flatnonzero(touched)
    guess = Reconstruction(
        np.zeros(first.items.shape[1]),
        np.zeros(len(first.items)),
        np.full(len(first.items), -np.inf),
        np.full(len(first.attributes), np.nan),
        -np.inf,
    )
    line = _line(first, at, told, rules)
    if line is None:
        return guess
    lines = [line]
    if second is not None and (following := _line(second, at, told, rules)) is not None:
        lines.append(following)
    fit = _Fit(lines, rules, marginals, at, told, only_rated)
    scale, weight = fit.best()
    return fit.read(scale, weight, guess)


@dataclass(frozen=True, eq=False)
class _Line:
    """The rank-one factorisation of a contribution."""

    direction: Doubles
    """Unit vector along p, (K,)."""
    items: Doubles
    """Component of each item row along ``direction``, (t,): errors times the length of p."""
    item_products: Doubles
    """Inner products of ``direction`` with the items' factors, (t,)."""
    item_noise: Doubles
    attributes: Doubles
    attribute_products: Doubles
    attribute_noise: Doubles
    pull: Doubles
    """Sum of factors times the component along ``direction``, over all rows sent; (K,)."""
    pull_noise: float
    """Standard deviation of the part of ``pull`` along ``direction``."""


def _line(seen: Seen, at: npt.NDArray[np.intp], told: Flags, rules: Rules) -> _Line | None:
    """Find the direction of a contribution; None where nothing was sent."""
    rows = np.concatenate([seen.items, seen.attributes])
    whole = np.concatenate([np.abs(seen.items) < seen.bounds[0], np.abs(seen.attributes) < seen.bounds[1]])
    noise = np.concatenate([np.full(len(seen.items), seen.noise[0]), np.full(len(told), seen.noise[1])])
    factors = np.concatenate([seen.item_factors, seen.attribute_factors]).astype(np.float64)
    clean = whole.all(axis=1)
    # Rows with a clipped value point elsewhere; without any other they still say something.
    used = rows[clean] if rows[clean].any() else rows
    if not used.any():
        return None
    direction = np.linalg.eigh(used.T @ used)[1][:, -1]
    weights = np.where(whole, direction, 0.0)
    seenable = (weights * weights).sum(axis=1)
    # A row that was clipped everywhere tells only the size of the clipped values.
    weights[seenable == 0] = direction
    seenable = (weights * weights).sum(axis=1)
    along = (rows * weights).sum(axis=1) / seenable
    blur = noise / np.sqrt(seenable)
    products = factors @ direction
    m = len(seen.items)
    strength = np.concatenate([np.ones(m), np.where(told, rules.side, 0.0)])
    sent = np.concatenate([seen.touched, told])
    lost = np.sqrt(np.square(strength * products * blur)[sent].sum())
    return _Line(
        direction,
        along[:m][at],
        products[:m][at],
        blur[:m][at],
        along[m:][told],
        products[m:][told],
        blur[m:][told],
        factors.T @ (strength * along),
        float(lost),
    )


class _Fit:
    """The search for the length of p that best explains a contribution."""

    def __init__(
        self,
        lines: Sequence[_Line],
        rules: Rules,
        marginals: Marginals,
        at: npt.NDArray[np.intp],
        told: Flags,
        only_rated: bool,
    ) -> None:
        self.lines, self.rules, self.marginals, self.at, self.told = lines, rules, marginals, at, told
        self.only_rated = only_rated
        self.stars = np.concatenate([[0.0], marginals.stars])
        first = lines[0]
        self.size = float(np.sqrt(np.mean(np.square(np.concatenate([first.items, first.attributes])))))

    def best(self) -> tuple[float, float]:
        """Return the length of p with its sign, and the weight of an unrated item."""
        some = self._sample(_SAMPLE)
        weights = self._weights()
        weight, slack = float(weights.mean()), float(np.ptp(weights) / 2)
        # The weight of unrated items may depend on their number, which is not known: then they are only roughly where
        # they should be, the rated ones give the length, and the length gives the weight.
        tried = [self._refined(scale, weight, some, slack) for scale in self._read_off(weight)]
        if not tried or not self._settled(max(tried)[1], weight, some, slack):
            tried += [
                self._refined(scale, weight, some, slack) for scale in self._scanned(weight, some, slack)
            ]
        if slack:
            everything = np.arange(len(self.at))
            lengths: list[float] = []
            for _, scale, _ in sorted(tried, reverse=True):
                if all(abs(scale / other - 1) > _BLURS[3] for other in lengths):
                    lengths.append(scale)
            tried = []
            for length in lengths[:_WEIGHED]:
                heights = [
                    float(self.likelihood(np.array([length]), each, _BLURS[1], everything)[0])
                    for each in weights
                ]
                likeliest = weights[np.argsort(heights)[-_WEIGHED:]]
                tried += [self._refined(length, float(each), everything) for each in likeliest]
        _, scale, weight = max(tried)
        return scale, weight

    def _settled(self, scale: float, weight: float, some: npt.NDArray[np.intp], slack: float) -> bool:
        """Return whether a length explains nearly every value, where noise is too small to explain it instead."""
        first = self.lines[0]
        noise = np.concatenate([first.item_noise, first.attribute_noise])
        if np.median(noise) > _BLURS[2] * abs(scale):
            return False
        evidence = self._evidence(np.array([scale]), weight, _BLURS[-1], some, slack)
        unexplained = np.concatenate([_total(part)[0] < self._outlier() for part in evidence])
        return bool(unexplained.mean() < _SETTLED)

    def _outlier(self) -> float:
        return float(np.log(_OUTLIER) - np.log(4 * self.size + 1e-300))

    def _weights(self) -> Doubles:
        """Return the weights that an unrated item may have."""
        rules, touched = self.rules, len(self.at)
        if rules.weights != "sampled" or rules.resample or self.only_rated or not touched:
            return np.array([rules.uncertainty])
        # Rated and sampled items together are the power of two above 1 + rho times the rated ones, or all items.
        most = max(int(touched / (1 + rules.samples) + 1e-9), 1)
        fewest = min(int(touched / 2 / (1 + rules.samples)) + 1, most)
        rated = np.arange(fewest, most + 1)
        share = np.minimum(1.0, rules.samples * rated / np.maximum(touched - rated, 1))
        return np.asarray(np.unique(rules.uncertainty * share))

    def _read_off(self, weight: float) -> Iterator[float]:
        """Yield the lengths that follow from equations, with both signs."""
        rules, first = self.rules, self.lines[0]
        squares = []
        if rules.update == "semi-als":
            squares.append(float(first.direction @ first.pull) / rules.ridge)
        elif len(self.lines) > 1:
            shrunk = 1 - 2 * rules.private_rate * rules.ridge
            across = np.eye(len(first.direction)) - np.outer(self.lines[1].direction, self.lines[1].direction)
            aside = across @ first.direction
            if aside.any():
                turned = -2 * rules.private_rate * float(aside @ first.pull)
                squares.append(turned / (shrunk * float(aside @ aside)))
        if not self.only_rated and len(self.at):
            # Most items are unrated: their rows say -weight s^2 times the product.
            with np.errstate(divide="ignore", invalid="ignore"):
                ratios = -first.items / (weight * first.item_products)
            squares.append(
                float(np.median(ratios[np.isfinite(ratios)])) if np.isfinite(ratios).any() else 0.0
            )
        for square in squares:
            if 0 < square < np.inf:
                yield float(np.sqrt(square))
                yield -float(np.sqrt(square))

    def _scanned(self, weight: float, some: npt.NDArray[np.intp], slack: float) -> list[float]:
        """Return the lengths that look best from far away."""
        lengths = np.geomspace(_SHORTEST, _LONGEST, _SCANNED)
        found = []
        for signed in (lengths, -lengths):
            heights = self.likelihood(signed, weight, _BLURS[0], some, slack)
            padded = np.concatenate([[-np.inf], heights, [-np.inf]])
            peaks = np.flatnonzero((heights >= padded[:-2]) & (heights >= padded[2:]))
            found += [(float(heights[peak]), float(signed[peak])) for peak in peaks]
        return [scale for _, scale in sorted(found)[-_FOLLOWED:]]

    def _refined(
        self, scale: float, weight: float, some: npt.NDArray[np.intp], slack: float = 0.0
    ) -> tuple[float, float, float]:
        """Climb from a length to the nearest maximum; return its likelihood, the length and the weight."""
        height = -np.inf
        for before, blur in zip((_BLURS[0] / 3, *_BLURS), _BLURS[1:], strict=False):
            scales = scale * (1 + _WINDOW * before * np.linspace(-1, 1, _STEPS))
            heights = self.likelihood(scales, weight, blur, some, slack)
            at = int(heights.argmax())
            scale, height = float(scales[at]), float(heights[at])
        return height, scale, weight

    def likelihood(
        self, scales: Doubles, weight: float, blur: float, some: npt.NDArray[np.intp], slack: float = 0.0
    ) -> Doubles:
        """Return the log-likelihood of lengths, (S,), by some of the items and all attributes."""
        found = np.zeros(len(scales))
        each = max(1, _VALUES // max(1, len(some) * len(self.stars)))
        for start in range(0, len(scales), each):
            part = slice(start, start + each)
            items, attributes = self._evidence(scales[part], weight, blur, some, slack)
            for evidence in (items, attributes):
                found[part] += np.logaddexp(_total(evidence), self._outlier()).sum(axis=1)
        if self.rules.update == "semi-als":
            first, square = self.lines[0], self.rules.ridge * np.square(scales)
            missed = float(first.direction @ first.pull) - square
            found += _log_normal(missed, np.hypot(first.pull_noise, blur * square) + 1e-12 * self.size)
        return found

    def _evidence(
        self, scales: Doubles, weight: float, blur: float, some: npt.NDArray[np.intp], slack: float = 0.0
    ) -> tuple[Doubles, Doubles]:
        """Return the log-likelihood of each star (none first), (S, t, v + 1), and of each attribute, (S, l, 2)."""
        known = self.marginals
        chances = known.rated[self.at[some]]
        if self.rules.weights == "sampled":
            chances = np.full(len(some), 1 / (1 + self.rules.samples))
        if self.only_rated:
            chances = np.ones(len(some))
        with np.errstate(divide="ignore"):
            prior = np.log(np.column_stack([1 - chances, chances[:, None] * known.shares[self.at[some]]]))
            shares = known.attributes[self.told]
            has = np.log(np.column_stack([1 - shares, shares]))
        items = np.broadcast_to(prior, (len(scales), *prior.shape)).copy()
        attributes = np.broadcast_to(has, (len(scales), *has.shape)).copy()
        factor = np.where(self.stars > 0, 1.0, weight)
        loose = np.where(self.stars > 0, 0.0, slack)
        for line, length in zip(self.lines, self._lengths(scales), strict=True):
            s = length[:, None, None]
            error = self.stars - s * line.item_products[some][:, None]
            expected = s * factor * error
            spread = np.hypot(line.item_noise[some][:, None], np.abs(s) * factor * blur)
            spread = np.hypot(spread, np.abs(s * loose * error))
            items += _log_normal(line.items[some][:, None] - expected, spread + 1e-12 * self.size)
            expected = s * (np.array([0.0, 1.0]) - s * line.attribute_products[:, None])
            spread = np.hypot(line.attribute_noise[:, None], np.abs(s) * blur)
            attributes += _log_normal(line.attributes[:, None] - expected, spread + 1e-12 * self.size)
        return items, attributes

    def _lengths(self, scales: Doubles) -> Iterator[Doubles]:
        """Yield the length of p in each epoch: by the rule of its step, the first gives the second."""
        yield scales
        if len(self.lines) > 1:
            first, second, rules = self.lines[0], self.lines[1], self.rules
            kept = (1 - 2 * rules.private_rate * rules.ridge) * float(second.direction @ first.direction)
            yield kept * scales + 2 * rules.private_rate * float(second.direction @ first.pull) / scales

    def _sample(self, size: int) -> npt.NDArray[np.intp]:
        """Return positions of some of the items, spread over all."""
        return np.unique(np.linspace(0, len(self.at) - 1, min(size, len(self.at))).astype(np.intp))

    def read(self, scale: float, weight: float, guess: Reconstruction) -> Reconstruction:
        """Return the likeliest stars and attributes for a length of p."""
        everything = np.arange(len(self.at))
        items, attributes = (
            part[0] for part in self._evidence(np.array([scale]), weight, _BLURS[-1], everything)
        )
        ratings, rated, has = guess.ratings.copy(), guess.rated.copy(), guess.attributes.copy()
        ratings[self.at] = self.stars[items.argmax(axis=1)]
        some_stars = _total(items[:, 1:])
        # Where no unrated item has a weight, all that were sent are equally certain.
        rated[self.at] = np.inf if self.only_rated else some_stars - items[:, 0]
        has[self.told] = attributes.argmax(axis=1)
        values = len(self.at) + len(has)
        return Reconstruction(
            scale * self.lines[0].direction,
            ratings,
            rated,
            has,
            float(self.likelihood(np.array([scale]), weight, _BLURS[-1], everything)[0]) / max(values, 1),
        )


def _log_normal(missed: Doubles | float, spread: Doubles) -> Doubles:
    return np.asarray(-0.5 * np.square(missed / spread) - np.log(spread) - 0.5 * np.log(2 * np.pi))


def _total(logs: Doubles) -> Doubles:
    """Return the logarithm of the sum over the last axis."""
    top = logs.max(axis=-1, keepdims=True)
    return np.asarray(np.log(np.exp(logs - top).sum(axis=-1)) + top[..., 0])
