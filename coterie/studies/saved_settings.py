"""Settings of a run on this machine, as they are kept beside its stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from coterie.config.run import RunSettings
from coterie.errors import PreflightError, RunError

__all__ = ["BESIDE_SETTINGS", "SAVED_SETTINGS", "read_settings", "save_settings"]

SAVED_SETTINGS = "settings.json"
"""Name of the file, in the folder of the run."""

BESIDE_SETTINGS = "beside.json"
"""Name of the file with the settings of the second federation, for a run that has one."""


def read_settings(path: Path) -> RunSettings:
    """Return settings that `save_settings` wrote, checked.

    Raises
    ------
    RunError
        They cannot be read, or this release has no such settings.
    """
    try:
        return RunSettings.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise RunError(
            f"{path} holds no settings of this release: {error}",
            hint="another release made the run: use that one",
        ) from error


def save_settings(settings: RunSettings, folder: Path, name: str = SAVED_SETTINGS) -> None:
    """Write the settings of a run beside its stores, with all paths made absolute: they are read from other folders.

    Raises
    ------
    PreflightError
        The folder cannot be written.
    """
    text = _absolute(settings).model_dump_json(indent=1, exclude_none=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
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
