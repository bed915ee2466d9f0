"""Stores of the services: a schema for each role, SQLAlchemy Core, migrated by Alembic, one writer for each file."""
