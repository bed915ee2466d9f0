"""The migrations of every role make exactly the tables that its module declares."""

import importlib

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from coterie.store.engine import open_sqlite

ROLES = ["client", "cos", "data_owner", "expansion", "thirdparty"]
"""Names of modules in ``coterie.store`` and of their folders of revisions."""


@pytest.mark.parametrize("role", ROLES)
def test_migrating_an_empty_file_gives_the_declared_tables(role, tmp_path):
    metadata = importlib.import_module(f"coterie.store.{role}").metadata
    engine = open_sqlite(tmp_path / "store.db", role)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
    engine.dispose()


@pytest.mark.parametrize("role", ROLES)
def test_opening_a_migrated_file_again_changes_nothing(role, tmp_path):
    assert opened(tmp_path / "store.db", role) == opened(tmp_path / "store.db", role)


def opened(path, role):
    engine = open_sqlite(path, role)
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT name, sql FROM sqlite_master ORDER BY name").all()
    engine.dispose()
    return rows
