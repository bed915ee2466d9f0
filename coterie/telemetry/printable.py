"""Text of others, made harmless for terminals and pages."""

from __future__ import annotations

import unicodedata

__all__ = ["printable"]


def printable(text: str) -> str:
    r"""Return text of others with characters that a terminal or a browser obeys written out, as ``\x1b``.

    Such as control characters, and marks that turn the direction of text.

    >>> printable("a \x1b[31mred title")
    'a \\x1b[31mred title'
    """
    return "".join(
        one if one.isprintable() or unicodedata.category(one) == "Zs" else ascii(one)[1:-1] for one in text
    )
