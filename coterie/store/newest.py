"""The newest tables of each role as one script for SQLite, which a new store takes in place of all migrations.

    python -m coterie.store.newest --write

writes the scripts again (``newest.sql`` beside a role's migrations) after a migration was added.  A service that starts
with an empty store or a current one needs no part of Alembic, whose import and operations take longer than the script.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import sqlalchemy as sa

__all__ = ["SCHEMAS", "Newest", "create", "newest", "of_migrations", "revision_of"]

SCHEMAS = ("client", "cos", "data_owner", "expansion", "thirdparty")
"""Folders of revisions under ``coterie/store/migrations``."""

_FIRST = "-- Written by `python -m coterie.store.newest --write`: what the migrations to this revision leave behind.\n"
_REVISION = "-- Revision: "


@dataclass(frozen=True)
class Newest:
    """Tables of the newest revision.

    Parameters
    ----------
    revision : str
        As Alembic names it: "cos_0007".
    statements : sequence of str
        They create the tables, with the rows that migrations put there, in an empty database of SQLite.
    """

    revision: str
    statements: Sequence[str]


@functools.cache
def newest(schema: str) -> Newest:
    """Return the newest tables of a role, from its script.

    Parameters
    ----------
    schema : str
        One of `SCHEMAS`.
    """
    text = (resources.files("coterie.store") / "migrations" / schema / "newest.sql").read_text(
        encoding="utf-8"
    )
    _, named, script = text.split("\n", 2)
    return Newest(named.removeprefix(_REVISION), tuple(_statements(script)))


def create(connection: sa.Connection, schema: str) -> bool:
    """Create the newest tables in an empty database of SQLite, in one transaction.

    Parameters
    ----------
    connection : sqlalchemy.Connection
        Without a transaction.
    schema : str
        One of `SCHEMAS`.

    Returns
    -------
    bool
        False, and nothing was done, where there are tables already.
    """
    with connection.begin():
        # The driver begins no transaction by itself before it changes tables.
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        if connection.exec_driver_sql("SELECT 1 FROM sqlite_master").first() is not None:
            return False
        for statement in newest(schema).statements:
            connection.exec_driver_sql(statement)
    return True


def revision_of(connection: sa.Connection) -> str | None:
    """Return the revision of the tables in a database; None where no migration has been.

    Parameters
    ----------
    connection : sqlalchemy.Connection
    """
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    held = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    return None if held is None else str(held)


def of_migrations(schema: str) -> str:
    """Return the text of a role's script, from a database that its migrations made.

    Parameters
    ----------
    schema : str
        One of `SCHEMAS`.
    """
    from coterie.store.engine import migrate

    with contextlib.closing(sqlite3.connect(":memory:", check_same_thread=False)) as database:
        engine = sa.create_engine("sqlite://", creator=lambda: database, poolclass=sa.pool.StaticPool)
        migrate(engine, schema, by_script=False)
        with engine.connect() as connection:
            revision = revision_of(connection)
        dumped = [line for line in database.iterdump() if line not in ("BEGIN TRANSACTION;", "COMMIT;")]
    return "\n".join([f"{_FIRST}{_REVISION}{revision}", *dumped, ""])


def _statements(script: str) -> Iterator[str]:
    lines: list[str] = []
    for line in script.splitlines():
        lines.append(line)
        if sqlite3.complete_statement("\n".join(lines)):
            yield "\n".join(lines)
            lines = []


def main() -> None:
    """Write the scripts."""
    parser = argparse.ArgumentParser(description="Write the scripts of the newest tables.")
    parser.add_argument("--write", action="store_true", required=True, help="write them")
    parser.parse_args()
    for schema in SCHEMAS:
        folder = Path(__file__).parent / "migrations" / schema
        (folder / "newest.sql").write_text(of_migrations(schema), encoding="utf-8")


if __name__ == "__main__":
    main()
