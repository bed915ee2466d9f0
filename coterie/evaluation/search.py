"""Distributions from which options are drawn in random search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Choices", "LogUniform", "Space"]


@dataclass(frozen=True)
class Choices:
    """A set of values to draw from uniformly, for tuning."""

    values: tuple[Any, ...]

    def sample(self, rng: np.random.Generator) -> Any:
        """Draw one of the values."""
        return self.values[int(rng.integers(len(self.values)))]


@dataclass(frozen=True)
class LogUniform:
    """An interval to draw from uniformly on a logarithmic scale, for tuning."""

    low: float
    high: float

    def sample(self, rng: np.random.Generator) -> float:
        """Draw a number, rounded to three significant digits so that it can be written down."""
        return float(f"{math.exp(rng.uniform(math.log(self.low), math.log(self.high))):.3g}")


Space = Mapping[str, Choices | LogUniform]
"""Distributions of the options that are tuned, by option name."""
