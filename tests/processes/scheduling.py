"""Assignment of tests to workers: a group's tests to one worker, the longest tests first.

The scheduler ``loadgroup`` of pytest-xdist 3.8 knows groups by a suffix of a test's id, which pytest 9 no longer lets
it write: it forgets them silently.  Here the first worker that has collected tells the groups in a file.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

FILE = "groups.json"


def group_of(item: pytest.Item) -> str | None:
    """Return the group of a test; None where it belongs to none."""
    marker = item.get_closest_marker("xdist_group")
    return None if marker is None else str(marker.args[0])


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return tests in the order in which they begin: long ones, groups, the others."""

    def rank(item: pytest.Item) -> int:
        if item.get_closest_marker("long") is not None:
            return 0
        return 1 if group_of(item) else 2

    return sorted(items, key=rank)


def tell(items: list[pytest.Item], folder: Path) -> None:
    """Write down which test belongs to which group, for the process that hands tests out."""
    groups = {item.nodeid: group for item in items if (group := group_of(item))}
    mine = folder / f"{FILE}.{os.getpid()}"
    mine.write_text(json.dumps(groups))
    mine.replace(folder / FILE)


class Grouped(LoadScopeScheduling):
    """Hands out whole groups, and other tests one by one.

    Parameters
    ----------
    folder : Path
        Where workers `tell` the groups.
    """

    def __init__(self, config: pytest.Config, log: Any, folder: Path) -> None:
        super().__init__(config, log)
        # The order is that of `in_order`.
        config.option.loadscopereorder = False
        self._folder = folder
        self._groups: dict[str, str] | None = None

    def _split_scope(self, nodeid: str) -> str:
        if self._groups is None:
            self._groups = json.loads((self._folder / FILE).read_text())
        return self._groups.get(nodeid, nodeid)
