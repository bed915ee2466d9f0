"""Calls for several users of a host, a few at a time: what one user is refused stops nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

import structlog

from coterie.wire.refusal import ErrorReason, Refusal

__all__ = ["for_each_user"]

_log = structlog.get_logger("coterie.expansion")

_AT_ONCE = 8
"""Users whose requests are under way together."""


async def for_each_user(
    users: Sequence[int],
    call: Callable[[int], Awaitable[None]],
    of_one: Collection[ErrorReason.ValueType],
    words: str,
) -> str:
    """Call for each user; return the last refusal that concerned one user alone, empty without any.

    Parameters
    ----------
    users : sequence of int
    call : callable
        Takes a user.
    of_one : collection of ErrorReason
        Reasons of refusals that concern a single user; all other errors are raised.
    words : str
        What such a user goes without, for the log.
    """
    last = ""
    for first in range(0, len(users), _AT_ONCE):
        batch = users[first : first + _AT_ONCE]
        for found in await asyncio.gather(*map(call, batch), return_exceptions=True):
            if isinstance(found, Refusal) and found.reason in of_one:
                last = found.message
                _log.warning(words, reason=last)
            elif isinstance(found, BaseException):
                raise found
    return last
