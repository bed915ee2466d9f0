"""What the third party says when its store does not do what it should."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from coterie.errors import StoreError
from coterie.store.engine import is_full
from coterie.wire.refusal import ErrorReason, Refusal

__all__ = ["storing"]


@contextlib.contextmanager
def storing(holds: Callable[[bool], None]) -> Iterator[None]:
    """Turn a failure of the store into a refusal, and tell the condition of health.

    Raises
    ------
    Refusal
        STORE_FULL, or NOT_READY for any other failure: the caller may repeat the request later.
    """
    try:
        yield
    except StoreError as error:
        holds(False)
        full = error.__cause__ is not None and is_full(error.__cause__)
        raise Refusal(
            ErrorReason.ERROR_REASON_STORE_FULL if full else ErrorReason.ERROR_REASON_NOT_READY,
            error.message,
            field="store",
        ) from error
    holds(True)
