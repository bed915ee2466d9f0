"""Compare the indices of a store with their tables, before the indices are made again from the tables.

SQLite says that an index and its table differ, not which of them is right.  An index entry without its row may be the
last true copy of a value that was damaged in the table.
"""

from __future__ import annotations

import sqlite3

__all__ = ["entries_without_row"]


def entries_without_row(store: sqlite3.Connection) -> list[str]:
    """Return the names of indices that have an entry whose key and values are in no row, or cannot be compared."""
    tables = [str(name) for (name,) in store.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    found = []
    for table in tables:
        listed = store.execute(f"PRAGMA index_list({_quoted(table)})").fetchall()
        itself = None
        if _without_row_ids(store, table):
            # The primary key of such a table is the table itself.
            itself = next(str(name) for _, name, _, origin, *_ in listed if origin == "pk")
        rows = "NOT INDEXED" if itself is None else f"INDEXED BY {_quoted(itself)}"
        names = [str(name) for _, name, *_ in listed if name != itself]
        found += [name for name in names if not _all_have_rows(store, table, rows, name)]
    return found


def _all_have_rows(store: sqlite3.Connection, table: str, by_rows: str, index: str) -> bool:
    columns = []
    for _, number, name, *_ in store.execute(f"PRAGMA index_xinfo({_quoted(index)})"):
        if number == -2:
            return False  # an expression, whose values are in no column
        columns.append("rowid" if number == -1 else _quoted(str(name)))
    # In their exact form: a collation would hide differences.
    values = ", ".join(f"typeof({name}), quote({name})" for name in columns)
    entries = f"SELECT {values} FROM {_quoted(table)} INDEXED BY {_quoted(index)}"  # noqa: S608
    rows = f"SELECT {values} FROM {_quoted(table)} {by_rows}"  # noqa: S608
    try:
        ways = [str(store.execute(f"EXPLAIN QUERY PLAN {query}").fetchall()) for query in (entries, rows)]
        if ["COVERING INDEX" in way for way in ways] != [True, False]:
            return False  # the index alone does not answer the one, or the table alone the other
        return not store.execute(f"SELECT EXISTS ({entries} EXCEPT {rows})").fetchone()[0]
    except sqlite3.Error:
        # It cannot be read, or has entries of some rows only.
        return False


def _without_row_ids(store: sqlite3.Connection, table: str) -> bool:
    listed = store.execute(f"PRAGMA table_list({_quoted(table)})").fetchall()
    return any(without for schema, _, _, _, without, *_ in listed if schema == "main")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
