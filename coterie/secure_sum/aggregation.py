"""The terms on which the contributions to a round of training become one sum: a server's rule and hosts' norm bound.

A rule needs single contributions, so only the server of a sum in clear can apply one (``coterie.secure_sum.robust``).
Hosts enforce the norm bound before they round (`Contribution`), under every sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from coterie.errors import ConfigError

__all__ = ["ADDED", "RULES", "Aggregation", "AggregationRule", "check_aggregation"]

AggregationRule = Literal["sum", "median", "trimmed-mean", "krum", "distance", "spectral", "norm-bound"]

RULES: tuple[AggregationRule, ...] = get_args(AggregationRule)
"""Rules by which the server computes the sum; ``sum`` adds."""

_OF_LIARS = ("trimmed-mean", "krum", "distance", "spectral")
"""Rules that take a number of liars."""

_LEAST: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "median": (0, 3),
        "trimmed-mean": (2, 1),
        "krum": (2, 3),
        "distance": (2, 1),
        "spectral": (2, 1),
    }
)
"""Fewest members of a rule, as ``a * liars + b``: Krum's n > 2f + 2, and an honest majority elsewhere."""

_DIGITS, _SLACK = 6, 1e-6
"""Decimal places of a share, which a plan carries in single precision; what a product with it may lack."""


@dataclass(frozen=True)
class Aggregation:
    """Terms on which contributions to training become one sum.

    Parameters
    ----------
    rule : str
        One of `RULES`.
    byzantine : float
        Members that may lie: a share of those that submit if below 1, else a number.
    norm_bound : float
        Largest Euclidean norm of one user's contribution; 0 for none.
    """

    rule: str = "sum"
    byzantine: float = 0.1
    norm_bound: float = 0.0

    @property
    def adds(self) -> bool:
        """Whether the server adds contributions as they are."""
        return self.rule == "sum"

    def liars(self, members: int) -> int:
        """Return the number of liars that the rule assumes among ``members``: at least 1."""
        if self.byzantine >= 1:
            return int(self.byzantine)
        return max(math.floor(self.share * members + _SLACK), 1)

    @property
    def share(self) -> float:
        """The share of liars as it was given, from 0 to 0.5."""
        return round(self.byzantine, _DIGITS)

    def shortfall(self, members: int) -> str:
        """Return why the rule cannot be applied to so many contributions; empty when it can."""
        if self.rule not in _LEAST:
            return ""
        liars = self.liars(members) if self.rule in _OF_LIARS else 0
        each, more = _LEAST[self.rule]
        least = each * liars + more
        if members >= least:
            return ""
        assumed = f" with {liars} that may lie" if self.rule in _OF_LIARS else ""
        return f"the rule {self.rule!r}{assumed} needs {least} members, and {members} submitted"


ADDED = Aggregation()
"""The usual terms: contributions are added, and no norm is bounded."""


def check_aggregation(terms: Aggregation, secure_sum: str) -> None:
    """Check terms, and that a secure sum can meet them.

    Parameters
    ----------
    terms : Aggregation
    secure_sum : str
        Name of the secure sum.

    Raises
    ------
    ConfigError
        The rule is unknown or needs single contributions that the server does not see, a number is out of range, or the
        rule ``norm-bound`` has no bound.
    """
    if terms.rule not in RULES:
        raise ConfigError(
            f"rounds.aggregation.rule {terms.rule!r}: no such rule; expected one of {', '.join(RULES)}"
        )
    share = 0 < terms.byzantine < 1 / 2
    if not share and not (terms.byzantine >= 1 and float(terms.byzantine).is_integer()):
        raise ConfigError(
            f"rounds.aggregation.byzantine {terms.byzantine:g}: expected a share above 0 and below 0.5, or a whole "
            "number from 1"
        )
    if not (math.isfinite(terms.norm_bound) and terms.norm_bound >= 0):
        raise ConfigError(
            f"rounds.aggregation.norm_bound {terms.norm_bound:g}: expected a finite number, at least 0"
        )
    if terms.rule == "norm-bound" and not terms.norm_bound:
        raise ConfigError(
            "rounds.aggregation.rule 'norm-bound' without a bound: expected rounds.aggregation.norm_bound above 0"
        )
    if not terms.adds and secure_sum != "clear":
        noise = " without noise" if secure_sum == "denoised" else ""
        raise ConfigError(
            f"rounds.aggregation.rule {terms.rule!r} with secure_sum {secure_sum!r}: the server sees no single "
            f"contribution{noise}; expected secure_sum 'clear', or rule 'sum' with rounds.aggregation.norm_bound, "
            "which hosts enforce under every sum"
        )
