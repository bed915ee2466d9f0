"""Turn failures of the third party's store into refusals."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from coterie.errors import StoreError
from coterie.net.status import not_kept

__all__ = ["storing"]


@contextlib.contextmanager
def storing(holds: Callable[[bool], None]) -> Iterator[None]:
    """Turn a failure of the store within this context into a refusal, and report the store's health.

    Raises
    ------
    Refusal
        STORE_FULL, or NOT_READY for any other failure: the caller may repeat the request later.
    """
    try:
        yield
    except StoreError as error:
        holds(False)
        raise not_kept(error) from error
    holds(True)
