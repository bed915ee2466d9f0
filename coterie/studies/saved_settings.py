"""Settings of a run on this machine, as they are kept beside its stores."""

from __future__ import annotations

from pathlib import Path

from coterie.config.run import RunSettings
from coterie.errors import PreflightError

__all__ = ["SAVED_SETTINGS", "save_settings"]

SAVED_SETTINGS = "settings.json"
"""Name of the file, in the folder of the run."""


def save_settings(settings: RunSettings, folder: Path) -> None:
    """Write the settings of a run beside its stores, with the data set's path made absolute.

    Raises
    ------
    PreflightError
        The folder cannot be written.
    """
    path = settings.data.path
    if path is not None:
        settings = settings.model_copy(
            update={"data": settings.data.model_copy(update={"path": path.absolute()})}
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SAVED_SETTINGS).write_text(settings.model_dump_json(indent=1, exclude_none=True))
    except OSError as error:
        raise PreflightError(
            f"cannot write into {folder}: {error.strerror}", hint="`output` names another folder"
        ) from error
