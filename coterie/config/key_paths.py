"""The keys of a configuration model, with name, accepted values, default and meaning of each.

Both the loader's messages and the reference page are made from these keys, so the two cannot disagree.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, StringConstraints
from pydantic.fields import FieldInfo

from coterie.config.base import Address, Label
from coterie.systems.settings import Sha256, ValidationMetric

__all__ = ["Key", "dotted", "expectation_at", "keys", "row", "table", "table_at", "toml_text"]

PathStep = str | int
"""One step of a path: the name of a key, or the index of an array entry."""


@dataclass(frozen=True)
class Key:
    """One key of a configuration.

    Attributes
    ----------
    name : str
        Dotted path; ``[]`` stands for an entry of an array of tables, as in ``owners[].items``.
    takes : str
        Accepted values, in words.
    default : str or None
        The default as TOML, ``{}`` for a table whose keys have defaults of their own; None when the key is
        absent unless given.
    required : bool
        Whether the key is required in its table.
    description : str
        Meaning of the key.
    is_table : bool
        Whether the key is a table or an array of tables, whose keys follow.
    """

    name: str
    takes: str
    default: str | None
    required: bool
    description: str
    is_table: bool


def keys(model: type[BaseModel]) -> Iterator[Key]:
    """Yield the keys of a model and of the tables inside it, in the order of the model."""
    for name, field in model.model_fields.items():
        entry = row(field.annotation)
        inner = entry or table(field.annotation)
        value = None if field.is_required() else field.get_default(call_default_factory=True)
        yield Key(
            name=name,
            takes="table" if inner and not entry else _takes(field.annotation, field.metadata),
            default=None if value is None else "{}" if isinstance(value, BaseModel) else toml_text(value),
            required=field.is_required(),
            description=field.description or "",
            is_table=inner is not None,
        )
        if inner is not None:
            prefix = f"{name}[]." if entry else f"{name}."
            yield from (replace(key, name=prefix + key.name) for key in keys(inner))


def table(annotation: Any) -> type[BaseModel] | None:
    """Return the model of an annotation that is a table, required or not; None for others."""
    annotation, _ = _bare(annotation)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def row(annotation: Any) -> type[BaseModel] | None:
    """Return the model of the entries of an annotation that is an array of tables; None for others."""
    annotation, _ = _bare(annotation)
    return table(get_args(annotation)[0]) if get_origin(annotation) in (tuple, list) else None


def table_at(model: type[BaseModel], path: Sequence[PathStep]) -> type[BaseModel] | None:
    """Return the model of the table at a path; None when there is no such table."""
    found = _at(model, path)
    return None if found is None else table(found[0])


def expectation_at(model: type[BaseModel], path: Sequence[PathStep]) -> str | None:
    """Return the values accepted at a path, in words; None when there is no such key.

    >>> from coterie.config.run import RunSettings
    >>> expectation_at(RunSettings, ("federation", "hosts"))
    'integer, at least 1'
    """
    found = _at(model, path)
    return None if found is None else _takes(*found)


def dotted(path: Sequence[PathStep]) -> str:
    """Return a path as ``--set`` takes it, with quotes around parts that are no bare TOML keys."""
    parts = (str(part) for part in path)
    return ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else _quoted(part) for part in parts)


def toml_text(value: object) -> str:
    """Return a value as TOML on one line."""
    match value:
        case bool():
            return "true" if value else "false"
        case str() | Path():
            return _quoted(str(value))
        case Mapping():
            return (
                "{" + ", ".join(f"{dotted([key])} = {toml_text(item)}" for key, item in value.items()) + "}"
            )
        case list() | tuple():
            return "[" + ", ".join(toml_text(item) for item in value) + "]"
        case _:
            return str(value)


def _quoted(text: str) -> str:
    # JSON's escapes are valid in TOML; DEL is the one character that only TOML requires to be escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _at(annotation: Any, path: Sequence[PathStep]) -> tuple[Any, list[Any]] | None:
    metadata: list[Any] = []
    for part in path:
        annotation, _ = _bare(annotation)
        inner = table(annotation)
        if inner is not None:
            field = inner.model_fields.get(str(part))
            if field is None:
                return None
            annotation, metadata = field.annotation, list(field.metadata)
        elif get_origin(annotation) in (tuple, list) and str(part).isdecimal():
            annotation, metadata = get_args(annotation)[0], []
        elif get_origin(annotation) is dict:
            annotation, metadata = get_args(annotation)[1], []
        else:
            return None
    return annotation, metadata


def _bare(annotation: Any) -> tuple[Any, list[Any]]:
    """Return an annotation without ``| None`` and ``Annotated``, and the constraints that were on it."""
    metadata: list[Any] = []
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            annotation, *found = get_args(annotation)
            metadata += found
        elif origin in (Union, UnionType):
            rest = [choice for choice in get_args(annotation) if choice is not NoneType]
            if len(rest) != 1:
                return annotation, metadata
            annotation = rest[0]
        else:
            return annotation, metadata


def _pattern(alias: Any) -> str:
    return str(next(item.pattern for item in get_args(alias) if isinstance(item, StringConstraints)))


_NAMED_PATTERNS = {
    _pattern(Label): "name of lower-case letters, digits and hyphens, at most 63 characters",
    _pattern(Address): "host:port",
    _pattern(Sha256): "64 lower-case hexadecimal digits, or empty",
    _pattern(ValidationMetric): "name of a metric that begins with validation_",
}

_SINGULAR: dict[Any, str] = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "string",
    Path: "path",
}
_PLURAL: dict[Any, str] = {bool: "booleans", int: "integers", float: "numbers", str: "strings", Path: "paths"}
_BOUNDS = (
    ("ge", "at least {}"),
    ("gt", "above {}"),
    ("le", "at most {}"),
    ("lt", "below {}"),
    ("min_length", "at least {} long"),
    ("max_length", "at most {} long"),
)


def _takes(annotation: Any, metadata: Sequence[Any]) -> str:
    annotation, found = _bare(annotation)
    constraints = [
        # A `FieldInfo` among the metadata holds its own constraints one level down.
        constraint
        for item in [*metadata, *found]
        for constraint in (item.metadata if isinstance(item, FieldInfo) else [item])
    ]
    pattern = next((item.pattern for item in constraints if getattr(item, "pattern", None)), None)
    bounds = [
        words.format(getattr(item, name))
        for name, words in _BOUNDS
        for item in constraints
        if getattr(item, name, None) is not None
    ]
    return ", ".join([_kind(annotation) if pattern is None else _patterned(pattern), *bounds])


def _kind(annotation: Any) -> str:
    inner = table(annotation)
    if inner is not None:
        return f"table with {', '.join(inner.model_fields)}"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return _one_of(arguments)
    if origin in (tuple, list):
        return "array of " + ("tables" if table(arguments[0]) else _PLURAL.get(arguments[0], "values"))
    if origin is dict:
        return "table of " + _PLURAL.get(arguments[1], "values")
    return _SINGULAR.get(annotation, str(annotation))


def _patterned(pattern: str) -> str:
    choices = re.fullmatch(r"\^\(([\w|-]+)\)\$", pattern)
    if choices:
        return _one_of(choices.group(1).split("|"))
    return _NAMED_PATTERNS.get(pattern, f"string that matches {pattern}")


def _one_of(choices: Sequence[object]) -> str:
    words = [toml_text(choice) for choice in choices]
    return words[0] if len(words) == 1 else "one of " + ", ".join(words)
