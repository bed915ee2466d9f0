"""Settings of a run on this machine, as they are kept beside its stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from coterie.config.run import RunSettings
from coterie.errors import PreflightError

__all__ = ["SAVED_SETTINGS", "save_settings"]

SAVED_SETTINGS = "settings.json"
"""Name of the file, in the folder of the run."""


def save_settings(settings: RunSettings, folder: Path) -> None:
    """Write the settings of a run beside its stores, with all paths made absolute: they are read from other folders.

    Raises
    ------
    PreflightError
        The folder cannot be written.
    """
    text = _absolute(settings).model_dump_json(indent=1, exclude_none=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SAVED_SETTINGS).write_text(text)
    except OSError as error:
        raise PreflightError(
            f"cannot write into {folder}: {error.strerror}", hint="`output` names another folder"
        ) from error


def _absolute(value: Any) -> Any:
    """Return settings, or a value in them, with absolute paths."""
    match value:
        case Path():
            return value.absolute()
        case BaseModel():
            names = type(value).model_fields
            return value.model_copy(update={name: _absolute(getattr(value, name)) for name in names})
        case _:
            return value
