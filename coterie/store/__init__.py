"""Stores: one schema per role, SQLAlchemy Core, migrated by Alembic, one writer per file."""
