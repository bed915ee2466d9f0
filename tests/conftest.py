"""Settings and fixtures of every test."""

import functools
import gc
import os

# One thread of arithmetic, as services have: several tests run at once, and threads beyond the cores wait for each
# other.  Read when numpy is imported, hence before all else.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import structlog
from hypothesis import settings

# How long one example takes says more about the machine's load than about the code.
settings.register_profile("steady", settings.default, deadline=None)
# Who judges a change sees the same examples each time.
settings.register_profile("judge", settings.get_profile("steady"), derandomize=True)
settings.load_profile("judge" if os.environ.get("CI") else "steady")


def pytest_configure():
    """Import modules and collect thousands of tests, which all stay, without looking for garbage among them."""
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Look for garbage again, but not among what was imported and collected."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skip what runs with ``COTERIE_FULL=1`` only."""
    if (full := item.get_closest_marker("full")) is not None and os.environ.get("COTERIE_FULL") != "1":
        pytest.skip(f"{full.args[0]}: COTERIE_FULL=1 runs it")


@pytest.fixture(autouse=True)
def logs_of_its_own(monkeypatch):
    """Let no test's configuration of logs, nor loggers made under it, outlive it: `capture_logs` would see nothing."""
    configure = structlog.configure

    @functools.wraps(configure)
    def keeping_none(**given):
        configure(**{**given, "cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", keeping_none)
    yield
    structlog.reset_defaults()
