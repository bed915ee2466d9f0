"""Named parts of a page, each a JSON value with the number of its last change; browsers ask what changed since."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Mapping
from typing import Any

from coterie.telemetry.printable import printable

__all__ = ["Board", "shown"]


def shown(value: Any) -> Any:
    """Return a JSON value with the invisible characters of its texts written out."""
    match value:
        case str():
            return value if value.isascii() and value.isprintable() else printable(value)
        case Mapping():
            return {shown(name): shown(one) for name, one in value.items()}
        case list() | tuple():
            return [shown(one) for one in value]
    return value


class Board:
    """Named parts that a page shows; a browser that was away receives the parts that changed meanwhile.

    Only the latest value of a part is kept.  Memory is therefore bounded by the parts themselves, a browser that slept
    for hours catches up in one message, and a burst of changes costs each browser no more than the last of them.
    All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[str, tuple[int, str]] = {}
        self._made = secrets.token_hex(4)
        self._number = 0

    @property
    def number(self) -> int:
        """Number of changes so far."""
        return self._number

    def put(self, name: str, value: Any) -> None:
        """Set a part; nothing changes when the part has this value already.

        Parameters
        ----------
        name : str
            Name of the part; no line breaks.
        value : JSON value
            Numbers must be finite.  In texts, characters that turn the direction of text, and other invisible ones, are
            written out: a name cannot look like another one.
        """
        text = json.dumps(shown(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        with self._lock:
            if name in self._parts and self._parts[name][1] == text:
                return
            self._number += 1
            self._parts[name] = (self._number, text)

    def part(self, name: str) -> Any:
        """Return the value of a part; None if it was never set."""
        with self._lock:
            found = self._parts.get(name)
        return None if found is None else json.loads(found[1])

    def since(self, mark: str) -> tuple[str, Mapping[str, str]]:
        """Return a new mark, and the JSON text of each part that changed after a mark.

        Parameters
        ----------
        mark : str
            An earlier mark of this board, as a browser sends it back.  Everything is returned after any other text,
            such as the mark of a board of an earlier process.
        """
        made, _, number = mark.partition("-")
        seen = int(number) if made == self._made and number.isdecimal() and len(number) < 20 else 0
        with self._lock:
            changed = {name: text for name, (at, text) in self._parts.items() if at > seen}
            return f"{self._made}-{self._number}", changed
