"""The page of messages quotes messages that the code still has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
HOLE = "…"


def text_of(node: ast.AST) -> str | None:
    """Return a string of the code, with a hole for each value that it is given."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(one) or HOLE for one in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (text_of(node.left) or HOLE) + (text_of(node.right) or HOLE)
    return None


def strings() -> Iterator[str]:
    """Yield every string of the product's code."""
    for folder in ("coterie", "services"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "wire/v1" in path.as_posix():
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if found := text_of(node):
                    yield found


@cache
def code() -> str:
    return "\n".join(strings())


def is_in_code(message: str) -> bool:
    """Whether one string of the code has the parts of a message, in order."""
    parts = [re.escape(part) for part in message.split(HOLE)]
    return re.search("[^\n]*".join(parts), code()) is not None


def test_the_page_has_messages() -> None:
    assert len(QUOTED) > 25
    assert not is_in_code("a message that … nothing prints")


@pytest.mark.parametrize("message", QUOTED)
def test_every_quoted_message_is_in_the_code(message: str) -> None:
    assert is_in_code(message)
