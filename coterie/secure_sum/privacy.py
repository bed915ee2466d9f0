r"""Differential privacy of sums: users' contributions are clipped as a whole, and their codes get discrete noise.

Two data sets are neighbours if one user's whole data is replaced by another's.  The values of a contribution fall into
kinds: values that change a model, which are clipped together to a norm C, and each segment of counts or of metrics,
whose norm the plan bounds.  Noise on a kind is in proportion to its norm N, so that each sum costs a user the same:

- Gaussian, L2 norms: a sum with k kinds has noise of :math:`\sigma = z N \sqrt k` on each; a replacement changes a
  kind by at most 2 N, so :math:`\rho = \frac12 \sum (2 N / \sigma)^2 = 2 / z^2` of zero-concentrated differential
  privacy;
- Laplace, L1 norms: scale :math:`b = z N k`, and :math:`\epsilon = \sum 2 N / b = 2 / z`.

Local noise is added to each member's contribution.  Distributed noise is added by each user in the part
:math:`\sigma^2 / h`, where h are the fewest users of a sum less those who may collude.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.secure_sum.contribution import Clip, Layout, Segment
from coterie.secure_sum.discrete_noise import (
    LARGEST_SCALE,
    LARGEST_VARIANCE,
    RandomBytes,
    discrete_gaussian,
    discrete_laplace,
)

__all__ = ["EXACT", "PLACES", "NoiseMechanism", "NoisePlace", "Privacy", "check_privacy"]

NoisePlace = Literal["none", "local", "distributed"]
NoiseMechanism = Literal["gaussian", "laplace"]

PLACES: tuple[NoisePlace, ...] = get_args(NoisePlace)
_MECHANISMS: tuple[NoiseMechanism, ...] = get_args(NoiseMechanism)

_PARTS = 16
"""Steps of a count of one: so finely that noise of whole steps can be small."""

_LEAST_VARIANCE = 4
"""Least variance of a draw, in squared steps: sums of such draws are discrete Gaussians but for `_TAU`."""

_TAU = 1e-5
r"""More than :math:`\tau \sqrt d` for d = 2^32 values and 10^6 users (Kairouz, Liu and Steinke, 2021, theorem 1)."""

_FURTHEST = {"gaussian": 12, "laplace": 40}
"""Standard deviations or scales for which codes have room; noise beyond, about once in 10^17 draws, is cut off."""

_KEPT_BITS = 7
"""Bits of the spread of noise that codes keep: rounding is then far below the noise, and codes are short."""


class _Kind(NamedTuple):
    """Segments whose values are clipped together, and their norm."""

    segments: tuple[Segment, ...]
    norm: float


@dataclass(frozen=True)
class Privacy:
    """Terms on which users' contributions to sums are clipped and get noise.

    Parameters
    ----------
    place : str
        ``none``, ``local`` or ``distributed``.
    mechanism : str
        ``gaussian``, with L2 norms, or ``laplace``, with L1 norms.
    noise : float
        z: standard deviation (Gaussian) or scale (Laplace) of the noise in multiples of a clip.
    clip : float
        Largest norm of the values of one user's contribution that change the model.
    most_items : int
        Largest number of items by which a user is counted.
    most_metrics : float
        Largest norm of a user's metrics that may be above 1, such as sums of squared errors.
    delta : float
        Delta at which epsilon is stated.
    colluders : int
        Users of a sum who may tell the server their noise; of distributed noise.
    per_value : bool
        Whether values are clipped one by one, and noise is in multiples of that: the form of FedGNN.
    """

    place: NoisePlace = "none"
    mechanism: NoiseMechanism = "gaussian"
    noise: float = 0.0
    clip: float = 0.0
    most_items: int = 100
    most_metrics: float = 10.0
    delta: float = 1e-5
    colluders: int = 0
    per_value: bool = False

    @property
    def on(self) -> bool:
        """Whether there is noise."""
        return self.place != "none"

    @property
    def bounds(self) -> Clip:
        """The bounds of one user's contribution."""
        order = 2 if self.mechanism == "gaussian" else 1
        return Clip(self.clip, order, self.per_value, self.most_items, self.most_metrics)

    def cost(self, values: int) -> float:
        """Return the cost to a user of one sum: rho of zCDP (Gaussian) or epsilon (Laplace).

        Parameters
        ----------
        values : int
            Length of the sum, which matters only where values are clipped one by one.
        """
        if self.mechanism == "gaussian":
            return (2 / self.noise + _TAU) ** 2 / 2
        return 2 / self.noise * (values if self.per_value else 1)

    def noisy(self, layout: Layout, floor: int) -> Layout:
        """Return the layout of contributions with noise: the same steps, and room for noise.

        Parameters
        ----------
        layout : Layout
            Of contributions without noise.
        floor : int
            The run's fewest users of a sum.

        Raises
        ------
        ValueError
            When there is no room, or noise is too large to be drawn.
        """
        return _noisy(self, layout, floor)

    def spread(self, layout: Layout, floor: int) -> dict[str, float]:
        """Return the standard deviation (Gaussian) or scale (Laplace) of one draw of noise by segment, in steps.

        A draw is that of a member for local noise, of a user for distributed noise; ``floor`` is as for `noisy`.
        """
        share = self._share(floor)
        found = {}
        for kind, real in self._scales(layout):
            for segment in kind.segments:
                steps = real * share / _step(segment)
                least = math.sqrt(_LEAST_VARIANCE) if self.mechanism == "gaussian" else 1.0
                found[segment.name] = max(steps, least)
        return found

    def deviation(self, layout: Layout, name: str, floor: int, users: int) -> float:
        """Return the standard deviation of some draws of noise together, of a segment's values.

        ``users`` is the number of users, whose draws are added up, or of members where noise is local.
        """
        each = self.spread(layout, floor)[name] * (math.sqrt(2) if self.mechanism == "laplace" else 1.0)
        return each * _step(layout[name]) * math.sqrt(users)

    def draw(self, layout: Layout, floor: int, users: int, random: RandomBytes) -> NDArray[np.int64]:
        """Draw the noise of a member.

        Parameters
        ----------
        layout : Layout
            Of contributions without noise.
        floor : int
            Fewest users of this sum, by its plan.
        users : int
            Users of the member.
        random : callable
            Source of random bytes.

        Returns
        -------
        ndarray of int64, shape (layout size,)
            In steps of the layout, of counts in sixteenths.
        """
        spread = self.spread(layout, floor)
        found = np.empty(layout.size, np.int64)
        for segment in layout.segments:
            one = spread[segment.name]
            if self.mechanism == "laplace":
                drawn = discrete_laplace(math.ceil(one), segment.size, random)
            else:
                variance = math.ceil(one**2) * (users if self.place == "distributed" else 1)
                drawn = discrete_gaussian(variance, segment.size, random)
            found[layout.places[segment.name]] = drawn
        return found

    def with_noise(
        self,
        layout: Layout,
        floors: tuple[int, int],
        users: int,
        steps: NDArray[np.signedinteger],
        random: RandomBytes,
    ) -> NDArray[np.int64]:
        """Return a member's contribution with noise, in steps of the noisy layout.

        Parameters
        ----------
        layout : Layout
            Of contributions without noise.
        floors : tuple of int
            Fewest users of a sum, by the run's plan and by the plan of this sum.
        users : int
            Users of the member.
        steps : ndarray of int, shape (layout size,)
            In steps of ``layout``.
        random : callable
            Source of random bytes.
        """
        run, own = floors
        found = self.draw(layout, own, users, random)
        spread = self.spread(layout, run)
        noisy = self.noisy(layout, run)
        for segment in layout.segments:
            place = layout.places[segment.name]
            values = found[place]
            values += steps[place] if segment.clip else steps[place].astype(np.int64) * _PARTS
            if shift := _coarser(spread[segment.name]):
                # Rounding what has noise already tells nothing more of what it was added to.
                values += 1 << (shift - 1)
                values >>= shift
            # What lies beyond the codes' range is cut off, as anybody could do who sees it.
            limit = users * noisy[segment.name].levels
            np.minimum(values, limit, out=values)
            np.maximum(values, -limit, out=values)
        return found

    def _share(self, floor: int) -> float:
        if self.place != "distributed":
            return 1.0
        if floor <= self.colluders:
            raise ValueError(
                f"rounds.privacy.colluders {self.colluders} with sums over {floor} users: nobody's noise would be "
                f"left; "
                f"expected fewer than {floor}"
            )
        return 1 / math.sqrt(floor - self.colluders)

    def _kinds(self, layout: Layout) -> list[_Kind]:
        changes = tuple(segment for segment in layout.segments if segment.changes)
        found = [_Kind(changes, self.clip)] if changes else []
        return found + [
            _Kind((segment,), self._norm(segment)) for segment in layout.segments if not segment.changes
        ]

    def _norm(self, segment: Segment) -> float:
        """Return the largest norm of one user's counts or metrics in a segment."""
        if segment.measures and not segment.clip and segment.bound > 1:
            return min(self.most_metrics, self._of_many(segment.bound, segment.size))
        items = not segment.measures and segment.shape != ()
        return self._of_many(segment.bound, min(self.most_items, segment.size) if items else segment.size)

    def _of_many(self, bound: float, values: int) -> float:
        return bound * (math.sqrt(values) if self.mechanism == "gaussian" else values)

    def _scales(self, layout: Layout) -> Iterator[tuple[_Kind, float]]:
        """Yield each kind and the standard deviation or scale of its noise in a sum, or in a local report."""
        kinds = self._kinds(layout)
        for kind in kinds:
            if self.per_value:
                norm = self.clip if kind.segments[0].changes else self._largest(kind.segments[0])
                yield kind, self.noise * norm
            elif self.mechanism == "gaussian":
                yield kind, self.noise * kind.norm * math.sqrt(len(kinds))
            else:
                yield kind, self.noise * kind.norm * len(kinds)

    def _largest(self, segment: Segment) -> float:
        """Return the largest absolute value of one user in a segment."""
        if segment.changes:
            return min(segment.bound, self.clip)
        if segment.measures and not segment.clip and segment.bound > 1:
            return min(segment.bound, self.most_metrics)
        return segment.bound


def _step(segment: Segment) -> float:
    """Return the step of a segment with noise: counts have finer ones."""
    return segment.step if segment.clip else 1 / _PARTS


def _coarser(spread: float) -> int:
    """Return by how many bits codes are coarser than steps: of noise, so many bits of its spread are kept."""
    return max(int(spread).bit_length() - _KEPT_BITS, 0)


@lru_cache(32)
def _noisy(terms: Privacy, layout: Layout, floor: int) -> Layout:
    spread = terms.spread(layout, floor)
    furthest = _FURTHEST[terms.mechanism]
    found = []
    for segment in layout.segments:
        one = spread[segment.name]
        largest = LARGEST_SCALE if terms.mechanism == "laplace" else math.sqrt(LARGEST_VARIANCE)
        if terms.place == "distributed":
            # A member may stand for a thousand users.
            largest /= 32
        step = _step(segment)
        shift = _coarser(one)
        own = ((math.ceil(terms._largest(segment) / step) + math.ceil(furthest * one)) >> shift) + 1
        bits = own.bit_length() + 1
        if bits > 31 or one > largest:
            raise ValueError(
                f"rounds.privacy.noise {terms.noise:g}: noise of {one:.3g} steps of {segment.name!r} has no room in a "
                "code; expected fewer bits, less noise or a smaller rounds.privacy.clip"
            )
        levels = 2 ** (bits - 1) - 1
        found.append(dataclasses.replace(segment, bound=step * 2**shift * levels, bits=bits, clip=False))
    return Layout(tuple(found))


EXACT = Privacy()
"""The usual terms: no clip and no noise."""


def check_privacy(terms: Privacy, secure_sum: str) -> None:
    """Check terms, and that a secure sum can meet them.

    Parameters
    ----------
    terms : Privacy
    secure_sum : str
        Name of the secure sum.

    Raises
    ------
    ConfigError
        A name is unknown, a number is out of range, or the terms contradict each other or the secure sum.
    """
    if terms.place not in PLACES:
        raise ConfigError(f"rounds.privacy.place {terms.place!r}: expected one of {', '.join(PLACES)}")
    if terms.mechanism not in _MECHANISMS:
        raise ConfigError(
            f"rounds.privacy.mechanism {terms.mechanism!r}: expected one of {', '.join(_MECHANISMS)}"
        )
    if not terms.on:
        if terms.noise or terms.clip or terms.per_value:
            raise ConfigError(
                "rounds.privacy.noise, clip or per_value with place 'none': nobody would add noise; expected place "
                "'local' "
                "or 'distributed'"
            )
        return
    if secure_sum == "denoised":
        raise ConfigError(
            f"rounds.privacy.place {terms.place!r} with secure_sum 'denoised': clip and noise bind sampled and rated "
            "items together, and denoisers take out sampled ones; expected another secure_sum, or place 'none'"
        )
    for name in ("noise", "clip", "most_metrics"):
        value = getattr(terms, name)
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(
                f"rounds.privacy.{name} {value:g} with place {terms.place!r}: expected a finite number above 0"
            )
    if terms.most_items < 1:
        raise ConfigError(f"rounds.privacy.most_items {terms.most_items}: expected at least 1")
    if not 0 < terms.delta < 1:
        raise ConfigError(f"rounds.privacy.delta {terms.delta:g}: expected above 0 and below 1")
    if terms.colluders < 0 or (terms.colluders and terms.place != "distributed"):
        raise ConfigError(
            f"rounds.privacy.colluders {terms.colluders} with place {terms.place!r}: expected 0, or with place "
            "'distributed' at least 0"
        )
    if terms.per_value and terms.mechanism != "laplace":
        raise ConfigError(
            f"rounds.privacy.per_value with mechanism {terms.mechanism!r}: expected 'laplace', as published"
        )
    if terms.place == "distributed":
        if secure_sum not in ("masked", "encrypted"):
            raise ConfigError(
                f"rounds.privacy.place 'distributed' with secure_sum {secure_sum!r}: each user's part of the noise "
                f"alone "
                "protects nobody; expected secure_sum 'masked' or 'encrypted', or place 'local'"
            )
        if terms.mechanism == "laplace":
            raise ConfigError(
                "rounds.privacy.mechanism 'laplace' with place 'distributed': parts of users do not add up to Laplace "
                "noise; expected 'gaussian', or place 'local'"
            )
    if secure_sum in ("denoised", "shared-key"):
        raise ConfigError(
            f"rounds.privacy with secure_sum {secure_sum!r}: its parties see more than the sum; expected 'clear', "
            f"'masked' "
            "or 'encrypted'"
        )
