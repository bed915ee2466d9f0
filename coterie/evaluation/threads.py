"""One thread for linear algebra, in training and scoring that must not depend on the machine's cores."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = ["one_thread"]


def one_thread() -> AbstractContextManager[Any]:
    """Limit linear algebra to one thread, where ``threadpoolctl`` is installed.

    The order of additions, and with it the result, does not depend on the machine's cores then; and many small
    products are faster, above all beside other work.
    """
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        return nullcontext()
    limits: AbstractContextManager[Any] = threadpool_limits(1)
    return limits
