r"""The reconstruction attack as Mai and Pang describe it: systems of quadratic equations and a general solver.

The module serves for comparison with `coterie.systems.shared.study.reconstruction`, which needs no solver and gets more
right.  Under SemiALS all ratings and attributes are unknown, and one factor :math:`n` of all that was sent is taken, so
that there are as many equations (20), (24).  Under SGD :math:`p^{t-1}` is unknown, and the two epochs' values of one
item are taken (31), (33).  If all items have weights, :math:`c_{ij}` follows from the rating, smoothly (42); the paper
prints 0 for its least value, which would send nothing of unrated items: here it is :math:`\alpha`.  Solutions over
several factors or items are clipped and averaged.

The paper takes a factor at random.  A factor that is nearly zero has no solution, so here the factors in which most was
sent come first.  The paper does not say where the solver starts; here it starts at the middle of the stars and of the
attributes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from coterie.errors import DataError
from coterie.systems.shared.study.reconstruction import Reconstruction, Rules, Seen

__all__ = ["METHODS", "solve"]

Doubles = npt.NDArray[np.float64]

METHODS = ("hybr", "broyden2", "df-sane", "anderson")
"""Methods of ``scipy.optimize.root``, in the order of the paper's table 6."""

_STEPS = 300
"""Most iterations of a solver, which converges in fewer or not at all."""


def solve(
    first: Seen,
    rules: Rules,
    stars: Sequence[float],
    *,
    method: str,
    rng: np.random.Generator,
    second: Seen | None = None,
    systems: int = 1,
) -> Reconstruction:
    """Solve for a user's ratings and attributes.

    Parameters
    ----------
    first : Seen
    rules : Rules
        Rules whose weights are ``obs-only`` or ``incl-unc``.
    stars : sequence of float
        Possible ratings, ascending.
    method : str
        One of ``METHODS``.
    rng : Generator
        Draws which items are taken, with SGD.
    second : Seen, optional
        The next epoch; needed with SGD.
    systems : int
        Number of systems that are solved and averaged, at least 1.

    Returns
    -------
    Reconstruction
        Clipped and rounded (43); ``rated`` are the ratings before, and there is no likelihood.

    Raises
    ------
    DataError
        Another method or weights, or SGD without a second epoch.
    ModuleNotFoundError
        Without SciPy (``coterie[attacks]``).
    """
    if method not in METHODS or rules.weights not in ("obs-only", "incl-unc"):
        raise DataError(f"method {method!r}, weights {rules.weights!r}; expected one of {', '.join(METHODS)}")
    at = np.flatnonzero(first.touched)
    m, width = first.items.shape
    if rules.update == "semi-als":
        chosen = np.argsort(-np.abs(first.items).sum(axis=0))[:systems]
        solutions = [_semi_als(first, at, int(n), rules, stars, method) for n in chosen]
    elif second is None:
        raise DataError("with SGD two epochs are solved together; the second is missing")
    else:
        chosen = rng.permutation(at)[:systems]
        solutions = [_sgd(first, second, at, int(j), rules, stars, method) for j in chosen]
    found, attributes = np.zeros(m), np.zeros(len(first.attributes))
    lowest = stars[0] if rules.weights == "obs-only" else 0.0
    if solutions:
        # Solvers that got lost leave numbers of any size, or none.
        found[at] = np.mean([np.clip(np.nan_to_num(r), lowest, stars[-1]) for r, _ in solutions], axis=0)
        attributes = np.mean([np.clip(np.nan_to_num(x), 0.0, 1.0) for _, x in solutions], axis=0)
    possible = np.array([0.0, *stars]) if lowest == 0 else np.asarray(stars, np.float64)
    ratings = np.zeros(m)
    ratings[at] = possible[np.abs(found[at, None] - possible).argmin(axis=1)]
    return Reconstruction(np.zeros(width), ratings, found, np.round(attributes), np.nan)


def _semi_als(
    seen: Seen, at: npt.NDArray[np.intp], n: int, rules: Rules, stars: Sequence[float], method: str
) -> tuple[Doubles, Doubles]:
    """Solve for all ratings and attributes, from the n-th factor of the values sent."""
    q = np.asarray(seen.item_factors, np.float64)[at]
    u = np.asarray(seen.attribute_factors, np.float64)
    sent = np.concatenate([seen.items[at, n], seen.attributes[:, n]])
    always = rules.side * (u.T @ u) + rules.ridge * np.eye(q.shape[1])

    def missed(unknown: Doubles) -> Doubles:
        r, x = unknown[: len(at)], unknown[len(at) :]
        c = _weight(r, rules)
        p = np.linalg.solve((q * c[:, None]).T @ q + always, (r * c) @ q + rules.side * (x @ u))
        errors = np.concatenate([c * (r - q @ p), x - u @ p])
        return np.asarray(errors * p[n] - sent)

    start = np.concatenate([np.full(len(at), (stars[0] + stars[-1]) / 2), np.full(len(u), 0.5)])
    unknown = _root(missed, start, method)
    return unknown[: len(at)], unknown[len(at) :]


def _sgd(
    first: Seen,
    second: Seen,
    at: npt.NDArray[np.intp],
    j: int,
    rules: Rules,
    stars: Sequence[float],
    method: str,
) -> tuple[Doubles, Doubles]:
    """Solve for p of the first epoch, from the values sent for item j in both epochs."""
    q, u = (np.asarray(each, np.float64) for each in (first.item_factors, first.attribute_factors))
    later = np.asarray(second.item_factors, np.float64)
    moved = (first.items * q).sum(axis=0) + rules.side * (first.attributes * u).sum(axis=0)
    kept, rate = 1 - 2 * rules.private_rate * rules.ridge, 2 * rules.private_rate

    def ratings(p: Doubles, after: Doubles, items: npt.NDArray[np.intp], n: int | slice) -> Doubles:
        """Return stars by (32), or by (35), which does without the weight."""
        by_p, by_after = (q[items] @ p)[:, None], (later[items] @ after)[:, None]
        sent, then = first.items[items][:, n], second.items[items][:, n]
        if rules.weights == "obs-only":
            return np.asarray(sent / p[n] + by_p)
        return np.asarray((sent * by_after * after[n] - then * by_p * p[n]) / (sent * after[n] - then * p[n]))

    everything, here = slice(None), np.array([j])

    def missed(p: Doubles) -> Doubles:
        after = kept * p + rate * moved / p
        r = ratings(p, after, here, everything)[0]
        c = _weight(r, rules)
        return np.asarray(c * (r - later[j] @ after) * after - second.items[j])

    start = np.full(q.shape[1], np.sqrt((stars[0] + stars[-1]) / 2 / q.shape[1]))
    p = _root(missed, start, method)
    with np.errstate(all="ignore"):
        after = kept * p + rate * moved / p
        # The largest part of p is the one least disturbed by rounding.
        n = int(np.abs(p).argmax())
        return ratings(p, after, at, slice(n, n + 1))[:, 0], first.attributes[:, n] / p[n] + u @ p


def _weight(ratings: Doubles, rules: Rules) -> Doubles:
    """Return the weight of an item as a function of its rating (42)."""
    if rules.weights == "obs-only":
        return np.ones_like(ratings)
    return np.asarray(np.clip(ratings, rules.uncertainty, 1.0))


def _root(missed: Callable[[Doubles], Doubles], start: Doubles, method: str) -> Doubles:
    """Return the solver's result, or its start where it failed."""
    from scipy.optimize import root  # no service needs it

    options = {
        "hybr": {"maxfev": 20 * (len(start) + 1)},
        "df-sane": {"maxfev": 10 * _STEPS},
    }.get(method, {"maxiter": _STEPS})
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            # Singular systems are part of what these methods do where they do not converge.
            warnings.simplefilter("ignore")
            return np.asarray(root(missed, start, method=method, options=options).x, np.float64)
    except (ValueError, np.linalg.LinAlgError):
        # The solver's numbers became NaN or infinite.
        return start
