"""Federations of real processes for tests that disturb them."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from coterie.config.run import RunSettings
from coterie.studies.run_data import load, make_feed

from .recorded import OneOwner, Recorded
from .running import Running
from .scheduling import Grouped, in_order, tell

SMALL: dict[str, Any] = {
    "reference": False,
    "data": {"synthetic": {"users": 60, "items": 120, "interactions": 3000}},
    "drift": {"dim": 8, "theta": 4, "epochs": 4},
    "federation": {"owners": 2, "hosts": 2, "min_users": 20, "most_abandoned": 5},
}
"""Small enough for a run of a few seconds, which soon fails where every sum is refused."""


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested mapping with changes."""
    return {
        key: merged(base.get(key, {}), changes[key])
        if isinstance(changes.get(key), Mapping)
        else changes.get(key, base.get(key))
        for key in base.keys() | changes.keys()
    }


@pytest.fixture(scope="session")
def small() -> Callable[..., RunSettings]:
    """Return a function that makes settings of a small run, with changes."""

    def make(**changes: Any) -> RunSettings:
        return RunSettings.model_validate(merged(SMALL, changes))

    return make


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Running]:
    """Return a function that makes a federation in a folder of its own; use it with ``async with``."""

    def make(settings: RunSettings, **options: Any) -> Running:
        feed = options.pop("feed", None) or make_feed(settings, load(settings), 0)
        return Running(settings, feed, tmp_path_factory.mktemp("federation"), **options)

    return make


@pytest.fixture(scope="session")
def recorded(small: Callable[..., RunSettings], federation: Callable[..., Running]) -> Recorded:
    """Return the finished runs that tests share; the tests belong to the group `of_system`."""
    return Recorded(small, federation)


@pytest.fixture(scope="session")
def one_owner(small: Callable[..., RunSettings], federation: Callable[..., Running]) -> OneOwner:
    """Return the runs of DRIFT with one owner that tests share; the tests belong to one group."""
    return OneOwner(small, federation)


# --- which worker runs which test --------------------------------------------------------------------------------


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put tests in order, and mark those that read the recorded runs; a worker tells the groups."""
    items[:] = in_order(items)
    for item in items:
        if "recorded" in getattr(item, "fixturenames", ()):
            item.add_marker("recorded")
    if (told := getattr(config, "workerinput", {}).get("groups")) is not None:
        tell(items, Path(told))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Say to a worker where it tells the groups."""
    node.workerinput["groups"] = str(_folder(node.config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Grouped | None:
    """Hand out groups, where they are asked for."""
    return Grouped(config, log, _folder(config)) if config.getvalue("dist") == "loadgroup" else None


def _folder(config: pytest.Config) -> Path:
    if _FOLDER not in config.stash:
        folder = tempfile.TemporaryDirectory(prefix="coterie-groups-")
        config.add_cleanup(folder.cleanup)
        config.stash[_FOLDER] = Path(folder.name)
    return config.stash[_FOLDER]


_FOLDER = pytest.StashKey[Path]()
