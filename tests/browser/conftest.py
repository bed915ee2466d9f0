"""A browser for the tests of pages; packages are imported only where a test has not been skipped."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright import sync_api

    from . import looking

    with sync_api.sync_playwright() as playwright:
        # Another site's name that leads to this machine, as after DNS rebinding.
        rules = "--host-resolver-rules=MAP evil.example 127.0.0.1"
        started = playwright.chromium.launch(
            executable_path=looking.CHROMIUM, args=[*looking.ARGUMENTS, rules]
        )
        yield started
        started.close()


@pytest.fixture
def look(browser: Any) -> Iterator[Any]:
    from .looking import Looked

    made: list[Looked] = []

    def open_one(width: int = 1200, scheme: str = "light") -> Any:
        made.append(Looked(browser, width, scheme))
        return made[-1]

    yield open_one
    for one in made:
        one.context.close()
