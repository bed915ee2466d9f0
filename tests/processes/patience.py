"""How long tests wait for what real processes do, and whether they take their time."""

import os
import time

import pytest

FULL = os.environ.get("COTERIE_FULL") == "1"
"""Whether what takes longer is tested, too."""

ANOTHER_FORM = pytest.mark.full("another form of what the tests beside it have")
"""Mark of a test that runs with ``COTERIE_FULL=1`` only."""

WAIT_S = 120.0
"""For anything; a machine under load needs some of it."""

PAUSE_S = 0.02
"""Least time between two looks at something that no event tells of."""

LONGEST_PAUSE_S = 0.2
"""Longest time between two such looks."""


def until_next(looked_at: float) -> float:
    """Return how long to wait after a look, seconds: looks take at most a fifth of a processor that tests share.

    Parameters
    ----------
    looked_at : float
        When the look began, ``time.monotonic`` seconds.
    """
    return min(max(PAUSE_S, 4 * (time.monotonic() - looked_at)), LONGEST_PAUSE_S)
