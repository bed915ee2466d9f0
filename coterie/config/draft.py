"""Drafts of a configuration, in which the loader merges file, environment and ``--set`` before validation."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from typing import Any, Literal

from coterie.config.key_paths import PathStep, dotted

__all__ = ["Draft", "Given", "Keys", "Source"]

Source = Literal["default", "file", "environment", "--set"]
"""Layer that gave a value, weakest first."""

Keys = tuple[PathStep, ...]
"""A path in the tree of values: names of keys, and indices of array entries."""


@dataclass(frozen=True)
class Given:
    """The origin of one value."""

    source: Source
    name: str = "file"
    """Name of the origin in messages: ``file``, the environment variable, or ``--set``."""
    text: str | None = None
    """The value as it was typed; None for values of the file, arrays and tables."""


@dataclass
class Draft:
    """Merged layers of a configuration before validation: values, their origins, and problems so far."""

    tree: dict[str, Any] = field(default_factory=dict)
    given: dict[Keys, Given] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def put(self, path: Keys, value: Any, given: Given) -> None:
        """Set the value at a path; tables are merged, everything else is replaced."""
        if isinstance(value, dict) and value:
            for key, item in value.items():
                self.put((*path, key), item, given)
            return
        place: Any = self.tree
        for depth, part in enumerate(path[:-1]):
            if isinstance(place, dict):
                place = place.setdefault(part, {})
            else:
                place = self._entry(place, path[: depth + 1])
            if not isinstance(place, dict | list):
                where = dotted(path[: depth + 1])
                self.problems.append(f"{dotted(path)} ({given.name}): {where} is not a table")
                return
        path = self._indexed(path)
        if isinstance(place, list):
            if self._entry(place, path) is None:
                where = dotted(path[:-1])
                self.problems.append(
                    f"{dotted(path)} ({given.name}): {where} has {len(place)} entries, from 0"
                )
                return
            place[int(path[-1])] = value
        elif isinstance(value, dict) and isinstance(place.get(path[-1]), dict):
            return  # an empty table over a table changes nothing
        else:
            place[path[-1]] = value
        for key in [key for key in self.given if key[: len(path)] == path]:
            del self.given[key]
        self._note(path, value, given)

    def type_in(self, path: Keys, text: str, source: Source, name: str) -> None:
        """Set the value at a path from text, as typed in the environment or after ``--set``."""
        value = _value(text)
        scalar = not isinstance(value, dict | list)
        self.put(path, value, Given(source, name, text if scalar else None))

    def source(self, path: Keys) -> Source:
        """Return the layer that gave a value."""
        given = self.given.get(path)
        return "default" if given is None else given.source

    def at(self, path: Keys) -> Any:
        """Return the value at an existing path."""
        place: Any = self.tree
        for part in path:
            place = place[part]
        return place

    def replace(self, path: Keys, value: Any) -> None:
        """Replace the value at an existing path; its origin stays."""
        self.at(path[:-1])[path[-1]] = value

    def place_of(self, path: Keys) -> str | None:
        """Return the names of a value's origins, its parts' and its array's included; None for a default."""
        names = [given.name for key, given in self.given.items() if _one_leads_to_the_other(key, path)]
        return ", ".join(dict.fromkeys(names)) or None

    def _note(self, path: Keys, value: Any, given: Given) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                self._note((*path, key), item, given)
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for number, item in enumerate(value):
                self._note((*path, number), item, given)
        else:
            self.given[path] = given

    def _indexed(self, path: Keys) -> Keys:
        """Return the path with indices of array entries as integers."""
        place: Any = self.tree
        parts: list[PathStep] = []
        for part in path:
            if isinstance(place, list) and str(part).isdecimal() and int(part) < len(place):
                part = int(part)
                place = place[part]
            else:
                place = place.get(part) if isinstance(place, dict) else None
            parts.append(part)
        return tuple(parts)

    @staticmethod
    def _entry(place: list[Any], path: Keys) -> Any:
        number = str(path[-1])
        return place[int(number)] if number.isdecimal() and int(number) < len(place) else None


def _one_leads_to_the_other(one: Keys, other: Keys) -> bool:
    shared = min(len(one), len(other))
    return one[:shared] == other[:shared]


def _value(text: str) -> Any:
    """Return the value that a text means as TOML; the text itself when it is not TOML."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A line break in the text could smuggle in a second key.
    return parsed["value"] if len(parsed) == 1 else text
