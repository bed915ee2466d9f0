"""Loader of configurations from a file, the environment and ``--set``, which reports all errors at once.

Later layers override earlier ones, key by key.  The layer of each value is kept for ``coterie config show``.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from coterie.config.base import ServiceSettings
from coterie.config.complaints import complaint, is_echo
from coterie.config.draft import Draft, Given, Keys, Source
from coterie.config.key_paths import PathStep, dotted, table, table_at
from coterie.config.services import Role, settings_model
from coterie.errors import ConfigError, nearest

__all__ = ["ROLES", "Loaded", "Source", "load", "load_service", "tree_of"]

ROLES: tuple[str, ...] = get_args(Role)
"""Every role that has a configuration model."""

M = TypeVar("M", bound=BaseModel)
_MISSPELT_FROM = 0.8
"""Similarity from which an unknown variable counts as a misspelt key; `nearest` alone accepts less."""
_OWN = frozenset({"parent"})
"""Variables of our own processes that are no keys: a launcher names itself by COTERIE_PARENT."""
_HINT = "`coterie config reference` describes every key"


@dataclass(frozen=True)
class Loaded(Generic[M]):
    """Validated settings with the layer that each value came from.

    Attributes
    ----------
    settings : BaseModel
        The validated settings.
    origin : mapping of str to Source
        Layer of every key's value, by dotted path.
    values : mapping of str to object
        Value of every key, by dotted path; None for an absent optional one.
    given : mapping
        Nested values of the keys that some layer gave, before validation.
    """

    settings: M
    origin: Mapping[str, Source]
    values: Mapping[str, object]
    given: Mapping[str, Any]


def load(
    model: type[M],
    path: Path | None,
    *,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    prefix: str = "COTERIE_",
    relative_to: Path | None = None,
    base: Mapping[str, Any] | None = None,
    place: str = "file",
) -> Loaded[M]:
    """Load settings from a file, the environment and ``--set``; later layers override earlier ones.

    Parameters
    ----------
    model : type of BaseModel
        Model of the settings.
    path : Path or None
        A TOML file; None for none.
    sets : sequence of str
        ``key=value`` with a dotted key; a value that is not TOML is taken as text.
    environ : mapping
        The environment.  ``COTERIE_FEDERATION__HOSTS=3`` sets ``federation.hosts``; an empty variable counts
        as unset.  A variable whose first part is no key of the model is ignored, unless it looks like a
        misspelt key.  A variable that names a table sets it only with an inline table (``{...}``), and is
        ignored otherwise.
    prefix : str
        Prefix of the variables.
    relative_to : Path, optional
        Folder from which relative paths *of the file* start.  Without it they start from the current
        directory, as the paths of the environment and of ``--set`` always do.
    base : mapping, optional
        Values that count as the file's; top-level keys of the file replace them.
    place : str
        Name of the origin of file and ``base`` in messages; empty for none.

    Raises
    ------
    ConfigError
        The file is missing or malformed (with line and column), or keys are unknown or values wrong: all of
        these are listed, each with its path, value, expected value and the nearest right key.
    """
    draft = Draft()
    for key, value in {**(base or {}), **(_parse(path) if path is not None else {})}.items():
        draft.put((key,), value, Given("file", place))
    _take_environment(draft, model, environ, prefix)
    for text in sets:
        _take_set(draft, text)

    settings = _validated(model, draft)
    if settings is None or draft.problems:
        raise _refusal(path, draft.problems)
    if relative_to is not None:
        settings = _anchored(settings, (), draft, relative_to)
    leaves = dict(_leaves(settings, ()))
    return Loaded(
        settings,
        origin={dotted(path): draft.source(path) for path in leaves},
        values={dotted(path): value for path, value in leaves.items()},
        given=draft.tree,
    )


def tree_of(base: Mapping[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    """Return nested values overridden by those of ``--set``, without validation.

    Raises
    ------
    ConfigError
        A text in ``sets`` is no ``key=value``, or its path does not exist in an array or leads through a plain value.
    """
    draft = Draft()
    for key, value in base.items():
        draft.put((key,), value, Given("file"))
    for text in sets:
        _take_set(draft, text)
    if draft.problems:
        raise _refusal(None, draft.problems)
    return draft.tree


def load_service(
    role: str, path: Path | None, *, sets: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> Loaded[ServiceSettings]:
    """Load the settings of a service process; relative paths of the file start from the file's folder.

    Raises
    ------
    ConfigError
        As in `load`, and for an unknown role.
    """
    if role not in ROLES:
        near = nearest(role, ROLES)
        raise ConfigError(
            f"{role!r} is no role; the roles are {', '.join(ROLES)}",
            hint=f"did you mean {near}?" if near else None,
        )
    folder = None if path is None else path.parent
    return load(settings_model(role), path, sets=sets, environ=environ, relative_to=folder)


def _parse(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}", hint="is the path right?") from None
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8, which TOML must be") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_malformed(path, text, str(error))) from error


def _malformed(path: Path, text: str, message: str) -> str:
    """Return the message for a TOML syntax error, with its place and the line itself."""
    lines = text.splitlines() or [""]
    place = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    if place:
        number, column = int(place.group(1)), int(place.group(2))
        message = message[: place.start()]
    else:  # "at end of document"
        number, column = len(lines), len(lines[-1]) + 1
    line = lines[min(number, len(lines)) - 1]
    margin = f"  {number} | "
    pointer = " " * (len(margin) + column - 1) + "^"
    return f"{path}, line {number}, column {column}: {message}\n{margin}{line}\n{pointer}"


def _take_environment(draft: Draft, model: type[BaseModel], environ: Mapping[str, str], prefix: str) -> None:
    for name in sorted(environ):
        text = environ[name]
        if not name.startswith(prefix) or not text:
            continue
        parts = name.removeprefix(prefix).lower().split("__")
        if parts[0] not in model.model_fields:
            near = _misspelt(parts, model)
            if near is not None:
                draft.problems.append(f"{name}: no such key; did you mean {prefix}{near.upper()}?")
        elif not all(parts):
            draft.problems.append(f"{name}: a part of the name is empty")
        elif table_at(model, parts) is None or text.lstrip().startswith("{"):
            draft.type_in(tuple(parts), text, "environment", name)


def _misspelt(parts: Sequence[str], model: type[BaseModel]) -> str | None:
    """Return the variable (without prefix) that a misspelt one probably means; None for an unrelated variable.

    A service often inherits variables that are meant for a run or another service; these are no mistakes.
    """
    first = parts[0]
    if first in _OWN:
        return None
    # Heavy, and needed only for the advice on a variable that fits nothing.
    from coterie.config.run import RunSettings

    others: list[type[BaseModel]] = [RunSettings, *map(settings_model, ROLES)]
    if issubclass(model, ServiceSettings) and any(first in other.model_fields for other in others):
        return None
    near = nearest(first, model.model_fields)
    if near is None or SequenceMatcher(None, first, near).ratio() < _MISSPELT_FROM:
        return None
    # A variable without `__` never means a table.
    is_table = table(model.model_fields[near].annotation) is not None
    return "__".join([near, *parts[1:]]) if is_table == (len(parts) > 1) else None


def _take_set(draft: Draft, text: str) -> None:
    key, equals, value = text.partition("=")
    path = _key_path(key)
    if not equals or path is None:
        draft.problems.append(f"--set {text!r}: expected key=value, as in federation.hosts=3")
        return
    draft.type_in(path, value.strip(), "--set", "--set")


def _key_path(key: str) -> Keys | None:
    try:
        place: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return None
    path: list[PathStep] = []
    while isinstance(place, dict):
        if len(place) != 1:
            return None
        part, place = next(iter(place.items()))
        path.append(part)
    return tuple(path)


def _validated(model: type[M], draft: Draft) -> M | None:
    """Return the validated draft; on failure record all problems in the draft and return None."""
    try:
        return model.model_validate(draft.tree)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    # `--set name=2024` is read as a number; where the key takes text, use the text as typed.
    texts = {
        found["loc"]: given.text
        for found in errors
        if found["type"] in ("string_type", "path_type")
        and (given := draft.given.get(found["loc"])) is not None
        and given.text is not None
        and not isinstance(found["input"], dict | list)
    }
    if texts:
        for path, text in texts.items():
            draft.replace(path, text)
        try:
            return model.model_validate(draft.tree)
        except ValidationError as error:
            errors = error.errors(include_url=False)
    draft.problems.extend(complaint(model, found, draft) for found in errors if not is_echo(found))
    return None


def _refusal(path: Path | None, problems: Sequence[str]) -> ConfigError:
    subject = "configuration" if path is None else f"configuration {path}"
    if len(problems) == 1:
        return ConfigError(f"{subject}: {problems[0]}", hint=_HINT)
    listed = "\n".join(f"  - {problem}" for problem in problems)
    return ConfigError(f"{subject}: {len(problems)} things to put right\n{listed}", hint=_HINT)


def _leaves(value: Any, path: Keys) -> Iterator[tuple[Keys, object]]:
    """Yield all values with their paths, those inside tables and arrays of tables included."""
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _leaves(getattr(value, name), (*path, name))
    elif isinstance(value, tuple | list) and value and isinstance(value[0], BaseModel):
        for number, item in enumerate(value):
            yield from _leaves(item, (*path, number))
    elif isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield (*path, key), item
    else:
        yield path, value


def _anchored(value: Any, path: Keys, draft: Draft, folder: Path) -> Any:
    """Return the settings with relative paths of the file joined to a folder."""
    match value:
        case Path():
            return folder / value if draft.source(path) == "file" else value
        case BaseModel():
            changed = {
                name: _anchored(getattr(value, name), (*path, name), draft, folder)
                for name in value.model_fields_set
            }
            return value.model_copy(update=changed)
        case tuple():
            return tuple(_anchored(item, (*path, i), draft, folder) for i, item in enumerate(value))
        case _:
            return value
