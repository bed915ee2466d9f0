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

__all__ = ["SWITCH", "agreed", "faster", "leave_out", "left_out", "package", "state"]

SWITCH = "COTERIE_NATIVE"
"""Environment variable; ``off`` leaves out every compiled kernel."""

_INTERFACE = 2
_DISTRIBUTION, _PACKAGE = "coterie-native", "coterie_native"
_TRIALS = 9
_LOG = logging.getLogger("coterie.kernels")
_left_out: dict[str, str] = {}


def _switched_off() -> bool:
    return os.environ.get(SWITCH, "").strip().lower() in ("off", "0", "no")


@cache
def package() -> Any | None:
    """Return the module ``coterie_native``; None where it is not installed, cannot be loaded, or is switched off."""
    if _switched_off():
        return None
    try:
        import coterie_native
    except ModuleNotFoundError as error:
        if error.name != _PACKAGE:
            _leave_out(_DISTRIBUTION, _lacks(error))
        return None
    except (ImportError, OSError) as error:
        # A wheel for another processor or C library.
        _leave_out(_DISTRIBUTION, f"cannot be loaded here: {error}")
        return None
    interface = getattr(coterie_native, "INTERFACE", None)
    if interface is None:
        # Python takes any folder of the name for a package, for instance one of the folder that it is started in.
        places = ", ".join(getattr(coterie_native, "__path__", ())) or "an unknown place"
        _leave_out(
            _DISTRIBUTION, f"is not what Python finds under the name {_PACKAGE}: {places} has no INTERFACE"
        )
        return None
    if interface != _INTERFACE:
        _leave_out(_DISTRIBUTION, f"has interface {interface}; this release takes {_INTERFACE}")
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


def leave_out(kernel: str, why: str) -> None:
    """Note that a kernel is left out for a reason that is no fault; the log has no word of it."""
    _left_out[kernel] = why


def left_out() -> dict[str, str]:
    """Return what was left out in this process so far, and why: the package, or kernels by name."""
    return dict(_left_out)


def state() -> str:
    """Return in words whether compiled kernels are there, for `coterie version` and reports."""
    found = package()
    if found is not None:
        ways = ", ".join(found.mask_ways()) or "no way of computing masks on this processor"
        return f"{found.version()} ({ways})"
    if _switched_off():
        return f"switched off ({SWITCH})"
    return _left_out.get(_DISTRIBUTION, "not installed")


def _lacks(error: ModuleNotFoundError) -> str:
    """Return what the installed package lacks, and what to do."""
    if (error.name or "").startswith(_PACKAGE):
        return f"has no compiled part ({error.name}): build and install it with `make native`"
    if error.name in ("cffi", "_cffi_backend"):
        return "needs the package cffi, which is not installed: python -m pip install cffi"
    return f"needs a module that is not installed: {error.name}"


def _leave_out(what: str, why: str) -> None:
    if what not in _left_out:
        _left_out[what] = why
        _LOG.warning("%s is not used: it %s", what, why)
