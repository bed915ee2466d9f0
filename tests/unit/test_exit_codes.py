"""Every exit status has its entry in docs/exit-codes/, and every entry a status."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from coterie.cli.output import Status
from coterie.errors import CoterieError

FOLDER = Path(__file__).parents[2] / "docs" / "exit-codes"
HEADING = re.compile(r"^## (\d+) `([a-z_-]+)`$", re.MULTILINE)


_SCORER = "coterie.api.lenskit_scorer"


def import_everything() -> None:
    """Import all modules, so that every error class is known."""
    names = ["coterie", *(point.value.partition(".")[0] for point in entry_points(group="coterie.services"))]
    for name in names:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            # Migrations run inside Alembic only, and the scorer for LensKit where that is installed.
            if ".migrations." in module.name or (module.name == _SCORER and find_spec("lenskit") is None):
                continue
            importlib.import_module(module.name)


def error_classes(base: type[CoterieError] = CoterieError) -> Iterator[type[CoterieError]]:
    # Tests of other modules define errors of their own.
    if base.__module__.startswith("coterie"):
        yield base
    for derived in base.__subclasses__():
        yield from error_classes(derived)


def statuses() -> set[tuple[int, str]]:
    import_everything()
    own = {(int(status), status.name.lower()) for status in Status}
    return own | {(error.exit_code, error.code) for error in error_classes()}


def documented() -> dict[tuple[int, str], Path]:
    return {
        (int(number), code): page
        for page in FOLDER.glob("[0-9]*.md")
        for number, code in HEADING.findall(page.read_text(encoding="utf-8"))
    }


def test_every_status_has_an_entry_and_every_entry_a_status() -> None:
    assert set(documented()) == statuses()


def test_every_entry_stands_in_the_page_of_its_range() -> None:
    for (number, code), page in documented().items():
        first, last = map(int, page.stem.split("-"))
        assert first <= number <= last, f"{number} {code} in {page.name}"


def test_the_index_lists_every_page_and_every_status() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    for (number, code), page in documented().items():
        row = next(line for line in index.splitlines() if f"]({page.name})" in line)
        assert f"{number} `{code}`" in row
    listed = re.findall(r"(\d+) `([a-z_-]+)`", index)
    assert len(listed) == len(documented())


def test_every_class_has_a_description_of_its_own() -> None:
    import_everything()
    for error in error_classes():
        assert error.__doc__ != CoterieError.__doc__ or error is CoterieError, error.__name__
