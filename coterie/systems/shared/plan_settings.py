"""JSON codec of a system's settings for the field ``settings`` of a `RunPlan`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from coterie.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["settings_from_json", "settings_to_json"]

T = TypeVar("T")


def settings_to_json(settings: DataclassInstance) -> str:
    """Return settings as JSON: equal settings give equal texts."""
    return json.dumps(dataclasses.asdict(settings), sort_keys=True, separators=(",", ":"))


def settings_from_json(text: str, system: str, build: Callable[[dict[str, Any]], T]) -> T:
    """Return the settings that a plan carries as JSON.

    Parameters
    ----------
    text : str
        As a peer sent it.
    system : str
        Name of the system, for the error.
    build : callable
        Builds the settings from the parsed object.

    Raises
    ------
    ConfigError
        When the settings are malformed, have an unknown key, or a value is out of its range.
    """
    try:
        return build(json.loads(text))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"the settings of the plan are not those of {system}: {error}",
            hint="the peers may be of another release",
        ) from error
