"""Listens on a channel of PostgreSQL for what other processes announce there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

__all__ = ["Listener"]

_LOOK_S = 0.5
"""Longest time until the listener notices that it was closed, seconds."""
_PAUSE_S = 1.0


class Listener:
    """Listens from a thread of its own until it is closed, and again after the connection was lost.

    What is announced while there is no connection is lost: a listener looks for itself now and then, too.

    Parameters
    ----------
    engine : sqlalchemy.Engine
    channel : str
        A name of our own.
    heard : callable
        Called in the thread, with the text of each announcement.
    """

    def __init__(self, engine: sa.Engine, channel: str, heard: Callable[[str], None]) -> None:
        self._engine = engine
        self._channel = channel
        self._heard = heard
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="announcements", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(sa.exc.DBAPIError, OSError), self._connected() as driver:
                while not self._closing.is_set():
                    for announced in driver.notifies(timeout=_LOOK_S):
                        self._heard(announced.payload)
            self._closing.wait(_PAUSE_S)

    @contextlib.contextmanager
    def _connected(self) -> Any:
        from psycopg import Error

        with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql(f"LISTEN {self._channel}")
            with contextlib.suppress(Error):
                yield connection.connection.driver_connection

    def close(self) -> None:
        """Listen no more."""
        self._closing.set()
        self._thread.join(2 * _PAUSE_S)
