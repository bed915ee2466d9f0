"""Settings from keywords, with the checks and messages of a run's file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from coterie.config.load import load

__all__ = ["checked"]

M = TypeVar("M", bound=BaseModel)


def checked(model: type[M], tree: Mapping[str, Any]) -> M:
    """Return the settings that nested keys make; the environment plays no part.

    Raises
    ------
    ConfigError
        Unknown keys and wrong values, each with what is expected and the nearest right key.
    """
    return load(model, None, base=tree, environ={}, place="").settings
