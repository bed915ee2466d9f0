"""The second federation that a run may ask for (``[beside]``), trained and attacked on the same data for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.config.load import load
from coterie.config.run import RunSettings
from coterie.errors import ConfigError
from coterie.studies.saved_settings import BESIDE_SETTINGS, read_settings
from coterie.telemetry.report import BesidePart, Course

__all__ = ["as_report", "beside", "kept_beside"]


def beside(settings: RunSettings) -> RunSettings | None:
    """Return the settings of the second federation of a run; None for a run without one.

    Parameters
    ----------
    settings : RunSettings

    Raises
    ------
    ConfigError
        A key in ``beside.changes`` does not exist, its value is refused, or the keys do not go together; or another
        system or data set is asked for, with which there is nothing to compare.
    """
    changes = settings.beside.changes
    if not changes:
        return None
    # Only keys that were given: what is left out takes the defaults that go with the changes.
    given = settings.model_dump(mode="json", exclude_unset=True, exclude_none=True, exclude={"beside"})
    try:
        other = load(RunSettings, None, base=given, sets=changes, environ={}, place="").settings
    except ConfigError as error:
        raise ConfigError(f"beside.changes: {error.message}", hint=error.hint) from error
    for key in ("system", "data", "split", "seeds"):
        if getattr(other, key) != getattr(settings, key):
            raise ConfigError(
                f"beside.changes: the second federation has another {key}; expected that of the run, so that the two "
                "compare",
                hint="`coterie evaluate --table compare` compares systems",
            )
    return other


def kept_beside(settings: RunSettings, folder: Path) -> RunSettings | None:
    """Return the settings of the second federation of a run that is taken up; None for a run without one.

    They are those of its beginning: the settings that are kept of the run name every key, so that defaults that go with
    the changes could not be found out again.

    Raises
    ------
    ConfigError
        As `beside`, for runs of releases that kept no settings of the second federation.
    RunError
        What was kept cannot be read.
    """
    path = folder / BESIDE_SETTINGS
    return read_settings(path) if settings.beside.changes and path.is_file() else beside(settings)


def as_report(
    settings: RunSettings, course: Course | None, metrics: Mapping[str, float | None], failed: str = ""
) -> BesidePart:
    """Return what the report says of a second federation.

    Parameters
    ----------
    settings : RunSettings
        The run, with ``beside``.
    course : Course or None
        Course of the second federation; None if it failed.
    metrics : mapping
        Its metrics, of the version that counts.
    failed : str
        Why it has no course.
    """
    known: dict[str, Any] = {}
    if course is not None and course.attacks:
        known["attacks"] = dict(course.attacks)
    if failed:
        known["failed"] = failed
    return BesidePart(
        label=settings.beside.label, changes=settings.beside.changes, metrics=dict(metrics), **known
    )
