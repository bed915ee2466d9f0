"""Messages for pydantic's validation errors: key, value, source, expected value, and the nearest right key."""

from __future__ import annotations

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from coterie.config.draft import Draft, Keys
from coterie.config.key_paths import dotted, expectation_at, keys, table_at, toml_text
from coterie.errors import nearest

__all__ = ["complaint", "is_echo"]


def is_echo(error: ErrorDetails) -> bool:
    """Return whether an error calls an array too short only because its entries are invalid themselves."""
    return error["type"] == "too_short" and len(error["input"]) >= error["ctx"]["min_length"]


def complaint(model: type[BaseModel], error: ErrorDetails, draft: Draft) -> str:
    """Return the message for one of pydantic's errors about a draft."""
    path = error["loc"]
    expected = expectation_at(model, path)
    if error["type"] == "missing":
        return f"{dotted(path)}: missing; expected {expected}"
    place = draft.place_of(path)
    where = f" ({place})" if place else ""
    if error["type"] in ("value_error", "assertion_error"):
        # Without a path it is of keys that do not go together, which the error names itself.
        return f"{dotted(path)}{where}: {error['ctx']['error']}" if path else str(error["ctx"]["error"])
    what = f"{dotted(path)} = {_shortened(toml_text(error['input']))}{where}"
    if error["type"] == "extra_forbidden":
        return f"{what}: no such key; {_suggestion(model, path)}"
    return f"{what}: expected {expected or error['msg']}"


def _suggestion(model: type[BaseModel], path: Keys) -> str:
    """Return a hint for an unknown key: the nearest key of its table, a similar key elsewhere, or the table's keys."""
    *above, last = path
    holder = table_at(model, above)
    beside = list(holder.model_fields) if holder else []
    near = nearest(str(last), beside)
    if near is None:
        elsewhere = [(key.name.rpartition(".")[2], key.name) for key in keys(model)]
        found = nearest(str(last), [word for word, _ in elsewhere])
        if found is None:
            return f"the keys here are {', '.join(beside)}"
        return f"did you mean {' or '.join(name for word, name in elsewhere if word == found)}?"
    return f"did you mean {dotted([*above, near])}?"


def _shortened(text: str, length: int = 60) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
