"""Tenures over a database: which of several services may write to it, decided by the database itself.

Services that share a database use it one at a time.  The advisory lock of `coterie.store.postgres` lets one in, which
then begins a tenure: it writes a name that nobody had before into the database.  Every transaction then asks, in the
database, whether that name is still there, and keeps it there until the transaction has ended.  A service that was
paused or cut off, and comes back after another one has begun a tenure, is refused each write, whatever it believes.

A service in office shows by a counter that it lives (`beat`).  `Succession` is how another one waits: it gets its turn
when nobody holds the lock any more, and ends the session of a holder whose counter has stood still for `SILENT_S`.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator

import sqlalchemy as sa
import structlog

from coterie.errors import StoreError
from coterie.store.time_limit import bounded

__all__ = ["BEAT_S", "LEASE_S", "LOCK", "SILENT_S", "Succession", "Tenure", "taken_over", "uptime"]

_log = structlog.get_logger("coterie.store")

# Made from the project's name, so that it differs from the locks of other applications of the database.
LOCK = int.from_bytes(b"coterie\x01", "big")
"""The advisory lock of the service in office."""

BEAT_S = 1.0
"""Time between two signs of life of the service in office, seconds."""
LEASE_S = 4.0
"""Time without a sign of life that reached the database, after which a service that has a standby stops by itself,
seconds."""
SILENT_S = 5.0
"""Time without a sign of life after which a standby takes over, seconds."""
_PROMPT_S = 1.0
"""Longest duration of a look at the database that counts: a silence that is the database's own does not."""
_ANSWER_S = 3.0
"""Longest time in which the database has to answer a look or a sign of life, seconds."""
_GAP_S = 3.0
"""Longest time between two looks that count as one observation, seconds."""

# Not among the tables of a role's store: they are about the database, and no backup carries them elsewhere.
_TABLES = (
    "CREATE TABLE IF NOT EXISTS coterie_tenure (one int PRIMARY KEY CHECK (one = 1), number bigint NOT NULL, "
    "holder text NOT NULL)",
    "CREATE TABLE IF NOT EXISTS coterie_beat (one int PRIMARY KEY CHECK (one = 1), holder text NOT NULL, "
    "beat bigint NOT NULL)",
    "CREATE TABLE IF NOT EXISTS coterie_session (one int PRIMARY KEY CHECK (one = 1), holder text NOT NULL, "
    "pid int NOT NULL)",
)
_BEGIN = (
    "INSERT INTO coterie_tenure (one, number, holder) VALUES (1, 1, %s) ON CONFLICT (one) "
    "DO UPDATE SET number = coterie_tenure.number + 1, holder = excluded.holder RETURNING number"
)
_FIRST_BEAT = (
    "INSERT INTO coterie_beat (one, holder, beat) VALUES (1, %s, 0) ON CONFLICT (one) "
    "DO UPDATE SET holder = excluded.holder, beat = 0"
)
# The session that writes: another service of the database, which no sign of life belongs to, is never ended for it.
_SESSION = (
    "INSERT INTO coterie_session (one, holder, pid) VALUES (1, %s, pg_backend_pid()) ON CONFLICT (one) "
    "DO UPDATE SET holder = excluded.holder, pid = excluded.pid"
)
# The row stays locked until the transaction has ended: another tenure begins before it, or after it.
_CHECK = "SELECT holder, pg_backend_pid() AS pid FROM coterie_tenure WHERE one = 1 FOR SHARE"
_BEAT = "UPDATE coterie_beat SET beat = beat + 1 WHERE holder = %s"

_LOCK_PLACE = LOCK >> 32, LOCK & 0xFFFFFFFF
"""The lock as pg_locks shows it: the upper and the lower half of its number."""
_HOLDERS = (
    "SELECT l.pid FROM pg_locks l WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND l.classid = %s "
    "AND l.objid = %s AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
_END = (
    "SELECT pg_terminate_backend(l.pid) FROM pg_locks l, coterie_tenure t, coterie_session s "
    "WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND l.classid = %s AND l.objid = %s "
    "AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND t.holder = %s "
    "AND s.holder = t.holder AND s.pid = l.pid"
)
_KNOWN = (
    "SELECT to_regclass('coterie_tenure') IS NOT NULL AND to_regclass('coterie_beat') IS NOT NULL "
    "AND to_regclass('coterie_session') IS NOT NULL"
)
_SEEN = "SELECT t.holder, b.beat FROM coterie_tenure t LEFT JOIN coterie_beat b ON b.holder = t.holder"


def uptime() -> float:
    """Return seconds of a clock that never goes back, and on Linux also runs while the machine is suspended."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


def taken_over() -> StoreError:
    """Return the error of a service whose tenure has ended because another service began one."""
    return StoreError(
        "another service has taken this one's database over",
        hint="this one writes nothing any more; it waits until the other one is gone",
        trouble="away",
    )


class Tenure:
    """The tenure of one service over a database.

    Parameters
    ----------
    clock : callable, optional
        Seconds since some moment.

    Attributes
    ----------
    holder : str
        Name of the present or last tenure; empty before the first.
    """

    def __init__(self, clock: Callable[[], float] = uptime) -> None:
        self.holder = ""
        self._clock = clock
        # When the transaction that began the next tenure started, and when the last sign of life that arrived did.
        self._begun = self._confirmed = 0.0
        # The session that began the tenure, and the tenure that the database said is over.
        self._pid = 0
        self._over = ""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        # The connection that shows signs of life, and its lock: one thread at a time uses it.
        self._beating: sa.Connection | None = None
        self._lock = threading.Lock()

    def begin(self, connection: sa.Connection) -> str:
        """Begin a tenure in a transaction of a connection that holds the lock; return its name.

        Once the transaction is durable, the caller passes the name to `enter`.
        """
        self._begun = self._clock()
        for table in _TABLES:
            connection.exec_driver_sql(table)
        holder = secrets.token_hex(16)
        number = connection.exec_driver_sql(_BEGIN, (holder,)).scalar_one()
        connection.exec_driver_sql(_FIRST_BEAT, (holder,))
        connection.exec_driver_sql(_SESSION, (holder,))
        self._pid = int(connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one())
        _log.info("a tenure over the database begins", number=number)
        return holder

    def enter(self, holder: str) -> None:
        """Take a tenure that has begun as the present one."""
        self._confirmed = self._begun
        self.holder = holder

    @property
    def over(self) -> bool:
        """Whether the database said that another service has begun a tenure."""
        return bool(self.holder) and self._over == self.holder

    @property
    def in_force(self) -> bool:
        """Whether the database has lately confirmed the tenure, and has not said that it is over."""
        return bool(self.holder) and not self.over and self._clock() - self._confirmed < LEASE_S

    def check(self, connection: sa.Connection) -> None:
        """Require in a transaction, which is about to write, that the tenure is the present one until it ends.

        Raises
        ------
        StoreError
            Another service has begun a tenure.
        """
        row = connection.exec_driver_sql(_CHECK).first()
        if row is None or row.holder != self.holder:
            raise taken_over()
        if row.pid != self._pid:
            # The connection was lost and made again within the tenure.
            connection.exec_driver_sql(_SESSION, (self.holder,))

    def beat(self, engine: sa.Engine) -> bool:
        """Show a sign of life; return whether the tenure is still the present one.

        Parameters
        ----------
        engine : sqlalchemy.Engine
            Its connections need not hold the lock.
        """
        with self._lock:
            begun, holder = self._clock(), self.holder
            try:
                if self._beating is None:
                    self._beating = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
                with bounded(self._beating, _ANSWER_S):
                    held = self._beating.exec_driver_sql(_BEAT, (holder,)).rowcount == 1
            except sa.exc.DBAPIError:
                if self._beating is not None:
                    self._beating.invalidate()
                    self._beating.close()
                self._beating = None
                raise
        if not held:
            self._over = holder
        elif holder == self.holder:
            self._confirmed = max(begun, self._confirmed)
        return held

    def keep_up(self, engine: sa.Engine) -> None:
        """Show signs of life in each tenure from a thread of their own, until `close`: the caller's may be busy.

        Parameters
        ----------
        engine : sqlalchemy.Engine
            As for `beat`.
        """

        def keep_up() -> None:
            while not self._closing.wait(BEAT_S):
                if self.holder and not self.over:
                    # What does not arrive is seen by `in_force`.
                    with contextlib.suppress(sa.exc.DBAPIError, OSError):
                        self.beat(engine)

        self._thread = threading.Thread(target=keep_up, name="tenure", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Show no signs of life any more, and close their connection."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            if self._beating is not None:
                self._beating.close()
            self._beating = None


class Succession:
    """How a standby waits for its turn.

    Parameters
    ----------
    engine : sqlalchemy.Engine
        Its connections need not hold the lock.
    tenure : Tenure
        The standby's own, which it may have had before.
    clock : callable, optional
        Monotonic seconds.
    """

    def __init__(self, engine: sa.Engine, tenure: Tenure, clock: Callable[[], float] = uptime) -> None:
        self._engine = engine
        self._tenure = tenure
        self._clock = clock
        # What was seen last, since when it has been the same, and when it was looked at.
        self._seen: tuple[str, int] | None = None
        self._since = self._looked = 0.0

    @contextlib.contextmanager
    def _looking(self) -> Iterator[sa.Connection]:
        with (
            self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
            bounded(connection, _ANSWER_S),
        ):
            yield connection

    def free(self) -> bool:
        """Look at the database once; return whether the caller may try to get the lock now.

        A holder of the lock that has shown no sign of life for `SILENT_S` loses its session, its transaction and the
        lock.  Only time in which the database answered promptly counts: a database that hung was silent itself.

        Raises
        ------
        sqlalchemy.exc.DBAPIError
            The database does not answer.
        """
        begun = self._clock()
        with self._looking() as connection:
            if not connection.exec_driver_sql(_HOLDERS, _LOCK_PLACE).all():
                return True
            # A holder of an earlier release shows no signs of life, and one that has just begun has made no tables yet.
            known = bool(connection.exec_driver_sql(_KNOWN).scalar())
            row = connection.exec_driver_sql(_SEEN).first() if known else None
            now = self._clock()
            seen = None if row is None or row.beat is None else (str(row.holder), int(row.beat))
            counts = now - begun <= _PROMPT_S and now - self._looked <= _GAP_S
            self._looked = now
            if seen is None or seen != self._seen or not counts:
                self._seen, self._since = seen, now
                return seen is not None and seen[0] == self._tenure.holder
            if seen[0] == self._tenure.holder:
                return True
            if now - self._since < SILENT_S:
                return False
            # A session that is not the silent tenure's migrates, or is of a release that knows no tenures.
            if connection.exec_driver_sql(_END, (*_LOCK_PLACE, seen[0])).all():
                _log.warning(
                    "the service in office shows no sign of life: its session is ended",
                    silent_s=round(now - self._since, 1),
                )
            self._seen = None
            return not connection.exec_driver_sql(_HOLDERS, _LOCK_PLACE).all()

    def end_own(self) -> None:
        """End the sessions that hold the lock, if the last tenure is the caller's: its own, of lost connections.

        Raises
        ------
        sqlalchemy.exc.DBAPIError
            The database does not answer.
        """
        if not self._tenure.holder:
            return
        with self._looking() as connection:
            connection.exec_driver_sql(_END, (*_LOCK_PLACE, self._tenure.holder))
