"""A time limit for what is done over a connection to a database, also when its server hangs."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

__all__ = ["bounded"]


@contextlib.contextmanager
def bounded(connection: sa.Connection, limit_s: float) -> Iterator[None]:
    """Cut a connection off when its server does not answer in time: a server that hangs does not keep its own limits.

    Statements that wait for the connection then fail as when it is lost.

    Parameters
    ----------
    connection : sqlalchemy.Connection
    limit_s : float
        Longest time of everything within the context, seconds.
    """
    # Duplicated, so that the number still means this connection after it was closed.
    driver: Any = connection.connection.driver_connection
    held = socket.socket(fileno=os.dup(driver.fileno()))

    def cut() -> None:
        with contextlib.suppress(OSError):
            held.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(limit_s, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        held.close()
