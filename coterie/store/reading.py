"""Read a store of a run that is over, from outside the process that kept it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa

from coterie.errors import RunError

__all__ = ["read_store"]

T = TypeVar("T")


def read_store(path: Path, query: Callable[[sa.Connection], T]) -> T:
    """Return the answer of a store in a run's folder to a query.

    Raises
    ------
    RunError
        The store is not there, or cannot be read.
    """
    if not path.is_file():  # connecting would create the file
        raise RunError(f"{path} is not there", hint="the run did not get as far as starting")
    engine = sa.create_engine(f"sqlite:///{path}", poolclass=sa.pool.NullPool)
    try:
        with engine.connect() as connection:
            return query(connection)
    except sa.exc.DatabaseError as error:
        raise RunError(f"cannot read the store {path}: {error.orig}") from error
    finally:
        engine.dispose()
