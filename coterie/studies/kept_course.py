"""Course of a federation that has finished, kept in its folder: a run that is taken up does not train it again."""

from __future__ import annotations

import json
from pathlib import Path

from coterie.data.whole_file import whole_file
from coterie.errors import RunError
from coterie.telemetry.report import Course

__all__ = ["COURSE", "keep_course", "kept_course"]

COURSE = "course.json"
"""Name of the file, in the folder of the federation."""


def keep_course(course: Course, folder: Path) -> None:
    """Write the course of a federation that has finished."""
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / COURSE) as beside:
        beside.write_text(json.dumps(course.content()))


def kept_course(folder: Path) -> Course | None:
    """Return the course of a federation that has finished; None where it has not.

    Raises
    ------
    RunError
        The file is damaged.
    """
    path = folder / COURSE
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path} cannot be read: {error}", hint="without this file the federation is trained again"
        ) from error
    return Course.read(content)
