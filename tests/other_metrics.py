"""The metrics of ranx, an independent library, for tests that compare ours with them."""

from types import ModuleType


def ranx() -> ModuleType:
    """Return ranx, interpreted: compiling its metrics takes a minute, and what tests give them takes none."""
    import numba

    # Read where ranx decorates its functions, hence before its first import.
    numba.config.DISABLE_JIT = True
    import ranx

    return ranx
