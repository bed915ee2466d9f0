"""Files of example runs that come with the package, for people who have no clone."""

from __future__ import annotations

from pathlib import Path

from coterie.errors import ConfigError

__all__ = ["DEMO", "example", "example_names"]

DEMO = Path("examples/first.toml")
"""Run of ``coterie run --demo``."""

_FOLDER = "examples"


def _folder() -> Path:
    """Return the folder of examples: inside the installed package, or beside it in a clone."""
    inside = Path(__file__).parents[1]
    return next(
        (one for one in (inside / _FOLDER, inside.parent / _FOLDER) if one.is_dir()), inside / _FOLDER
    )


def example_names() -> list[str]:
    """Return the names of the examples that there are."""
    return sorted(path.stem for path in _folder().glob("*.toml"))


def example(path: Path) -> Path:
    """Return the packaged file for a path ``examples/NAME.toml``; any other path is returned as it is.

    Raises
    ------
    ConfigError
        There is no example of this name.
    """
    if path.parent.name != _FOLDER or path.suffix != ".toml":
        return path
    found = _folder() / path.name
    if not found.is_file():
        raise ConfigError(
            f"there is no file {path}, and no example of this name",
            hint=f"examples: {', '.join(example_names()) or 'none are installed'}",
        )
    return found
