"""Compiled kernels of the package ``coterie-native``, used where it is installed and agrees with the reference.

Nothing needs the package: what it computes is also computed with NumPy and the cryptography package, which stay the
reference.  Each kernel is compared with its reference once in a process, before it is used for the first time; one that
computes something else is left out, with one warning in the log.  ``COTERIE_NATIVE=off`` leaves out all of them.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any

__all__ = ["SWITCH", "agreed", "faster", "package", "state"]

SWITCH = "COTERIE_NATIVE"
"""Environment variable; ``off`` leaves out every compiled kernel."""

_INTERFACE = 1
_TRIALS = 9
_LOG = logging.getLogger("coterie.kernels")
_left_out: dict[str, str] = {}


@cache
def package() -> Any | None:
    """Return the module ``coterie_native``; None where it is not installed, cannot be loaded, or is switched off."""
    if os.environ.get(SWITCH, "").strip().lower() in ("off", "0", "no"):
        return None
    try:
        import coterie_native
    except ModuleNotFoundError:
        return None
    except (ImportError, OSError) as error:
        # A wheel for another processor or C library.
        _leave_out("coterie-native", f"cannot be loaded here: {error}")
        return None
    if coterie_native.INTERFACE != _INTERFACE:
        _leave_out(
            "coterie-native", f"has interface {coterie_native.INTERFACE}; this release takes {_INTERFACE}"
        )
        return None
    return coterie_native


def agreed(kernel: str, agrees: Callable[[Any], bool]) -> Any | None:
    """Return the package if one of its kernels computes what its reference does.

    Parameters
    ----------
    kernel : str
        Name of the kernel, for the log.
    agrees : callable
        Receives the package and says whether the kernel's results are those of the reference; callers keep what this
        function returns, as the comparison costs milliseconds.
    """
    found = package()
    if found is None:
        return None
    try:
        same = agrees(found)
    except Exception as error:
        _leave_out(kernel, f"fails its comparison with the reference: {error}")
        return None
    if not same:
        _leave_out(kernel, "computes something else than the reference on this processor")
        return None
    return found


def faster(kernel: Callable[[], object], reference: Callable[[], object]) -> bool:
    """Return whether a kernel is faster than its reference on this machine, measured in some milliseconds.

    For kernels that have the reference's results to the bit: a measurement may come out otherwise in another process.
    Both are called in turn, by this thread's CPU time, so that other work on the machine does not decide.
    """
    spent = {kernel: math.inf, reference: math.inf}
    for _ in range(_TRIALS):
        for work in spent:
            began = time.thread_time()
            work()
            spent[work] = min(spent[work], time.thread_time() - began)
    return spent[kernel] < spent[reference]


def state() -> str:
    """Return in words whether compiled kernels are there, for `coterie version` and reports."""
    found = package()
    if found is None:
        return _left_out.get("coterie-native") or "not installed or switched off"
    ways = ", ".join(found.mask_ways()) or "no way of computing masks on this processor"
    return f"{found.version()} ({ways})"


def _leave_out(what: str, why: str) -> None:
    if what not in _left_out:
        _left_out[what] = why
        _LOG.warning("%s is not used: it %s", what, why)
