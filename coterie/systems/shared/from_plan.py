"""Adapter by which the descriptions of systems build a side from the settings in a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from coterie.systems.settings import SystemSettings

__all__ = ["from_plan"]

S = TypeVar("S", bound=SystemSettings)
P = ParamSpec("P")
T = TypeVar("T")


def from_plan(settings: type[S], make: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[str, P], T]:
    """Return ``make`` with a plan's text for its first argument in place of the settings read from it.

    Parameters
    ----------
    settings : type of SystemSettings
        Reads the text, and raises ConfigError where it is not of this class.
    make : callable
        Takes settings first, then whatever else it is given.
    """

    def made(text: str, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return make(settings.from_json(text), *args, **kwargs)

    return made
