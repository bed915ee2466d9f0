"""Federations of real processes for tests that disturb them."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from coterie.config.run import RunSettings
from coterie.launch.feed import load, make_feed

from .recorded import OneOwner, Recorded
from .running import Running

SMALL: dict[str, Any] = {
    "reference": False,
    "data": {"synthetic": {"users": 60, "items": 120, "interactions": 3000}},
    "drift": {"dim": 8, "theta": 4, "epochs": 4},
    "federation": {"owners": 2, "hosts": 2, "min_users": 20},
}
"""Small enough for a run of a few seconds."""


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that take longest: otherwise one worker ends with one of them, alone."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
