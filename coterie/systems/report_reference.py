"""Generation of the tables of keys in ``docs/report.md`` from the report's models.

``python -m coterie.systems.report_reference`` prints the tables; ``--write docs/report.md`` puts them between two
marks of that page.
"""

from __future__ import annotations

import argparse
import inspect
import types
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from coterie.systems.registry import systems
from coterie.telemetry.report import Part, Report

__all__ = ["main", "markdown", "with_tables"]

_BEGIN = "<!-- keys: written by `make docs` from the models of the report -->"
_END = "<!-- end of keys -->"
_WORDS = {float: "number", int: "number", str: "text", bool: "true or false"}


def markdown() -> str:
    """Return a table of a report's keys, one for each of its parts, and those of systems' own keys, as Markdown."""
    lines = ["| key | takes | meaning |", "| --- | --- | --- |", *_lines(Report), ""]
    described = dict.fromkeys(_parts(Report))
    for part in described:
        lines += _table(part, described)
    own: dict[type[Report], list[str]] = {}
    for system in systems().values():
        own.setdefault(system.report, []).append(system.title)
    own.pop(Report, None)
    for report, titles in own.items():
        if not (rows := list(_lines(report, Report))):
            continue
        lines += [f"### Keys of {', '.join(titles)}", ""]
        lines += ["| key | takes | meaning |", "| --- | --- | --- |", *rows, ""]
        for part in dict.fromkeys(_parts(report)):
            if part not in described:
                lines += _table(part, described)
    return "\n".join(lines)


def _table(part: type[Part], described: Container[type[Part]]) -> list[str]:
    """Return the section of a part; one that adds fields to a described part names that one."""
    base = next((one for one in part.__mro__[1:] if one in described), Part)
    beside = [] if base is Part else [f"It has all fields of [{_title(base).lower()}]({_anchor(base)}).", ""]
    head = [f"### {_title(part)}", "", inspect.cleandoc(part.__doc__ or ""), "", *beside]
    return [*head, "| field | takes | meaning |", "| --- | --- | --- |", *_lines(part, base), ""]


def with_tables(page: str) -> str:
    """Return a page's text with the tables between the page's two marks.

    Raises
    ------
    ValueError
        The page lacks the marks.
    """
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"no place for tables of keys; expected {_BEGIN!r}, then {_END!r}")
    return f"{before}{_BEGIN}\n\n{markdown()}\n{_END}{after}"


def _lines(part: type[BaseModel], base: type[BaseModel] = Part) -> Iterator[str]:
    """Yield a row for each field of a part that the part on which it is based has not, or has otherwise."""
    for name, field in part.model_fields.items():
        held = base.model_fields.get(name)
        if held is not None and (held.annotation, held.description) == (field.annotation, field.description):
            continue
        cells = (f"`{field.alias or name}`", _takes(field.annotation), field.description or "")
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _takes(kind: Any) -> str:
    """Return the type of a key's value in words; that a number may be null is not said."""
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Part):
        title = _title(kind)
        word = title if title[:2].isupper() else title.lower()
        return f"[{word}]({_anchor(kind)})"
    if kind in _WORDS:
        return _WORDS[kind]
    if origin in (dict, Mapping):
        return f"by name: {_takes(inner[1])}"
    if origin is tuple:
        return f"list of {_takes(inner[0])}"
    if origin in (Union, types.UnionType):
        known = [one for one in inner if one is not type(None)]
        return _takes(known[0])
    if hasattr(kind, "__metadata__"):
        return _takes(inner[0])
    return "any"


def _parts(part: Any) -> Iterator[type[Part]]:
    """Yield a model's parts, each followed by its own parts."""
    for field in part.model_fields.values():
        for found in _within(field.annotation):
            yield found
            yield from _parts(found)


def _within(kind: Any) -> Iterator[type[Part]]:
    if isinstance(kind, type) and issubclass(kind, Part):
        yield kind
    for inner in get_args(kind):
        yield from _within(inner)


def _anchor(part: type[BaseModel]) -> str:
    """Return the link to the section of a part."""
    return f"#{_title(part).lower().replace(' ', '-')}"


def _title(part: type[BaseModel]) -> str:
    """Return the name of a part as words.

    >>> _title(Report)
    'Report'
    """
    words = "".join(f" {letter}" if letter.isupper() else letter for letter in part.__name__).split()
    return " ".join((words[0].replace("Cpu", "CPU"), *(word.lower() for word in words[1:])))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables of keys, or write them into a page."""
    parser = argparse.ArgumentParser(
        prog="python -m coterie.systems.report_reference", description="Tables of the keys of a report."
    )
    parser.add_argument("--write", type=Path, metavar="PATH", help="put them into this page")
    target: Path | None = parser.parse_args(arguments).write
    if target is None:
        print(markdown(), end="")
    else:
        target.write_text(with_tables(target.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
