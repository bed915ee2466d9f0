"""Generation of the tables of keys in ``docs/report.md`` from the report's models.

``python -m coterie.telemetry.report_reference`` prints the tables; ``--write docs/report.md`` puts them between two
marks of that page.
"""

from __future__ import annotations

import argparse
import inspect
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from coterie.telemetry.report import Part, Report

__all__ = ["main", "markdown", "with_tables"]

_BEGIN = "<!-- keys: written by `make docs` from coterie/telemetry/report.py -->"
_END = "<!-- end of keys -->"
_WORDS = {float: "number", int: "number", str: "text", bool: "true or false"}


def markdown() -> str:
    """Return a table of a report's keys, and one for each of its parts, as Markdown."""
    lines = ["| key | takes | meaning |", "| --- | --- | --- |", *_lines(Report), ""]
    for part in dict.fromkeys(_parts(Report)):
        lines += [f"### {_title(part)}", "", inspect.cleandoc(part.__doc__ or ""), ""]
        lines += ["| field | takes | meaning |", "| --- | --- | --- |", *_lines(part), ""]
    return "\n".join(lines)


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


def _lines(part: type[BaseModel]) -> Iterator[str]:
    for name, field in part.model_fields.items():
        cells = (f"`{field.alias or name}`", _takes(field.annotation), field.description or "")
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _takes(kind: Any) -> str:
    """Return the type of a key's value in words; that a number may be null is not said."""
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Part):
        title = _title(kind)
        word = title if title[:2].isupper() else title.lower()
        return f"[{word}](#{title.lower().replace(' ', '-')})"
    if kind in _WORDS:
        return _WORDS[kind]
    if origin is dict:
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


def _title(part: type[Part]) -> str:
    """Return the name of a part as words.

    >>> _title(Report)
    'Report'
    """
    words = "".join(f" {letter}" if letter.isupper() else letter for letter in part.__name__).split()
    return " ".join((words[0].replace("Cpu", "CPU"), *(word.lower() for word in words[1:])))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables of keys, or write them into a page."""
    parser = argparse.ArgumentParser(
        prog="python -m coterie.telemetry.report_reference", description="Tables of the keys of a report."
    )
    parser.add_argument("--write", type=Path, metavar="PATH", help="put them into this page")
    target: Path | None = parser.parse_args(arguments).write
    if target is None:
        print(markdown(), end="")
    else:
        target.write_text(with_tables(target.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
